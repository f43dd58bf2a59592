"""The network between agents: what a stranger, or a host on the way, can and cannot do."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec import json
from tests.ranks_pool import Pool

from stepmark.ground.errors import ConfigError
from stepmark.measuring import agent, channel, job, leader, local_ranks
from stepmark.measuring.channel import Alive, Channel, End, ForgedError, Interrupted, Start
from stepmark.measuring.job import Job
from stepmark.measuring.leader import Leader, LostHostError

pytestmark = pytest.mark.ranks

KEY = b"0123456789abcdef"
START = Start(1, "rank", ("/tmp/run",), "{}", 1, 1, 2, 0, 29500)
FORGED = "altered, repeated or left out on its way"
Ends = tuple[Channel | Exception, Channel | Exception]
Address = tuple[str, int]
# What a host on the way sends instead of a frame. 0 is a hello, 1 the first message.
Alter = Callable[[int, bytes], list[bytes]]


def job_of(rank: int, key: bytes = KEY, port: int = 0, join_s: float = 5.0) -> Job:
    hosts = ("127.0.0.1", "n2")
    return Job(hosts=hosts, rank=rank, port=port, key=key, nproc=None, join_s=join_s)


def wait(is_done: Callable[[], object], limit_s: float = 5.0) -> None:
    end_s = time.monotonic() + limit_s
    while not is_done() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert is_done()


def read_frame(end: socket.socket) -> bytes | None:
    head = end.recv(4, socket.MSG_WAITALL)
    size = int.from_bytes(head)
    if not head:
        return None
    return end.recv(size, socket.MSG_WAITALL) if size else b""


def write_frame(end: socket.socket, frame: bytes) -> None:
    end.sendall(len(frame).to_bytes(4) + frame)


OPEN: list[socket.socket] = []


@pytest.fixture(autouse=True)
def _all_is_closed() -> Iterator[None]:
    yield
    for each in OPEN:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
    OPEN.clear()
    wait(lambda: all(thread.name != "channel" for thread in threading.enumerate()))


def connect_to(address: Address, source: str = "127.0.0.1") -> socket.socket:
    OPEN.append(socket.create_connection(address, source_address=(source, 0)))
    return OPEN[-1]


def connected_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = connect_to(server.getsockname())
        here, _ = server.accept()
    OPEN.append(here)
    return here, there


def forward(source: socket.socket, target: socket.socket, alter: Alter) -> None:
    """Pass frames on until the source ends."""
    number = 0
    with suppress(OSError):
        while (frame := read_frame(source)) is not None:
            for each in alter(number, frame):
                write_frame(target, each)
            number += 1
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def unchanged(number: int, frame: bytes) -> list[bytes]:
    return [frame]


def ends_of(
    jobs: tuple[Job, Job],
    to_agent: Alter = unchanged,
    to_leader: Alter = unchanged,
    version: str = channel.VERSION,
) -> Ends:
    """Return both ends of a channel through a relay. Its frames are altered on their way."""
    ends: list[Channel | Exception] = [OSError(), OSError()]
    (here, relay_here), (relay_there, there) = connected_pair(), connected_pair()

    def connect(end: socket.socket, own: Job) -> None:
        try:
            both = Channel(end, own, version if own.leads else channel.VERSION)
            if own.leads:
                both.send(Alive())
            ends[own.rank] = both
        except (OSError, EOFError) as error:
            ends[own.rank] = error

    threads = [
        threading.Thread(target=connect, args=(here, jobs[0])),
        threading.Thread(target=connect, args=(there, jobs[1])),
        threading.Thread(target=forward, args=(relay_here, relay_there, to_agent)),
        threading.Thread(target=forward, args=(relay_there, relay_here, to_leader)),
    ]
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads[:2]:
        thread.join()
    return ends[0], ends[1]


def joined(
    to_agent: Alter = unchanged, to_leader: Alter = unchanged
) -> tuple[Channel, Channel]:
    first, second = ends_of((job_of(0), job_of(1)), to_agent, to_leader)
    assert isinstance(first, Channel), first
    assert isinstance(second, Channel), second
    return first, second


def test_messages_arrive_in_order_and_an_end_is_noticed() -> None:
    first, second = joined()
    messages = [Alive(), START, End(3)]
    for message in messages:
        second.send(message)
    second.send(Interrupted(15))
    second.close()
    wait(lambda: first.lost)
    assert list(first.inbox) == messages
    assert first.interrupted == 15
    assert first.lost == "it has closed the connection"
    assert (first.other.host_rank, second.other.name) == (1, "127.0.0.1")
    first.send(Alive())
    first.close()


def test_another_key_is_refused() -> None:
    first, second = ends_of((job_of(0), job_of(1, KEY[::-1])))
    assert isinstance(first, ForgedError)
    assert isinstance(second, ForgedError), "so that it does not try again for minutes"


def test_silence_is_a_lost_host_unless_we_were_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = joined()
    now = [time.monotonic()]
    monkeypatch.setattr(channel.time, "monotonic", lambda: now[0])
    first.poll()
    now[0] += 3600.0  # stopped, as by `scontrol suspend`
    first.poll()
    assert not first.lost
    for _ in range(int(channel.SILENCE_S) - 3):
        now[0] += 1.0
        first.poll()
    assert not first.lost
    for _ in range(4):
        now[0] += 1.0
        first.poll()
    assert first.lost == "it has been silent for 20 s"
    first.close()
    second.close()


# A host on the way of a connection that is joined


def flipped(frame: bytes, place: int = -1) -> bytes:
    changed = bytearray(frame)
    changed[place] ^= 1
    return bytes(changed)


def swapping() -> Alter:
    kept: list[bytes] = []

    def alter(number: int, frame: bytes) -> list[bytes]:
        if number == 3:
            kept.append(frame)
            return []
        return [frame, *kept] if number == 4 else [frame]

    return alter


def at(place: int, change: Callable[[bytes], list[bytes]]) -> Alter:
    return lambda number, frame: change(frame) if number == place else [frame]


ATTACKS: dict[str, Callable[[], Alter]] = {
    "alter the text": lambda: at(3, lambda frame: [flipped(frame)]),
    "alter the code": lambda: at(3, lambda frame: [flipped(frame, 0)]),
    "replay": lambda: at(2, lambda frame: [frame, frame]),
    "reorder": swapping,
    "leave out": lambda: at(3, lambda frame: []),
    "cut": lambda: at(3, lambda frame: [frame[:-1]]),
    "inject a start": lambda: at(3, lambda frame: [json.encode(START), frame]),
    "inject a start with a code of zeros": lambda: at(
        3, lambda frame: [bytes(32) + json.encode(START)]
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("to_agent", [True, False])
def test_a_frame_is_what_was_sent_at_this_place(attack: str, to_agent: bool) -> None:
    """Frames before it arrive; nothing of it or after it does."""
    alter = ATTACKS[attack]()
    first, second = joined(alter) if to_agent else joined(unchanged, alter)
    sender, receiver = (first, second) if to_agent else (second, first)
    sent = [End(code) for code in range(5)]
    for message in sent:  # frames 2 to 6
        sender.send(message)
        time.sleep(0.01)
    wait(lambda: receiver.lost)
    assert FORGED in receiver.lost
    assert list(receiver.inbox) == sent[:1]
    wait(lambda: sender.lost)
    assert sender.lost.startswith(("it has closed the connection", "its connection failed"))


def test_a_frame_that_comes_back_is_refused() -> None:
    """Each direction has a key: what the leader sends is no message to it."""
    seen: list[bytes] = []

    def keep(number: int, frame: bytes) -> list[bytes]:
        seen.append(frame)
        return [frame]

    first, second = joined(keep, at(2, lambda frame: [seen[2]]))
    first.send(START)
    wait(lambda: second.inbox)
    second.send(Alive())
    wait(lambda: first.lost)
    assert FORGED in first.lost
    assert not first.inbox


def test_a_frame_of_another_connection_is_refused() -> None:
    """Both connections have the same key, and the frame the same number."""
    seen: dict[int, bytes] = {}

    def keep(number: int, frame: bytes) -> list[bytes]:
        seen[number] = frame
        return [frame]

    first, second = joined(keep)
    first.send(START)
    wait(lambda: second.inbox)
    _, other = again = joined(at(2, lambda frame: [seen[2]]))
    again[0].send(Alive())
    wait(lambda: other.lost)
    assert FORGED in other.lost
    assert not other.inbox


def test_a_length_is_no_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_MAX_FRAME_BYTES", 100)
    first, second = joined()
    second._write(bytes(101))
    wait(lambda: first.lost)
    assert first.lost == "its connection failed (101 bytes at once, more than 100)"
    second.close()


def test_a_message_that_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = joined()
    monkeypatch.setattr(channel, "_MAX_FRAME_BYTES", 2**20)
    first.send(Start(1, "rank", (), "x" * 2**20, 1, 1, 2, 0, 1))
    assert first.lost == "a message for it is larger than 1 MiB"
    second.close()


# A host on the way of a connection that begins


@pytest.mark.parametrize(
    "alter",
    [
        at(0, lambda frame: [frame.replace(b'"n2"', b'"n3"')]),
        at(0, lambda frame: [frame.replace(b'"host_rank":1', b'"host_rank":0')]),
        at(0, lambda frame: [frame.replace(b"protocol 2", b"protocol 1")]),
        at(1, lambda frame: [flipped(frame)]),
    ],
    ids=["name", "rank", "version", "proof"],
)
def test_a_hello_is_what_was_sent(alter: Alter) -> None:
    first, second = ends_of((job_of(0), job_of(1)), to_leader=alter)
    assert isinstance(first, ForgedError)
    assert isinstance(second, ForgedError)


def test_a_recorded_agent_cannot_join() -> None:
    recorded: list[bytes] = []

    def keep(number: int, frame: bytes) -> list[bytes]:
        recorded.append(frame)
        return [frame]

    first, second = joined(unchanged, keep)
    again, _ = ends_of(
        (job_of(0), job_of(1, b"x" * 16)),
        to_leader=lambda number, frame: recorded[number : number + 1],
    )
    assert isinstance(again, ForgedError)
    first.close()
    second.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_end_does_not_join_itself(rank: int) -> None:
    """All that an end sends comes back to it."""
    here, there = connected_pair()
    threading.Thread(target=forward, args=(there, there, unchanged), daemon=True).start()
    if rank == 0:  # it waits for the first message
        threading.Timer(0.2, lambda: write_frame(there, bytes(40))).start()
    with pytest.raises(ForgedError):
        Channel(here, job_of(rank))


@pytest.mark.parametrize("ranks", [(0, 0), (1, 1)])
def test_two_leaders_or_two_agents_do_not_join(ranks: tuple[int, int]) -> None:
    (here, there), errors = connected_pair(), []

    def connect(end: socket.socket, rank: int) -> None:
        try:
            Channel(end, job_of(rank)).send(Alive())
        except (OSError, EOFError) as error:
            errors.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "_AUTHENTICATION_S", 0.3)
        threads = [
            threading.Thread(target=connect, args=x)
            for x in zip((here, there), ranks, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(errors) == 2


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "timed out"),
        (b"\0\0\0\x04", "timed out"),
        (b"\0\0\0\x02{}", "the other end is no agent of this stepmark"),
        (b"\0\0\0\x0b#CHALLENGE#", "the other end is no agent of this stepmark"),
        (b"GET / HTTP/1.1\r\n", "1195725856 bytes at once, more than 4096"),
    ],
)
def test_what_is_no_agent_is_refused_in_bounded_time(
    data: bytes, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_AUTHENTICATION_S", 0.2)
    here, there = connected_pair()
    there.sendall(data)
    began_s = time.monotonic()
    with pytest.raises(OSError, match=error):
        Channel(here, job_of(0))
    assert time.monotonic() - began_s < 2.0


def test_a_slow_sender_has_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_AUTHENTICATION_S", 0.5)
    here, there = connected_pair()

    def trickle() -> None:
        with suppress(OSError):
            there.sendall((4000).to_bytes(4))
            while True:
                there.sendall(b"x")
                time.sleep(0.05)

    threading.Thread(target=trickle, daemon=True).start()
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        Channel(here, job_of(0))
    assert time.monotonic() - began_s < 2.0


# The leader and strangers


@contextmanager
def leading() -> Iterator[tuple[Leader, Address]]:
    listener = job.listen(0)
    address = ("127.0.0.1", int(listener.getsockname()[1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leader.jobs, "listen", lambda port: listener)
        running = Leader(job_of(0))
        try:
            yield running, address
        finally:
            running._ended.set()
            for each in list(running._channels.values()):
                each.close()
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()


def join(address: Address, key: bytes = KEY) -> Channel | None:
    return agent._join(job_of(1, key, address[1]), [])


def waiting_threads() -> int:
    return sum(thread.name.endswith("(_add)") for thread in threading.enumerate())


def test_silent_connections_do_not_keep_an_agent_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "_MAX_PENDING", 8)
    with leading() as (running, address):
        silent = [connect_to(address) for _ in range(40)]
        wait(lambda: len(running._pending) == 8 and waiting_threads() == 8)  # others have ended
        threads = threading.active_count()
        began_s = time.monotonic()
        end = join(address)
        assert end is not None
        wait(lambda: not running._missing())
        assert time.monotonic() - began_s < 5.0
        assert threading.active_count() <= threads + 2
        running.wait_for_all([])
        for each in silent:
            each.close()
        wait(lambda: not running._pending)
        end.close()


def test_the_host_with_most_connections_loses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "_MAX_PENDING", 4)
    with leading() as (running, address):
        lone = connect_to(address, "127.0.0.2")
        wait(lambda: running._pending)
        many = [connect_to(address) for _ in range(20)]
        wait(lambda: len(running._pending) == 4)
        assert list(running._pending.values()).count("127.0.0.2") == 1
        for each in (lone, *many):
            each.close()


def test_what_is_dropped_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place may be taken when it has just authenticated; an agent then connects again."""
    with leading() as (running, address):

        def authenticated(connected: socket.socket, own: Job) -> Channel:
            end = Channel(connected, own)
            running._pending.pop(connected)
            return end

        monkeypatch.setattr(leader, "Channel", authenticated)
        with pytest.raises((OSError, EOFError)):
            Channel(connect_to(address), job_of(1))
        assert running._missing() == ["n2"]
        monkeypatch.undo()


