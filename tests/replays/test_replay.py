"""Replayed messages are the file's, in its order, and no schedule deadlocks."""

import gc
import itertools
import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.measuring.fakes import context
from tests.ranks_pool import Pool
from tests.replays.replays_on_ranks import replay, verify_wrong_messages

from stepmark.cases.plan import Entry, ReplayHow
from stepmark.cases.replay_case import ReplayCase
from stepmark.cli import main
from stepmark.measuring.verify import TORCH_DTYPE
from stepmark.replays.bench.bench import ReplayBench
from stepmark.step import native
from stepmark.step.rank_program import check_ends, program
from stepmark.step.workload import CommOp, Workload

_TINY = "--scale tiny --world-size 4 --mbs 1"


def layouts(sizes: slice) -> Iterator[str]:
    """Jobs of four ranks: parallelism, schedules, micro-batches; of each these global batches.

    A larger batch has more micro-batches.
    """

    def batches(*counts: int) -> tuple[int, ...]:
        return counts[sizes]

    for tp, pp, gbs in itertools.product((1, 2), (1, 2, 4), batches(4, 8)):
        if tp * pp <= 4:
            layout = f"--tp {tp} --pp {pp} --gbs {gbs}"
            yield f"--framework megatron --model llama-2-7b {layout}"
    for gbs, more in itertools.product(
        batches(8, 16), ("--vpp 2", "--tp 2 --vpp 2", "--tp 2 --sp")
    ):
        yield f"--framework megatron --model llama-2-7b --pp 2 --gbs {gbs} {more}"
    for gbs in batches(8, 16):
        layout = f"--pp 4 --vpp 2 --num-layers 8 --gbs {gbs}"
        yield f"--framework megatron --model llama-2-7b {layout}"
        layout = f"--pp 4 --num-layers 8 --gbs {gbs} --pp-schedule interleaved"
        yield f"--framework pp --model llama-3.1-8b {layout}"
    for stage, gbs in itertools.product((0, 1, 2, 3), batches(4, 8)):
        yield f"--framework deepspeed --zero-stage {stage} --model gpt2-125m --gbs {gbs}"
    for gbs, more in itertools.product(
        batches(4, 8), ("", "--recompute full", "--dp-replicate 2")
    ):
        yield f"--framework fsdp --model llama-3.1-8b --gbs {gbs} {more}"
        yield f"--framework fsdp --model gpt2-125m --gbs {gbs} {more}"
    for gbs in batches(4, 8, 12):
        yield f"--framework ddp --model gpt2-125m --gbs {gbs}"
        yield f"--framework fsdp --model llama-3.1-8b --tp 2 --gbs {gbs}"
        yield f"--framework fsdp --model mixtral-8x7b --ep 2 --gbs {gbs}"
        yield f"--framework fsdp --model llama-3.1-8b --pp 2 --gbs {4 * gbs}"
        yield f"--framework megatron --model mixtral-8x7b --tp 2 --ep 2 --sp --gbs {gbs}"
        hops = "--ep 4 --moe-token-dispatcher-type flex --moe-deepep-gpus-per-host 2"
        wide = "--model mixtral-8x7b --scale 1/16 --num-layers 2"  # rows of 256
        yield f"--framework megatron {wide} {hops} --gbs {gbs}"
    for pp, schedule in (
        (2, "1f1b"),
        (4, "1f1b"),
        (2, "interleaved"),
        (2, "gpipe"),
        (4, "gpipe"),
    ):
        layout = f"--pp {pp} --tp {4 // pp} --gbs 8 --pp-schedule {schedule}"
        yield f"--framework pp --model llama-3.1-8b {layout}"


SMALLEST, ALL = list(layouts(slice(1))), list(layouts(slice(None)))


def generated(folder: Path, listed: list[str]) -> dict[str, Path]:
    made = {}
    for number, words in enumerate(listed):
        path = folder / f"{number}.json"
        command = ["workload", "generate", *shlex.split(f"{_TINY} {words}"), "-o", str(path)]
        assert main.status(command) == 0, words
        made[words] = path
    return made


