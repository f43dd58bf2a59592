"""Who was gone when SIGTERM came: a launcher's answer to a death, or a user's wish."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from stepmark.ground.processes import LocalPeers

pytestmark = pytest.mark.ranks

Peer = subprocess.Popen[bytes]


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    started = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        for _ in range(2)
    ]
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def local_peers(peers: list[Peer]) -> Iterator[LocalPeers]:
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    watched = LocalPeers({1: peers[0].pid, 2: peers[1].pid, 3: 2**22 + 1})
    yield watched
    watched.close()
    signal.signal(signal.SIGTERM, before)


def test_a_death_before_sigterm_is_seen_and_one_after_it_is_not(
    local_peers: LocalPeers, peers: list[Peer]
) -> None:
    peers[0].kill()
    assert local_peers.wait_for_end(2.0) == (1,)
    os.kill(os.getpid(), signal.SIGTERM)
    end_s = time.monotonic() + 2
    while not local_peers.gone and time.monotonic() < end_s:
        time.sleep(0.01)
    peers[1].kill()
    peers[1].wait()
    assert local_peers.gone == (1,), "nor is rank 3, which was never seen"


def test_nobody_is_gone_when_all_live(local_peers: LocalPeers) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert local_peers.wait_for_end(0.2) == ()
    assert local_peers.gone == ()


def test_who_is_stopped(local_peers: LocalPeers, peers: list[Peer]) -> None:
    peers[1].send_signal(signal.SIGSTOP)
    end_s = time.monotonic() + 2
    while not local_peers.stopped and time.monotonic() < end_s:
        time.sleep(0.01)
    assert local_peers.stopped == [2]


def test_the_wakeup_descriptor_is_given_back(peers: list[Peer]) -> None:
    before = signal.set_wakeup_fd(-1)
    LocalPeers({1: peers[0].pid}).close()
    assert signal.set_wakeup_fd(before) == -1
