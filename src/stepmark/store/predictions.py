"""The prediction of a run, which is written before the step that it predicts is measured.

prediction.json is written once; prediction.sha256 has its hash, as sha256sum writes it. A
prediction that no longer has its hash is refused.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from stepmark.ground import json_text
from stepmark.ground.errors import ConfigError
from stepmark.ground.read_text import read_head, read_whole

FILE = "prediction.json"
HASH_FILE = "prediction.sha256"


def commit(run: Path, document: dict[str, Any]) -> str:
    """Write the prediction of a run that has none, and return its hash.

    Raises ConfigError where it cannot be written.
    """
    text = json.dumps(document, indent=1).encode() + b"\n"
    digest = hashlib.sha256(text).hexdigest()
    try:
        _write(run / FILE, text)
        _write(run / HASH_FILE, f"{digest}  {FILE}\n".encode())
    except OSError as error:
        allowed = f"a folder that has none yet and can be written ({error.strerror})"
        raise ConfigError("prediction", run / FILE, allowed) from None
    return digest


def _write(path: Path, text: bytes) -> None:
    with path.open("xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read(run: Path) -> tuple[dict[str, Any], str] | None:
    """Return the prediction and its hash; None where there is none.

    Raises ConfigError for one that was changed after it was committed.
    """
    if not os.path.exists(run / FILE):
        return None
    text = read_whole(run / FILE, "prediction")
    digest = hashlib.sha256(text).hexdigest()
    try:
        committed = read_head(run / HASH_FILE).decode("ascii").split()[0]
    except (ConfigError, ValueError, IndexError):
        committed = "missing"
    if committed != digest:
        allowed = f"the one that was committed (sha256 {committed[:16]}): it was changed since"
        raise ConfigError("prediction", f"{run / FILE} (sha256 {digest[:16]})", allowed)
    try:
        document = json_text.decode(text, dict[str, Any])
    except ValueError as error:
        raise ConfigError("prediction", run / FILE, f"a JSON object ({error})") from None
    return document, digest