def expected(workload: Workload, rank: int) -> list[tuple[str, tuple[int, ...], str, int]]:
    """The calls of a rank by the file: those of one rank alone are none."""
    calls = []
    for step in program(workload, rank):
        op = step.op
        if isinstance(op, CommOp) and len(step.members) > 1:
            size = op.message_bytes(workload.groups[op.group])
            kind = op.collective.replace("_v", "")
            dtype = "" if kind == "barrier" else str(TORCH_DTYPE[op.dtype])
            calls.append((kind, tuple(sorted(step.members)), dtype, size))
    return calls


@pytest.mark.parametrize(
    "listed", [SMALLEST, pytest.param(ALL, marks=pytest.mark.slow)], ids=["smallest", "all"]
)
def test_calls_are_those_of_the_file_in_its_order_and_every_schedule_ends(
    listed: list[str], tmp_path: Path
) -> None:
    assert len(listed) >= 30
    files = generated(tmp_path, listed)
    workloads = {words: native.read(path) for words, path in files.items()}
    for workload in workloads.values():
        check_ends(workload)
    with Pool(4) as pool:
        by_rank = pool.run(replay, list(workloads.values()), timeout_s=480)
    for rank, results in enumerate(by_rank):
        for (words, workload), (calls, spans, check) in zip(
            workloads.items(), results, strict=True
        ):
            once = expected(workload, rank)
            assert calls == once + once, words  # with overlap, and blocking
            assert check.num_wrong == 0, words
            assert check.num_compared > 0, words
            steps = program(workload, rank)
            ends: dict[str, float] = {}
            for step, (start, time_s) in zip(steps, spans, strict=True):
                timed = not math.isnan(time_s)
                is_message = isinstance(step.op, CommOp) and len(step.members) > 1
                if is_message and timed and not step.op.fused:  # type: ignore[union-attr]
                    # None begins before the end of the one before it, except inside of it.
                    before, end = ends.get(step.op.stream, 0.0), start + time_s
                    assert start >= before - 1e-9 or end <= before + 1e-9, (words, step)
                    ends[step.op.stream] = max(before, end)
                assert timed <= is_message, words
                # Where the host waits for each, all but sends have a time.
                if is_message and step.op.collective != "send":  # type: ignore[union-attr]
                    assert timed, (words, step)


class FakeEngine:
    """An engine that notes whether garbage may be collected while it runs."""

    blocked_s = 0.0

    def __init__(self) -> None:
        self.enabled: list[bool] = []

    def run(self, _spans: object = None) -> None:
        self.enabled.append(gc.isenabled())


def test_nothing_is_collected_while_iterations_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine()
    program = SimpleNamespace(steps=[], computation=SimpleNamespace(event_s=0.0))
    monkeypatch.setattr(ReplayBench, "_prepare", lambda _self, _case: program)
    monkeypatch.setattr(ReplayBench, "_engine", lambda _self, _program: engine)
    case = ReplayCase(file="job.json", digest="0", num_ranks=1, device="cpu")
    bench = ReplayBench(context(), ReplayHow(warmups=1, iterations=3, passes=2))
    record = bench.measure(Entry(position=0, launch=1, case=case), None)
    assert len(record.samples.seconds[0]) == 3
    assert engine.enabled == [False] * 6
    assert gc.isenabled()


def test_wrong_data_is_found(tmp_path: Path) -> None:
    """One flipped bit of a sum on one rank; sends that carry zeros."""
    words = "--framework megatron --model llama-2-7b --tp 2 --pp 2 --gbs 4"
    files = generated(tmp_path, [words])
    with Pool(4) as pool:
        by_rank = pool.run(verify_wrong_messages, str(files[words]), timeout_s=60)
    assert all(counts["nothing"][0] == 0 < counts["nothing"][1] for counts in by_rank)
    assert [counts["element"][0] > 0 for counts in by_rank] == [False, True, False, False]
    assert all(counts["sends"][0] > 0 for counts in by_rank)