def test_a_leader_without_threads_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    start = threading.Thread.start

    def failing(thread: threading.Thread) -> None:
        if thread.name.endswith("(_add)"):
            begun.append(thread)
            if len(begun) < 3:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", failing)
    with leading() as (running, address):
        end = join(address)
        assert end is not None
        wait(lambda: not running._missing())
        assert len(begun) == 3
        end.close()


def test_strangers_are_named_and_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "_MAX_STRANGERS", 2)
    monkeypatch.setattr(agent, "_RETRY_S", 0.01)
    with leading() as (running, address):
        with pytest.raises(
            ConfigError, match="STEPMARK_KEY is invalid: it must be the same on all"
        ) as error:
            join(address, b"x" * 16)
        assert error.value.exit_code == 2
        wait(lambda: not running._pending)
        for number in range(2, 6):
            with suppress(OSError, EOFError):
                Channel(connect_to(address, f"127.0.0.{number}"), job_of(1, b"x" * 16))
        running._began_s -= 100.0
        text = "1 of 2 hosts did not join within 5 s: n2; another STEPMARK_KEY has 127.0.0.1, "
        with pytest.raises(LostHostError, match=text + r"127\.0\.0\.\d$"):
            running.wait_for_all([])


def test_a_handshake_that_is_altered_once_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_RETRY_S", 0.01)
    connect = socket.create_connection
    with leading() as (running, address):
        altered: list[socket.socket] = []

        def through_relay(*args: Any, **more: Any) -> socket.socket:
            target = connect(*args, **more)
            OPEN.append(target)
            if altered:
                return target
            altered.append(target)
            here, there = connected_pair()
            change = at(0, lambda frame: [frame.replace(b'"n2"', b'"n3"')])
            for way in ((there, target, change), (target, there, unchanged)):
                threading.Thread(target=forward, args=way, daemon=True).start()
            return here

        monkeypatch.setattr(agent.socket, "create_connection", through_relay)
        end = join(address)
        assert end is not None
        wait(lambda: not running._missing())
        assert altered
        end.close()


