"""From flags to cases of communication: combinations, order, notes, what is refused."""

import dataclasses
import json
import shlex
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stepmark.cases.comm_case import CommCase
from stepmark.cli.main import status
from stepmark.collectives import comm_plan
from stepmark.collectives.comm_options import CommOptions, collective_name
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError, NothingToMeasureError
from stepmark.ground.options import argv, build, plain
from stepmark.model.collectives import Api, Collective, Mode, RedOp
from stepmark.runs import dry_run
from stepmark.store.commands import command_of

KIB = 2**10


def cases(names: str, n: int = 2, device: str = "cpu", **values: Any) -> list[CommCase]:
    return planned(names, n, device, **values)[0]


def planned(
    names: str, n: int = 2, device: str = "cpu", **values: Any
) -> tuple[list[CommCase], list[str]]:
    asked: Mapping[str, Any] = {"begin": "1K", "end": "1K"} | values
    options = build(CommOptions, {"names": names.split(), **asked})
    assert build(CommOptions, plain(options)) == options, "a plan keeps what was asked for"
    return comm_plan.plan(options, device, n)


def refused(names: str, n: int = 2, device: str = "cpu", **values: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        planned(names, n, device, **values)
    return caught.value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("alltoall_perf", "all_to_all"),
        ("alltoallv", "all_to_all_v"),
        ("all_to_allv", "all_to_all_v"),
        ("all_reduce_perf", "all_reduce"),
        ("All-Gather", "all_gather"),
        ("reduce_scatter_base", "reduce_scatter"),
        ("sendrecv_perf", "sendrecv"),
        ("p2p-matrix", "p2p_matrix"),
    ],
)
def test_other_tools_names(text: str, expected: str) -> None:
    assert collective_name(text) == expected


def test_the_sweep_is_that_of_nccl_tests() -> None:
    found = [
        case.message_bytes for case in cases("all_reduce", begin="8", end="1K", factor=2.0)
    ]
    assert found == [8, 16, 32, 64, 128, 256, 512, 1024]
    by_step = cases("all_reduce", begin="1K", end="4K", step="1K")
    assert [case.message_bytes for case in by_step] == [1024, 2048, 3072, 4096]
    assert [case.message_bytes for case in cases("all_reduce", begin="4M", end=None)] == [2**22]
    default = cases("all_reduce", begin=None, end=None)
    assert [case.message_bytes for case in default] == [KIB * 4**i for i in range(7)]


def test_order_is_ranks_collective_type_reduction_size_placement_company() -> None:
    found = cases(
        "all_gather all_reduce all_gather",
        n=4,
        ranks="2,4",
        dtype="half,fp32",
        end="2K",
        factor=2.0,
        overlap_with="gemm:8",
    )
    keys = [(c.num_ranks, c.collective, c.dtype, c.count, c.in_place, c.beside) for c in found]
    assert len(set(keys)) == len(keys) == 2 * 2 * 2 * 2 * 3
    # each level changes only when all below it are through
    for depth in range(1, 6):
        heads = [key[:depth] for key in keys]
        changes = [a for a, b in pairwise(heads) if a != b]
        assert len(changes) == len(set(heads)) - 1, depth
    assert keys[0] == (2, "all_gather", "fp16", 256, False, "")
    assert [key[4:] for key in keys[:4]] == [
        (False, ""),
        (False, "gemm:8"),
        (True, ""),
        (True, "gemm:8"),
    ]


def test_a_case_is_planned_once() -> None:
    assert len(cases("all_reduce all_reduce_perf", ranks="2,2", dtype="float,fp32")) == 1


def test_trimmed_sizes_are_measured_once_and_said() -> None:
    cases, (note,) = planned(
        "all_gather", n=4, begin="16", end="128", step="16", placement="out"
    )
    assert [case.message_bytes for case in cases] == [64, 128]
    assert note.startswith("all_gather: 6 sizes trimmed so that each of 4 parts is a multiple")


def test_sizes_that_trim_to_nothing_are_refused_with_the_least_that_works() -> None:
    error = refused("all_to_all", n=4, begin="1", end="32")
    assert (
        str(error) == "end 32 is invalid: it must be at least 64 bytes for all_to_all of fp32."
    )
    assert cases("all_to_all", n=4, begin="64", end="64")
    assert str(refused("all_reduce", begin="1", end="3")).startswith(
        "end 3 is invalid: it must be at least 4 bytes"
    )
    assert cases("all_reduce", begin="4", end="4")


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"begin": None, "end": "0"}, "end"),
        ({"begin": "4", "end": "0"}, "end"),
        ({"begin": "0", "end": None}, "begin"),
    ],
)
def test_sizes_of_nothing_are_refused(values: dict[str, str | None], field: str) -> None:
    sentence = f"{field} 0 is invalid: it must be at least 1 byte."
    assert str(refused("all_reduce", **values)) == sentence


