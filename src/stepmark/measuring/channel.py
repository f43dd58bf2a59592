"""What the agents of two hosts send each other: messages, framed and authenticated."""

import os
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import msgspec

from stepmark.measuring.heartbeat import Heartbeat

# A link that is cut for 5 s recovers; for longer than this, the host counts as lost.
SILENCE_S = 20.0
_AUTHENTICATION_S = 10.0


class _Message(msgspec.Struct, frozen=True, tag=True):
    """Messages are JSON. Ranks are numbers of the whole job."""


class Hello(_Message, frozen=True):
    """From an agent: it has joined."""

    host_rank: int
    name: str
    version: str  # of stepmark


class Start(_Message, frozen=True):
    """To an agent: start `python -m MODULE PLAN ARGUMENTS` for these ranks of its host."""

    generation: int  # counts the starts; State and answers name the one they belong to
    module: str
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
    """To an agent, so that silence means a lost leader."""


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
    Hello
    | Start
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

    lost: why nothing can be sent or received any more; "" while it can.
    """

    def __init__(self, connected: socket.socket, key: bytes, *, accepts: bool) -> None:
        """Authenticate both ends. Raises OSError, EOFError or AuthenticationError."""
        self.own_address, self.other_address = (
            str(name[0]) for name in (connected.getsockname(), connected.getpeername())
        )
        self.lost = ""
        self.inbox: deque[Message] = deque()
        self.interrupted: int | None = None  # a signal that the other end got
        connected.setblocking(True)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":  # the kernel gives up what nobody acknowledges
            limit_ms = int(SILENCE_S * 1000)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
        self._connection = Connection(connected.detach())
        self._lock = threading.Lock()
        self._silence_s = 0.0
        self._looked_s = time.monotonic()
        self._is_heard = False
        watch = threading.Timer(_AUTHENTICATION_S, self.close)
        watch.start()
        try:
            steps = [deliver_challenge, answer_challenge]
            for step in steps if accepts else reversed(steps):
                step(self._connection, key)
        except BaseException:
            self.close()
            raise
        finally:
            watch.cancel()
        threading.Thread(target=self._receive, name="channel", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message, or set `lost`."""
        try:
            with self._lock:
                self._connection.send_bytes(msgspec.json.encode(message))
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
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)  # ends a blocked receive

    def _receive(self) -> None:
        try:
            while True:
                message = _DECODER.decode(self._connection.recv_bytes())
                self._is_heard = True
                if isinstance(message, Interrupted):
                    self.interrupted = message.number
                else:
                    self.inbox.append(message)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            self.lost = self.lost or _reason(error)


def _reason(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "it has closed the connection"
    return f"its connection failed ({getattr(error, 'strerror', None) or error})"
