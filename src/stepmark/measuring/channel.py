"""What the agents of two hosts send each other: messages, framed and authenticated.

Nothing that arrives is code: a message is JSON of one of the types below, and what it starts is
named by a key of `ENTRIES`.
"""

import hashlib
import hmac
import secrets
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress

import msgspec

from stepmark import __version__
from stepmark.ground.errors import ConfigError
from stepmark.measuring.heartbeat import Heartbeat
from stepmark.measuring.job import Job

# A link that is cut for 5 s recovers; for longer than this, the host counts as lost.
SILENCE_S = 20.0
# Protocol 1 had no code per frame.
VERSION = f"{__version__} (protocol 2)"
_AUTHENTICATION_S = 10.0
_MAC_BYTES = 32
_MAX_HELLO_BYTES = 4096  # before the other end has proved that it has the key
_MAX_FRAME_BYTES = 256 * 2**20  # plans and stacks are far smaller


class ForgedError(ConnectionError):
    """Data that does not carry the MAC of the key and its position."""

    def __init__(self) -> None:
        super().__init__("data with another key, or altered, repeated or left out on its way")


def add_mac(key: bytes, body: bytes, position: bytes = b"") -> bytes:
    """Return a body with a message authentication code (HMAC-SHA256) before it."""
    return hmac.digest(key, position + body, "sha256") + body


def check_mac(key: bytes, frame: bytes, position: bytes = b"") -> bytes:
    """Return the body of a frame. Raises ForgedError."""
    body = frame[_MAC_BYTES:]
    expected = hmac.digest(key, position + body, "sha256")
    if not hmac.compare_digest(frame[:_MAC_BYTES], expected):
        raise ForgedError
    return body


class Hello(msgspec.Struct, frozen=True):
    """The first frame of both ends. It has no MAC, but the keys of all MACs depend on it."""

    host_rank: int
    name: str
    version: str
    nonce: str  # random, so that no frame of another connection is valid in this one


class _Message(msgspec.Struct, frozen=True, tag=True):
    """Messages are JSON. Ranks are numbers of the whole job."""


class Start(_Message, frozen=True):
    """To an agent: start an entry of ENTRIES for these ranks of its host."""

    generation: int  # counts the starts; State and answers name the one they belong to
    entry: str  # a key of ENTRIES, which has the module
    arguments: tuple[str, ...]
    plan: str  # text of the file
    first_rank: int
    count: int
    world_size: int
    first: int  # position at which ranks begin
    store_port: int


class SendSignal(_Message, frozen=True):
    """To an agent: send a signal to these ranks."""

    number: int
    ranks: tuple[int, ...]


class Diagnose(_Message, frozen=True):
    """To an agent: send a Diagnosis of these ranks."""

    ranks: tuple[int, ...]


class Kill(_Message, frozen=True):
    """To an agent: SIGKILL its ranks, and send Killed."""


class End(_Message, frozen=True):
    """To an agent: the job has ended with this exit code."""

    code: int


class Alive(_Message, frozen=True):
    """The first message of both ends; then to an agent, so that silence means a lost leader."""


class State(_Message, frozen=True):
    """From an agent: its ranks, and its clock that their beats are on."""

    generation: int
    now_s: float
    beats: tuple[Heartbeat, ...]
    codes: dict[int, int]  # exit codes of those that have ended
    pids: dict[int, int]
    states: dict[int, str]  # psutil's


class Diagnosis(_Message, frozen=True):
    """From an agent: stacks and flight recorders by rank."""

    generation: int
    stacks: dict[int, str]
    flight: dict[int, str]


class Killed(_Message, frozen=True):
    """From an agent: its ranks have ended, but for the survivors."""

    generation: int
    survivors: tuple[int, ...]  # pids


class Interrupted(_Message, frozen=True):
    """From an agent: it got this signal."""

    number: int


Message = (
    Start
    | SendSignal
    | Diagnose
    | Kill
    | End
    | Alive
    | State
    | Diagnosis
    | Killed
    | Interrupted
)
_DECODER = msgspec.json.Decoder(Message)