def test_all_types_and_reductions_leave_out_what_gloo_lacks_and_say_so() -> None:
    found, notes = planned("all_reduce", dtype="all", redop="all")
    pairs = {(case.dtype, case.redop) for case in found}
    assert (DType.FP32, RedOp.AVG) in pairs
    assert (DType.INT8, RedOp.SUM) in pairs
    assert not {dtype for dtype, _ in pairs} & {DType.FP8_E4M3, DType.UINT32}
    assert not {redop for _, redop in pairs} & {RedOp.MULSUM}
    assert "left out: gloo has no fp8 collectives" in notes
    assert len(set(notes)) == len(notes) > 5
    with pytest.raises(NothingToMeasureError, match="gloo has no mulsum of fp64; left out"):
        planned("all_reduce", dtype="all", redop="mulsum")


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"dtype": "fp8"}, "dtype"),
        ({"dtype": "uint32"}, "dtype"),
        ({"redop": "mulsum"}, "redop"),
        ({"dtype": "int8", "redop": "avg"}, "redop"),
        ({"agg_iters": 4}, "agg-iters"),
        ({"dtype": "fp8", "agg_iters": 4}, "dtype"),
    ],
)
def test_what_gloo_lacks_is_blamed_on_its_flag(values: dict[str, Any], field: str) -> None:
    assert refused("all_reduce", **values).field == field


def test_roots_pairs_and_groups() -> None:
    assert [case.root for case in cases("broadcast", n=3, root="-1")] == [0, 1, 2]
    assert [case.root for case in cases("broadcast all_reduce", n=3, root="2")] == [2, -1]
    (pair,) = cases("p2p", n=4, pair="3,1")
    assert (pair.members, pair.num_ranks, pair.world_size) == ((3, 1), 2, 4)
    (both,) = cases("p2p", n=4, bidirectional=True)
    assert both.collective is Collective.P2P_BOTH
    (split,) = cases("all_reduce", n=4, group_split="MOD 2")
    assert split.communicators == [(0, 2), (1, 3)]


def test_a_matrix_of_pairs_has_both_figures_of_every_ordered_pair() -> None:
    found = cases("p2p-matrix", n=3, begin="1M", end="1M")
    wanted = {(i, j) for i in range(3) for j in range(3) if i != j}
    for collective, size in ((Collective.P2P, 2**20), (Collective.PING_PONG, 8)):
        held = [case for case in found if case.collective is collective]
        assert {case.pair for case in held} == wanted
        assert {case.message_bytes for case in held} == {size}
    assert len(found) == 12
    both = cases("p2p-matrix", n=2, bidirectional=True)
    assert {case.collective for case in both} == {Collective.P2P_BOTH, Collective.PING_PONG}


@pytest.mark.parametrize(
    ("n", "partners", "text"),
    [
        (
            64,
            None,
            "64 ranks have 4032 ordered pairs, measured one after the other: --partners",
        ),
        (64, 2, ""),
        (16, None, ""),
    ],
)
def test_very_many_pairs_have_a_note(n: int, partners: int | None, text: str) -> None:
    _, notes = planned("p2p-matrix", n=n, partners=partners)
    assert [text in note for note in notes] == ([True] if text else [])


@pytest.mark.parametrize(("n", "partners"), [(2, 1), (3, 1), (8, 2), (9, 3), (64, 4), (5, 4)])
def test_a_matrix_of_some_pairs_is_even(n: int, partners: int) -> None:
    pairs = [
        case.pair
        for case in cases("p2p-matrix", n=n, partners=partners)
        if case.collective is Collective.P2P and case.pair is not None
    ]
    assert len(set(pairs)) == len(pairs) == n * partners
    for end in (0, 1):
        assert Counter(pair[end] for pair in pairs) == dict.fromkeys(range(n), partners)
    for rank in range(n):  # a ring among them joins all ranks
        assert (rank, (rank + 1) % n) in pairs