def test_other_versions_are_named_on_both_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    with leading() as (running, address):
        error = Channel(connect_to(address), job_of(1), "0.0.9 (protocol 1)")
        error.close()
        wait(lambda: running._problem and not running._missing())  # `end` does not wait for it
        rule = f"it must be {channel.VERSION}, as on this host.".replace("(", r"\(")
        text = r"stepmark '0.0.9 \(protocol 1\) on host n2' is invalid: "
        with pytest.raises(ConfigError, match=text + rule.replace("2)", r"2\)")):
            running.wait_for_all([])
    monkeypatch.setattr(Channel.__init__, "__defaults__", ("0.2.0 (protocol 3)",))
    monkeypatch.setattr(channel, "VERSION", "0.1.9 (protocol 2)")
    text = r"stepmark '0\.2\.0 \(protocol 3\) on host 127\.0\.0\.1' is invalid"
    with leading() as (_, address), pytest.raises(ConfigError, match=text):
        join(address)


def test_a_host_joins_once() -> None:
    with leading() as (running, address):
        first = join(address)
        assert first is not None
        wait(lambda: not running._missing())
        second = join(address)
        assert second is not None
        wait(lambda: second.lost)
        assert second.lost == "it has closed the connection"
        assert not first.lost
        first.close()


# What agents and ranks run


