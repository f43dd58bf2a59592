"""Chromium on a page, driven over its DevTools protocol through a pipe.

python -m tests.browser PAGE FOLDER     write the pictures of docs/images/page*.png
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--remote-debugging-pipe"),
)
# Of pictures for the documents: name, width and height in pixels, scheme.
_SCREENS = (
    *(("page", 1280, 960, scheme) for scheme in ("light", "dark")),
    *(("page-phone", 390, 844, scheme) for scheme in ("light", "dark")),
)


class Tab:
    """A page that is open. problems: errors and warnings of its console."""

    def __init__(self, commands: int, replies: int) -> None:
        self._commands, self._replies = commands, replies
        self._data = b""  # of replies that are not read yet
        self._number, self._session = 0, ""
        self.problems: list[str] = []
        self._shown: tuple[Path, int, str] | None = None  # page, width and scheme
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                result: dict[str, Any] = reply["result"]
                return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._data:
            piece = os.read(self._replies, 1 << 20)
            assert piece, "the browser has ended"
            self._data += piece
        data, _, self._data = self._data.partition(b"\0")
        message: dict[str, Any] = json.loads(data)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        event = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(event["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if event["type"] in ("error", "warning"):
                self.problems.append(str(event["args"]))
            case "Log.entryAdded" if event["entry"]["level"] in ("error", "warning"):
                self.problems.append(event["entry"]["text"])

    def open(self, page: Path, *, width: int, scheme: str = "light", height: int = 900) -> None:
        """Load a page on a screen of this width, in a light or dark scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 640,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=page.absolute().as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass
        self.value("new Promise(done => setTimeout(done, 300))")
        self._shown = page, width, scheme

    def show(self, page: Path, *, width: int, scheme: str) -> None:
        """Load a page unless the tab shows it already: large ones take seconds."""
        if self._shown != (page, width, scheme):
            self.open(page, width=width, scheme=scheme)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, of a promise once it has one."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        return result["result"].get("value")

    def picture(self, *, top: float = 0, height: float | None = None) -> bytes:
        """Return the page as a PNG, from `top` and so high; all of it without a height."""
        sizes = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {
            "x": 0,
            "y": top,
            "width": self.value("innerWidth"),
            "height": height or sizes["height"] - top,
            "scale": 1,
        }
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def pdf(self) -> bytes:
        """Return the page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])


@contextmanager
def tab() -> Iterator[Tab]:
    """Yield a tab of a new browser, which ends with it."""
    assert PROGRAM
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory() as profile:
        # The browser reads its descriptor 3 and writes 4.
        redirect = f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
        process = subprocess.Popen(
            ["bash", "-c", redirect, "bash", PROGRAM, *_FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(to_browser[0], from_browser[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            yield Tab(to_browser[1], from_browser[0])
        finally:
            os.close(to_browser[1])
            os.close(from_browser[0])
            process.kill()
            process.wait()


def main() -> None:
    """Write the top of a page as PNG files: python -m tests.browser PAGE FOLDER."""
    page, folder = map(Path, sys.argv[1:])
    with tab() as opened:
        for name, width, height, scheme in _SCREENS:
            opened.open(page, width=width, scheme=scheme)
            (folder / f"{name}-{scheme}.png").write_bytes(opened.picture(height=height))


if __name__ == "__main__":
    main()