class Channel:
    """A connection to another agent. A thread receives, so that no link can block the caller.

    other: the hello of the other end. lost: why nothing can be sent or received any more; ""
    while it can.
    """

    def __init__(self, connected: socket.socket, job: Job, version: str = VERSION) -> None:
        """Wait until the other end has proved that it has the key of the job.

        The first message to an agent is left to its leader, which may yet refuse it. Raises
        OSError, EOFError, RuntimeError (no more threads), or ForgedError for another key.
        """
        self.lost = ""
        self.inbox: deque[Message] = deque()
        self.interrupted: int | None = None  # a signal that the other end got
        self._socket = connected
        self._lock = threading.Lock()
        self._num_sent = 0
        self._num_received = 0
        self._silence_s = 0.0
        self._looked_s = time.monotonic()
        self._is_heard = False
        self._end_s: float | None = time.monotonic() + _AUTHENTICATION_S
        try:
            self.own_address, self.other_address = (
                str(name[0]) for name in (connected.getsockname(), connected.getpeername())
            )
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sys.platform == "linux":  # the kernel gives up what nobody acknowledges
                limit_ms = int(SILENCE_S * 1000)
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
            self._shake_hands(job, version)
            self._end_s = None
            connected.settimeout(None)
            threading.Thread(target=self._receive, name="channel", daemon=True).start()
        except BaseException:
            connected.close()
            raise

    def _shake_hands(self, job: Job, version: str) -> None:
        nonce = secrets.token_hex(16)
        own = msgspec.json.encode(Hello(job.rank, job.hosts[job.rank], version, nonce))
        self._write(own)
        other = self._read_frame(_MAX_HELLO_BYTES)
        try:
            self.other = msgspec.json.decode(other, type=Hello)
        except msgspec.MsgspecError:
            raise ConnectionError("the other end is no agent of this stepmark") from None
        hellos = (own, other) if job.leads else (other, own)
        # A key per direction: what an end has sent is not valid when it comes back.
        digest = b"".join(hashlib.sha256(hello).digest() for hello in hellos)
        from_leader = hmac.digest(job.key, b"from the leader" + digest, "sha256")
        to_leader = hmac.digest(job.key, b"to the leader" + digest, "sha256")
        keys = (from_leader, to_leader) if job.leads else (to_leader, from_leader)
        self._own_key, self._other_key = keys
        if not job.leads:
            self.send(Alive())
        try:
            self._check(self._read_frame(_MAX_HELLO_BYTES))
        except ForgedError:
            self._write(b"")  # has no MAC, by which the other end notices its key
            raise

    def version_error(self) -> ConfigError | None:
        """Return the error of another version at the other end."""
        if self.other.version == VERSION:
            return None
        value = f"{self.other.version} on host {self.other.name}"
        return ConfigError("stepmark", value, f"{VERSION}, as on this host")

    def send(self, message: Message) -> None:
        """Send a message, or set `lost`."""
        body = msgspec.json.encode(message)
        if len(body) > _MAX_FRAME_BYTES - _MAC_BYTES:
            mib = _MAX_FRAME_BYTES >> 20
            self.lost = self.lost or f"a message for it is larger than {mib} MiB"
            return
        try:
            with self._lock:
                self._num_sent += 1
                self._write(add_mac(self._own_key, body, self._num_sent.to_bytes(8)))
        except OSError as error:
            self.lost = self.lost or _reason(error)

    def poll(self) -> None:
        """Set `lost` after a long silence.

        Time in which this process was stopped does not count, so a job whose processes are
        all stopped and continued goes on.
        """
        now_s = time.monotonic()
        passed_s = now_s - self._looked_s
        self._looked_s = now_s
        self._silence_s = 0.0 if self._is_heard else self._silence_s + min(passed_s, 2.0)
        self._is_heard = False
        if self._silence_s > SILENCE_S:
            self.lost = self.lost or f"it has been silent for {SILENCE_S:.0f} s"

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends a blocked receive

    def _receive(self) -> None:
        try:
            while True:
                message = _DECODER.decode(self._check(self._read_frame(_MAX_FRAME_BYTES)))
                self._is_heard = True
                if isinstance(message, Interrupted):
                    self.interrupted = message.number
                else:
                    self.inbox.append(message)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            self.lost = self.lost or _reason(error)
        self.close()  # what comes after a forged frame is not read
        with self._lock:  # no `send` uses the descriptor any more
            self._socket.close()

    def _check(self, frame: bytes) -> bytes:
        self._num_received += 1
        return check_mac(self._other_key, frame, self._num_received.to_bytes(8))

    def _write(self, frame: bytes) -> None:
        self._socket.sendall(len(frame).to_bytes(4) + frame)

    def _read_frame(self, max_bytes: int) -> bytes:
        num_bytes = int.from_bytes(self._read(4))
        if num_bytes > max_bytes:
            raise ConnectionError(f"{num_bytes} bytes at once, more than {max_bytes}")
        return self._read(num_bytes)

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            if self._end_s is not None:  # however slowly the other end sends
                self._socket.settimeout(max(0.001, self._end_s - time.monotonic()))
            part = self._socket.recv(min(num_bytes - len(data), 2**20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


def _reason(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "it has closed the connection"
    return f"its connection failed ({getattr(error, 'strerror', None) or error})"
