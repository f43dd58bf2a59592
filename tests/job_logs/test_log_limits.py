"""Bad, mangled and long logs; and what is made of the facts for people and for files."""

import gzip
import random
import time
import tracemalloc
from itertools import islice
from pathlib import Path

import pytest

from stepmark.findings.log_facts import MAX_RANKS
from stepmark.ground.errors import ConfigError
from stepmark.job_logs.log_summary import (
    choice_rows,
    communicator_rows,
    fact_lines,
    fact_rows,
    prediction_rows,
    transport_rows,
)
from stepmark.job_logs.nccl_log import lines as log_lines
from stepmark.job_logs.nccl_log import looks_like_log, read_log
from stepmark.job_logs.nccl_log.diagnosis import diagnose

from . import varied_log
from .nccl_lines import DATA, FSDP8, Issued, coll, facts_of, fsdp8_lines, info, pointer, start


def test_bad_files_are_named(tmp_path: Path) -> None:
    bad = {
        "empty": b"",
        "blank": b"\n\n\n",
        "prose": b"step 1 loss 2.3\n" * 100,
        "binary": bytes(range(256)) * 500,
        "cut.gz": gzip.compress(b"a:1:1 [0] NCCL INFO x\n" * 1000)[:40],
    }
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError) as raised:
            read_log([FSDP8[0], tmp_path / name])
        assert name in str(raised.value).replace("...", "") or len(str(tmp_path)) > 60
    with pytest.raises(ConfigError):
        read_log([tmp_path / "absent"])
    with pytest.raises(ConfigError):
        read_log([tmp_path])
    with pytest.raises(ConfigError):
        read_log([])
    with pytest.raises(ConfigError):
        read_log(FSDP8[:1], num_ranks=0)


def test_logs_are_known_by_their_head() -> None:
    for path in DATA.glob("*.txt"):
        if path.name != "mixed-147.txt":
            assert looks_like_log(path.read_bytes()[:400]), path.name
    assert looks_like_log(b"NCCL version 2.21.5+cuda12.4\n")
    for head in (b"", b"# nccl-tests version 2.13\n", b"\0" * 100, b"NCCL is a library\n"):
        assert not looks_like_log(head)


def test_zeros_and_broken_text_do_not_stop_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "holes.log"
    lines = [b"\0" * 500 + coll(0, Issued()).encode(), b"\xff\xfe" + info(0, "\x80x").encode()]
    path.write_bytes(b"\n".join([*lines, coll(0, Issued()).encode()]))
    facts = read_log([path])
    assert sum(tally.calls for tally in facts.messages.values()) == 2


def test_one_endless_line_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "endless.log"
    path.write_bytes(b"a:1:1 [0] NCCL INFO x\n" + b"word:1:2 [0] " * 2_000_000)
    begun = time.perf_counter()
    read_log([path])
    assert time.perf_counter() - begun < 20


def mutated(rng: random.Random, line: bytes) -> bytes:
    """A line with something wrong in it."""
    kind, at = rng.randrange(6), rng.randrange(len(line) + 1)
    if kind == 0:
        return line[:at]
    if kind == 1:
        return line[:at] + bytes([rng.randrange(256)]) + line[at + 1 :]
    if kind == 2:
        return line[at:] + line[:at]
    if kind == 3:
        return line[:at] + line[rng.randrange(len(line) + 1) :]
    words = line.split(b" ")
    if kind == 4:
        words.insert(
            rng.randrange(len(words)), rng.choice((b"-1", b"9" * 30, b"0x", b"|", b"\0"))
        )
    else:
        words[rng.randrange(len(words))] = rng.choice(words)
    return b" ".join(words)


def test_mangled_lines_raise_nothing_else(tmp_path: Path) -> None:
    rng = random.Random(7)
    real = gzip.decompress(FSDP8[0].read_bytes()).split(b"\n")
    seen: dict[bytes, list[bytes]] = {}
    for line in real:
        seen.setdefault(line[:45], []).append(line)
    corpus = [line for lines in seen.values() for line in lines[:12] if line]
    for path in DATA.glob("*.txt"):
        corpus += [line for line in path.read_bytes().split(b"\n") if line]
    read = 0
    for _ in range(20):
        lines = [mutated(rng, rng.choice(corpus)) for _ in range(400)]
        path = tmp_path / "mangled.log"
        path.write_bytes(b"\n".join(lines))
        facts = read_log([path])
        findings = diagnose(facts)
        assert fact_lines(facts)
        assert all(finding.text for finding in findings)
        assert all(tally.calls > 0 for tally in facts.messages.values())
        read += facts.num_lines
    assert read >= 8000


def test_rows_are_flat_and_alike() -> None:
    facts = read_log(FSDP8)
    for rows in (
        *(fact_rows(facts), communicator_rows(facts)),
        *(transport_rows(facts), choice_rows(facts), prediction_rows(facts)),
    ):
        assert rows
        assert len({tuple(row) for row in rows}) == 1
        for row in rows:
            assert all(
                value is None or isinstance(value, str | int | float | bool)
                for value in row.values()
            )
    text = "\n".join(fact_lines(facts))
    assert "8 ranks, 1 node, 24 coll, 0 nvls, 32 p2p channels" in text
    assert "P2P/CUMEM: 192 connections, 8 pairs of ranks (192 inside hosts)" in text