def test_an_entry_is_one_of_a_list(tmp_path: Path) -> None:
    """A module that the leader names is refused, whoever it is."""
    with pytest.raises(ConfigError, match="entry os is invalid: it must be one of rank"):
        local_ranks.command_of("os", tmp_path, ())
    first, second = joined()
    served = agent._Agent(job_of(1), second, tmp_path)
    first.send(Start(1, "antigravity", (), "{}", 1, 1, 2, 0, 1))
    wait(lambda: second.inbox)
    with pytest.raises(ConfigError, match="entry antigravity is invalid"):
        served.step()
    first.close()


def test_the_key_may_be_in_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPMARK_HOSTS", "n1,n2")
    monkeypatch.setenv("STEPMARK_HOST_RANK", "1")
    monkeypatch.setenv("STEPMARK_PORT", "29500")
    monkeypatch.delenv("STEPMARK_KEY", raising=False)
    reading, writing = os.pipe()
    os.write(writing, KEY + b"\nmore\n")
    os.close(writing)
    monkeypatch.setenv("STEPMARK_KEY_FD", str(reading))
    for _ in range(2):
        current = job.current()
        assert current is not None
        assert current.key == KEY
    assert os.environ["STEPMARK_KEY"] == KEY.decode(), "its ranks get it"
    assert "STEPMARK_KEY_FD" not in os.environ
    for wrong in ("999", "stdin", "-1"):
        monkeypatch.setenv("STEPMARK_KEY_FD", wrong)
        with pytest.raises(ConfigError, match=f"STEPMARK_KEY_FD {wrong} is invalid"):
            job.current()