def test_calls_are_enqueued_ahead_where_they_can_be() -> None:
    def modes(name: str, device: str = "cuda", **values: Any) -> set[Mode]:
        return {case.mode for case in cases(name, 3, device, **values)}

    assert modes("all_reduce") == modes("p2p-matrix") == {Mode.AHEAD}
    assert modes("all_reduce", "cpu") == modes("all_reduce", backend="gloo") == {Mode.QUEUED}
    assert modes("barrier") == {Mode.QUEUED}, "torch's barrier waits for the device"
    assert modes("p2p-matrix", mode="queued") == {Mode.QUEUED}
    for words in (("all_reduce", "cpu"), ("all_reduce", "cuda", "gloo"), ("barrier", "cuda")):
        name, device, *backend = words
        with pytest.raises(ConfigError, match="queued or blocking"):
            modes(name, device, mode="queued-ahead", backend=backend[0] if backend else None)


def test_spread_and_matrix_file(tmp_path: Path) -> None:
    (even,) = cases("all_to_all_v", imbalance="0")
    assert even.counts == ((128, 128), (128, 128))
    file = tmp_path / "matrix"
    file.write_text("0 40 7\n16 0 7\n7 7 7\n")
    (case,) = cases("all_to_all_v", matrix=str(file))
    assert case.counts == ((0, 8), (4, 0)), "the first two ranks; parts of 16 bytes"


def test_modes() -> None:
    assert [case.mode for case in cases("all_reduce", blocking=0, cudagraph=0)] == [Mode.QUEUED]
    (free,) = cases("all_reduce", blocking=2)
    assert (free.mode, free.aligned) == (Mode.BLOCKING, False)
    (graph,) = cases("all_reduce", device="cuda", cudagraph=3)
    assert (graph.mode, graph.backend, graph.api) == (Mode.GRAPH, "nccl", Api.TORCH)


def test_every_case_prints_the_command_that_plans_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, but for the case without company that compute beside is compared with."""
    found = cases(
        "all_gather p2p broadcast", n=4, dtype="bf16", arrival_skew="50us", blocking=1
    )
    found += cases("all_reduce", n=4, group_split="mod 2", redop="max", ranks=None)
    found += cases("all_to_all_v", n=4, imbalance="0.5", overlap_with="gemm:8")
    planned_again: list[CommCase] = []
    monkeypatch.setattr(
        dry_run, "show", lambda plan, *_: planned_again.extend(e.case for e in plan.entries)
    )
    for case in found:
        assert status([*shlex.split(command_of(case))[1:], "--dry-run"]) == 0
        without = [dataclasses.replace(case, beside="")] if case.beside else []
        assert planned_again == [*without, case]
        planned_again.clear()


@pytest.mark.parametrize("factor", [2.0, 1.5, 1.0000001234567])
def test_the_tuner_measures_the_factor_as_it_was_given(factor: float) -> None:
    """Its probe runs this command line: a rounded factor would give other sizes."""
    words = argv(CommOptions(names=("all_reduce",), factor=factor, out="runs.0"))
    assert float(words[words.index("-f") + 1]) == factor
    assert words[words.index("--out") + 1] == "runs.0"


def test_a_plan_for_another_device_has_the_times_of_its_links(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """4 GiB over 16 hosts of 8 NICs of 400G: at most 50 GB/s x (n - 1) / n of each NIC."""
    words = "comm all_reduce all_to_all gather -b 4G -e 4G --dry-run --device h200"
    assert status([*words.split(), "--nproc", "128", "--json", "-"]) == 0
    out = capsys.readouterr()
    reduced, exchanged, gathered = json.loads(out.out)
    assert 300 < reduced["predicted_busbw_gb_s"] < 8 * 50
    assert 40 < exchanged["predicted_busbw_gb_s"] < 50 * 127 / 120
    algbw = reduced["size_bytes"] / reduced["predicted_s"] / 1e9
    assert reduced["predicted_busbw_gb_s"] == pytest.approx(algbw * 2 * 127 / 128)
    assert gathered["predicted_s"] is None, "no table tells how exact it would be"
    assert "by the links of dgx-h200: 8 GPUs and 8 x 400G a host" in out.err
    assert status([*words.split(), "--nproc", "8", "--overlap-with", "gemm:8192"]) == 0
    lines = capsys.readouterr().out.splitlines()
    beside = [line for line in lines if "--overlap-with" in line]
    assert beside
    assert not any("busbw" in line for line in beside)