def long_log(path: Path, num_bytes: int) -> None:
    """Calls as in the sample, with addresses and opCounts that change."""
    calls = [
        line.encode()
        for lines in fsdp8_lines()[:2]
        for line in lines
        if " opCount " in line or " Bytes -> " in line
    ]
    rng, size = random.Random(1), 0
    with path.open("wb") as out:
        while size < num_bytes:
            for line in calls:
                if b" opCount " in line:
                    low, high = line.index(b" opCount "), line.index(b" count ")
                    middle = b" opCount %x sendbuff %#x recvbuff %#x" % (
                        size,
                        rng.getrandbits(47),
                        rng.getrandbits(47),
                    )
                    line = line[:low] + middle + line[high:]  # noqa: PLW2901
                size += out.write(line + b"\n")


def test_20_mb_in_less_than_a_second(tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    long_log(path, 20_000_000)
    seconds = []
    for _ in range(2):
        begun = time.perf_counter()
        facts = read_log([path])
        seconds.append(time.perf_counter() - begun)
    assert sum(tally.calls for tally in facts.messages.values()) > 60_000
    assert path.stat().st_size / min(seconds) > 25e6


def test_memory_grows_by_a_few_bytes_per_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_lines, "BLOCK_BYTES", 256 * 1024)
    peaks, calls = [], []
    for num_bytes in (2_000_000, 10_000_000):
        path = tmp_path / "long.log"
        long_log(path, num_bytes)
        tracemalloc.start()
        facts = read_log([path])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        calls.append(sum(tally.calls for tally in facts.messages.values()))
    assert calls[1] > 4 * calls[0]
    # 8 in the sequence, that as much again while it grows or is compared, in two copies.
    assert peaks[1] - peaks[0] < 24 * (calls[1] - calls[0]) + 200_000


@pytest.mark.parametrize("num_ranks", [str(MAX_RANKS + 1), "000001000000"])
def test_an_absurd_number_of_ranks_makes_a_line_unreadable(num_ranks: str) -> None:
    at = pointer(0)
    lines = [
        f"comm {at} rank 0 nRanks {num_ranks} nNodes 1 localRanks 1 localRank 0",
        f"ncclCommInitRank comm {at} rank 0 nranks {num_ranks} cudaDev 0 - Init START",
        f"Init timings - ncclCommInitRank: rank 0 nranks {num_ranks} total 1.60 (kernels 0.4)",
        f"ncclCommInitRank({at}, {num_ranks}, 0x1, 0, 0)",
        f"Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM comm {at} nRanks {num_ranks}",
    ]
    said = [info(0, line) for line in lines]
    said.append(said[3].replace("INFO", "CALL"))
    for line in said:
        found = facts_of([line]).communicators
        assert not [one for one in found if one.num_ranks is not None], line


def test_a_call_among_absurdly_many_ranks_counts_without_them() -> None:
    facts = facts_of([coll(0, Issued(), num_ranks=MAX_RANKS + 1)])
    ((kind, tally),) = facts.messages.items()
    assert (kind.num_ranks, tally.calls) == (None, 1)


def test_the_number_of_ranks_takes_no_memory() -> None:
    tracemalloc.start()
    (found,) = facts_of(
        [
            info(0, f"comm {pointer(0)} rank {rank} nRanks {2**22} cudaDev 0 busId 10")
            for rank in (0, 7)
        ]
    ).communicators
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found.num_ranks, found.num_nodes) == (2**22, None)
    assert peak < 20e6


@pytest.mark.parametrize(("ranks", "num_nodes"), [((0, 1), 1), ((0,), None), ((0, 2), None)])
def test_nodes_are_counted_where_all_ranks_are_there(
    ranks: tuple[int, ...], num_nodes: int | None
) -> None:
    lines = [start(rank)[0] for rank in ranks]
    (found,) = facts_of(lines).communicators
    assert found.num_nodes == num_nodes


@pytest.mark.parametrize("digit", ["²", "٣", "①"])
def test_digits_of_other_scripts_are_no_numbers(digit: str) -> None:
    (choice,) = facts_of(
        [info(0, f"AllReduce: 1024 Bytes -> Algo {digit} proto {digit}"), info(0, f"{digit} x")]
    ).choices
    assert (choice.algorithm, choice.protocol) == (digit, digit)


def test_a_varied_log_is_counted_to_the_call(tmp_path: Path) -> None:
    num_ranks = varied_log.HOSTS * varied_log.GPUS
    text = list(islice(varied_log.lines(), 4 * num_ranks + 3 * num_ranks))
    path = tmp_path / "varied.log"
    path.write_text("\n".join(text) + "\n")
    facts = read_log([path])
    calls = sum(tally.calls for tally in facts.messages.values())
    assert calls == sum(" opCount " in line for line in text) == 3 * num_ranks
    assert {tally.calls // tally.ranks for tally in facts.messages.values()} == {1}
    assert len(facts.processes) == num_ranks
    assert not diagnose(facts)


def test_a_pointer_that_is_used_again_is_another_communicator(tmp_path: Path) -> None:
    """Lines of calls are looked up by their parts, which a new communicator makes invalid."""
    start = "h:1:1 [0] NCCL INFO"
    call = (
        f"{start} AllReduce: opCount 0 sendbuff 0x1 recvbuff 0x2 count 9 datatype 7 op 0 "
        "root 0 comm 0xa [nranks=2] stream 0x1"
    )
    init = f"{start} ncclCommInitRank comm 0xa rank 0 nranks 2 cudaDev 0 busId 1 commId"
    lines = []
    for name in ("0x77", "0x88"):
        lines += [
            f"{init} {name} - Init START",
            f"{init} {name} - Init COMPLETE",
            call,
            call,
            call,
        ]
    path = tmp_path / "log.txt"
    path.write_text("\n".join(lines) + "\n")
    facts = read_log([path])
    assert {kind.group: tally.calls for kind, tally in facts.messages.items()} == {
        "0x77": 3,
        "0x88": 3,
    }