def test_ranks_of_one_host_have_a_key_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = local_ranks.Ranks(numbers=range(2), world_size=2)
    monkeypatch.delenv("STEPMARK_KEY", raising=False)
    keys = {local_ranks._environment(ranks)["STEPMARK_KEY"] for _ in range(2)}
    assert [len(key) for key in keys] == [32, 32]
    monkeypatch.setenv("STEPMARK_KEY", "of the job, 16 characters")
    assert local_ranks._environment(ranks)["STEPMARK_KEY"] == "of the job, 16 characters"


class Bomb:
    """Its pickle sets a variable of the process that unpickles it."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return os.putenv, ("STEPMARK_BOMB", "1")


def exchange_objects(ranks: Any) -> list[object]:
    from torch.distributed import distributed_c10d as c10d

    from stepmark.measuring import ranks as ranks_module

    results: list[object] = [ranks.gather(ranks.rank), ranks.decide(lambda: "decision")]
    ran: list[int] = []
    loads = ranks_module.pickle.loads
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks_module.pickle, "loads", lambda data: ran.append(1) or loads(data))
        patch.setattr(c10d, "_pickler", ranks_module.pickle.Pickler)  # no MAC
        try:
            ranks.gather(Bomb())
        except ranks_module.LostPeersError as error:
            results.append(str(error))
    return [*results, len(ran)]


def test_ranks_unpickle_only_what_ranks_have_pickled() -> None:
    with Pool(2, environment={"STEPMARK_KEY": KEY.decode()}) as pool:
        for result in pool.run(exchange_objects):
            gathered, decision, error, num_unpickled = result
            assert (gathered, decision, num_unpickled) == ([0, 1], "decision", 0)
            assert error.startswith("a rank cannot be reached: data with another key")


# Whole jobs

WORDS = ("comm", "all_reduce", "-b", "1K", "-e", "2K", "-f", "2", "-n", "2", "--device", "cpu")


def start(folder: Path, rank: int, port: int) -> "subprocess.Popen[str]":
    """Start the agent of a host, whose leader is at this port."""
    own = folder / str(rank)
    own.mkdir()
    variables = {
        "STEPMARK_HOSTS": "127.0.0.1,127.0.0.2",
        "STEPMARK_HOST_RANK": str(rank),
        "STEPMARK_PORT": str(port),
        "STEPMARK_KEY": KEY.decode(),
        "STEPMARK_NPROC": "1",
        "STEPMARK_JOIN_S": "60",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "stepmark", *WORDS],
        cwd=own,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def is_listening(port: int) -> bool:
    with suppress(OSError):
        connect_to(("127.0.0.1", port))
        return True
    return False


def ended(agents: list["subprocess.Popen[str]"]) -> tuple[list[int], list[str]]:
    """Return exit codes and outputs by host."""
    try:
        outputs = [process.communicate(timeout=120)[0] for process in agents]
    finally:
        for process in agents:
            process.kill()
    assert "Traceback" not in "".join(outputs)
    return [process.returncode for process in agents], outputs


def test_a_job_continues_among_strangers(tmp_path: Path) -> None:
    """Of 1,100 connections most stay silent, the others send what is no hello."""
    port = free_port()
    agents = [start(tmp_path, 0, port)]
    wait(lambda: is_listening(port), 60.0)
    for number in range(1100):
        stranger = connect_to(("127.0.0.1", port))
        if number % 10 == 0:
            with suppress(OSError):
                stranger.sendall(b"\0\0\0\x10" + bytes(16))
    agents.append(start(tmp_path, 1, port))
    codes, outputs = ended(agents)
    assert codes == [0, 0], outputs
    assert outputs[0].count("# Out of bounds values : 0 OK") == 1


def test_a_forged_start_is_a_lost_host(tmp_path: Path) -> None:
    """It comes between the messages of a joined leader, from a relay on its way."""
    port = free_port()
    agents = [start(tmp_path, 0, port)]
    wait(lambda: is_listening(port), 60.0)
    forged = Start(9, "rank", ("--force",), "{}", 1, 1, 2, 0, port)
    inject = at(3, lambda frame: [bytes(32) + json.encode(forged), frame])
    with socket.create_server(("127.0.0.1", 0)) as server:
        agents.append(start(tmp_path, 1, server.getsockname()[1]))
        server.settimeout(60.0)
        there, _ = server.accept()
    OPEN.append(there)
    there.settimeout(None)
    here = connect_to(("127.0.0.1", port))
    for way in ((here, there, inject), (there, here, unchanged)):
        threading.Thread(target=forward, args=way, daemon=True).start()
    codes, outputs = ended(agents)
    assert codes == [3, 3], outputs
    assert "host 127.0.0.2 is lost: it has closed the connection" in outputs[0]
    assert "its leader 127.0.0.1 is lost: its connection failed (data with" in outputs[1]
    assert FORGED in outputs[1]
