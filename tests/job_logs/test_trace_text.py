"""Text of torch's flight-recorder analyzer: the blocks of each version, whole, cut, tagged.

The texts follow torch/distributed/flight_recorder/components/types.py and utils.py of torch
2.11, https://github.com/pytorch/pytorch/pull/140969, and torch's flight-recorder tutorial; one
test compares with the torch that is installed.
"""

import io
import logging
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.ground.errors import ConfigError
from stepmark.job_logs.flight_recorder.trace_text import (
    CallMismatch,
    MismatchSide,
    TracedCall,
    TraceProblem,
    looks_like_trace_text,
    read_trace_text,
)

MISSING = """\
Not all ranks joining collective, sequence number: 31117
internal record id: 31116
group info: 0:default_pg
collective: nccl:all_reduce
missing ranks: {3, 4, 5, 6, 7}
input sizes: [[1571911]]
output sizes: [[1571911], [3, 4]]
world size: 8
expected ranks: {0, 1, 2, 3, 4, 5, 6, 7}
collective state: scheduled
collective stack trace: \n\
 all_reduce at /w/torch/distributed/distributed_c10d.py:2707
wrapper at /w/torch/distributed/c10d_logger.py:81
<module> at /w/train.py:44
"""
TUTORIAL = """\
Not all ranks joining collective 5 at entry 4
group info: 0:default_pg
collective: nccl:all_reduce
missing ranks: {1}
input sizes: [[3, 4]]
output sizes: [[3, 4]]
expected ranks: 2
collective state: scheduled
collective stack trace:
  all_reduce at /w/torch/distributed/distributed_c10d.py:2696
  <module> at /w/crash.py:44
"""


def mismatch(errors: str, head: str = "Collective sequence number: 3 has errors") -> str:
    return f"""\
{head}
internal record id: 2
group info: 7:tp
collective: nccl:all_reduce
input sizes: [[1024]]
output sizes: [[1024]]
world size: 4
expected ranks: {{0, 1, 2, 3}}
collective state: started
error msg: {errors}
collective stack trace: \n\
 all_reduce at /w/torch/distributed/distributed_c10d.py:2707
"""


TYPE = mismatch(
    "Culprit rank 3; Error type: COLLECTIVE_TYPE_MISMATCH, Expected collective type: "
    "'all_reduce' does not match found collective type: '_all_gather_base'"
)
SIZE = mismatch(
    "Culprit rank 2; Error type: SIZE_OR_SYNTAX_MISMATCH, Expected input sizes: '[[1024]]' "
    "does not match found input sizes: '[[512], [1]]', Culprit rank 1; Error type: "
    "SIZE_OR_SYNTAX_MISMATCH, Expected input sizes: '[[1024]]' does not match found input "
    "sizes: '[[512], [1]]'"
)
DTYPE = mismatch(
    "Culprit rank 1; Error type: COLLECTIVE_DTYPE_MISMATCH, Expected dtypes: '{'Float'}' does "
    "not match found dtype: '{'Float'}/{'Half'}/{'Half'}'"
)
STATE = mismatch(
    "Culprit rank 0; Error type: COLLECTIVE_STATE_MISMATCH, Expected state: 'scheduled' does "
    "not match found state: 'started', Culprit rank 1; Error type: COLLECTIVE_STATE_MISMATCH, "
    "Expected state: 'scheduled' does not match found state: 'completed'"
)
NUMEL = mismatch(
    "Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH, Found input numel '1024 * pg size 2' "
    "does not match output numel '4096'"
)
ALL_TO_ALL = """\
Input/output mismatch in the collective sequence number: 3
internal record id: 2
group info: 0:default_pg
collective: nccl:all_to_all
total input numel: 12
total output numel: 8
input sizes: [[4]]
output sizes: [[4]]
world size: 2
expected ranks: {0, 1}
collective state: started
collective stack trace: \n\
 all_to_all at /w/torch/distributed/distributed_c10d.py:4000
"""
UNDECIDED = (
    "We cannot decide what's wrong with this collective entry because we missed FR dumps from "
    "ranks ({2, 3}) so we don't have enough information. If you want to debug further use -j\n"
)
NO_DUMPS = "AssertionError: Missing dump files from ranks {2, 3}\n"
FINE = "No errors found for this collective entry, There could be some other reasons\n"
ABORTED = "Too many mismatches for process_group 0: default_pg aborting\n"
EVERY = MISSING + TYPE + SIZE + DTYPE + STATE + NUMEL + ALL_TO_ALL + UNDECIDED + NO_DUMPS + FINE


def read(text: str) -> TracedCall:
    assert looks_like_trace_text(text.encode())
    (call,) = read_trace_text(text, "fr.txt")
    return call


def sides(call: TracedCall) -> list[tuple[str, str, list[tuple[str, tuple[int, ...]]]]]:
    return [
        (each.error, each.subject, [(side.words, side.ranks) for side in each.sides])
        for each in call.mismatches
    ]


def test_missing_ranks() -> None:
    call = read(MISSING)
    assert call.problem == TraceProblem.MISSING_RANKS
    assert (call.sequence, call.group, call.description) == (31117, "0", "default_pg")
    assert (call.kind, call.state, call.num_expected) == ("all_reduce", "scheduled", 8)
    assert call.missing_ranks == (3, 4, 5, 6, 7)
    assert call.expected_ranks == tuple(range(8))
    assert call.input_sizes == ((1571911,),)
    assert call.stack == [
        "all_reduce at /w/torch/distributed/distributed_c10d.py:2707",
        "wrapper at /w/torch/distributed/c10d_logger.py:81",
        "<module> at /w/train.py:44",
    ]
    assert [(line.line, line.text.split(":")[0]) for line in call.evidence] == [
        (1, "Not all ranks joining collective, sequence number"),
        (5, "missing ranks"),
        (9, "expected ranks"),
    ]
    assert call.is_whole


def test_earlier_words() -> None:
    call = read(TUTORIAL)
    assert (call.sequence, call.missing_ranks, call.num_expected) == (5, (1,), 2)
    assert call.expected_ranks == ()
    assert call.stack[-1] == "<module> at /w/crash.py:44"
    assert call.is_whole
    colon = read(MISSING.replace("collective, sequence", "collective: sequence"))
    assert colon.sequence == 31117
    early = TYPE.replace("error msg", "error message")
    head = "Collective 3 at entry 2 errors"
    assert read(early.replace("Collective sequence number: 3 has errors", head)).sequence == 3
    io = "Input/output mismatch in the collective 3 at entry 2"
    old = read(
        ALL_TO_ALL.replace("Input/output mismatch in the collective sequence number: 3", io)
    )
    assert old.sequence == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            TYPE,
            (
                "COLLECTIVE_TYPE_MISMATCH",
                "collective type",
                [("all_reduce", (0, 1, 2)), ("_all_gather_base", (3,))],
            ),
        ),
        (
            SIZE,
            (
                "SIZE_OR_SYNTAX_MISMATCH",
                "input sizes",
                [("[[1024]]", (0, 3)), ("[[512], [1]]", (1, 2))],
            ),
        ),
        (
            DTYPE,
            (
                "COLLECTIVE_DTYPE_MISMATCH",
                "dtypes",
                [("{'Float'}", (0, 2, 3)), ("{'Float'}/{'Half'}/{'Half'}", (1,))],
            ),
        ),
        (
            STATE,
            (
                "COLLECTIVE_STATE_MISMATCH",
                "state",
                [("scheduled", (2, 3)), ("started", (0,)), ("completed", (1,))],
            ),
        ),
        (
            NUMEL,
            (
                "SIZE_OR_SYNTAX_MISMATCH",
                "",
                [
                    ("", (0, 2, 3)),
                    (
                        "Found input numel '1024 * pg size 2' does not match output numel "
                        "'4096'",
                        (1,),
                    ),
                ],
            ),
        ),
        (
            ALL_TO_ALL,
            (
                "SIZE_OR_SYNTAX_MISMATCH",
                "numel",
                [("input numel 12", ()), ("output numel 8", ())],
            ),
        ),
        (
            mismatch("Culprit rank 3; SIZE_OR_SYNTAX_MISMATCH"),
            ("SIZE_OR_SYNTAX_MISMATCH", "", [("", (0, 1, 2)), ("", (3,))]),
        ),
    ],
)
def test_mismatches(text: str, expected: object) -> None:
    call = read(text)
    assert call.problem == TraceProblem.MISMATCH
    assert sides(call) == [expected]
    assert call.is_whole


def test_who_is_named_and_who_is_left() -> None:
    """The analyzer names ranks that differ from the first; the others may lack a dump."""
    (state,) = read(STATE).mismatches
    assert state == CallMismatch(
        error="COLLECTIVE_STATE_MISMATCH",
        subject="state",
        sides=(
            MismatchSide(ranks=(2, 3), words="scheduled"),
            MismatchSide(ranks=(0,), words="started"),
            MismatchSide(ranks=(1,), words="completed"),
        ),
    )
    unknown = read(STATE.replace("expected ranks: {0, 1, 2, 3}\n", ""))
    assert unknown.mismatches[0].sides[0].ranks == ()


def test_two_kinds_of_mismatch_in_one_block() -> None:
    both = mismatch(
        "Culprit rank 0; Error type: COLLECTIVE_STATE_MISMATCH, Expected state: 'started' does "
        "not match found state: 'scheduled', Culprit rank 2; Error type: "
        "COLLECTIVE_TYPE_MISMATCH, Expected collective type: 'all_reduce' does not match found "
        "collective type: 'barrier'"
    )
    assert [side.ranks for each in read(both).mismatches for side in each.sides] == [
        (1, 3),
        (0,),
        (1, 3),
        (2,),
    ]


@pytest.mark.parametrize(
    ("text", "problem", "ranks"),
    [
        (UNDECIDED, TraceProblem.UNDECIDED, (2, 3)),
        (NO_DUMPS, TraceProblem.MISSING_DUMPS, (2, 3)),
        ("Missing dump files from ranks {'2'}", TraceProblem.MISSING_DUMPS, (2,)),
        (FINE, TraceProblem.NO_ERROR, ()),
        (ABORTED, TraceProblem.ABORTED, ()),
    ],
)
def test_notes(text: str, problem: TraceProblem, ranks: tuple[int, ...]) -> None:
    call = read(text)
    assert (call.problem, call.ranks_without_dump) == (problem, ranks)
    assert call.is_whole


def test_the_group_of_an_aborted_analysis() -> None:
    assert (read(ABORTED).group, read(ABORTED).description) == ("0", "default_pg")


def test_point_to_point_calls() -> None:
    assert read(MISSING.replace("nccl:all_reduce", "nccl:recv 3<-0")).kind == "recv"


def test_a_file_of_every_block() -> None:
    calls = read_trace_text("Loaded 8 dumps\n" + EVERY, "fr.txt")
    assert [call.problem.value for call in calls] == [
        "missing ranks",
        *["mismatch"] * 6,
        "undecided",
        "missing dumps",
        "no error",
    ]
    assert [len(call.stack) for call in calls] == [3, 1, 1, 1, 1, 1, 1, 0, 0, 0]


def test_lines_after_a_stack_are_not_part_of_it() -> None:
    text = MISSING + "Traceback (most recent call last):\n main at /w/x.py:3\n" + "a: b\n"
    assert len(read(text).stack) == 3


@pytest.mark.parametrize(
    "prefix", ["[1,0]<stdout>:", "[rank0]: ", "2026-06-03 17:48:01,005 ", "\t"]
)
def test_prefixes_of_launchers_and_loggers(prefix: str) -> None:
    tagged = "".join(f"{prefix}{line}\r\n" for line in EVERY.splitlines())
    plain, marked = read_trace_text(EVERY, "a"), read_trace_text(tagged, "a")
    assert [sides(call) for call in marked] == [sides(call) for call in plain]
    assert [call.missing_ranks for call in marked] == [call.missing_ranks for call in plain]
    assert marked[0].kind == "all_reduce"


@pytest.mark.parametrize("text", [MISSING, SIZE, STATE, ALL_TO_ALL])
def test_a_block_cut_anywhere_states_nothing_else(text: str) -> None:
    whole = read(text)
    for end in range(len(text)):
        try:
            (cut,) = read_trace_text(text[:end], "a")
        except ConfigError:
            continue
        assert cut.sequence == whole.sequence, text[:end]
        assert cut.missing_ranks in ((), whole.missing_ranks)
        assert cut.expected_ranks in ((), whole.expected_ranks)
        assert cut.num_expected in (None, whole.num_expected)
        assert cut.state in ("", whole.state)
        assert cut.input_sizes in (None, whole.input_sizes)
        assert whole.kind.startswith(cut.kind)
        assert sides(cut) == (sides(whole) if cut.is_whole else [])


@pytest.mark.parametrize(
    ("line", "odd"),
    [
        ("missing ranks: {3, 4, 5, 6, 7}", "missing ranks: {3, 99999999999999999999}"),
        ("missing ranks: {3, 4, 5, 6, 7}", "missing ranks: {3, 4"),
        ("missing ranks: {3, 4, 5, 6, 7}", "missing ranks: set()"),
    ],
)
def test_impossible_ranks_are_unknown(line: str, odd: str) -> None:
    call = read(MISSING.replace(line, odd))
    assert call.missing_ranks == ()
    assert not call.is_whole


@pytest.mark.parametrize(
    "size", ["[[" * 50_000, "[[" + "9" * 5000 + "]]", "None", "[[1.5]]", "[["]
)
def test_odd_sizes_are_unknown(size: str) -> None:
    assert read(MISSING.replace("[[1571911]]", size, 1)).input_sizes is None


@pytest.mark.parametrize(
    "text", ["", "Not all ranks joining collective, sequence number: ", "collective: nccl:x\n"]
)
def test_other_files(text: str) -> None:
    assert not looks_like_trace_text(text.encode())
    with pytest.raises(ConfigError, match=r"flight-recorder analyzer"):
        read_trace_text(text, "other.txt")


@given(st.integers(0, len(EVERY)), st.integers(0, 80), st.text(max_size=40))
def test_damage_never_breaks_the_reader(start: int, length: int, other: str) -> None:
    calls = read_trace_text(EVERY[:start] + other + EVERY[start + length :], "a")
    assert calls


@pytest.mark.parametrize(
    "unit", ["abc def Culprit rank\n", " at " * 20 + ":\n", "{1, " * 1000, "a at b:1\n", "\n"]
)
def test_ten_megabytes_of_nonsense(unit: str) -> None:
    text = MISSING + unit * (10_000_000 // len(unit))
    start = time.process_time()
    assert read_trace_text(text, "a")[0].missing_ranks == (3, 4, 5, 6, 7)
    assert time.process_time() - start < 8  # 1 to 2 s on an idle core


def test_the_installed_torch_prints_such_blocks() -> None:
    """Compare with the analyzer itself, which logs what it finds."""
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    config = pytest.importorskip("torch.distributed.flight_recorder.components.config_manager")
    details = {}
    for rank in range(3):
        entry = {
            "record_id": 0,
            "pg_id": 0,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": 1,
            "p2p_seq_id": 0,
            "op_id": 1,
            "profiling_name": "nccl:all_reduce" if rank < 2 else "nccl:broadcast",
            "time_created_ns": 0,
            "input_sizes": [[8]],
            "input_dtypes": ["Float"],
            "output_sizes": [[8]],
            "output_dtypes": ["Float"],
            "state": "started",
            "is_p2p": False,
            "frames": [{"name": "step", "filename": "/w/train.py", "line": 7}],
        }
        groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
        dump = {"rank": rank, "version": "2.10", "entries": [entry], "pg_config": groups}
        details[f"rank_{rank}"] = dump
    args = config.JobConfig().parse_args(["."])
    printed = io.StringIO()
    handler = logging.StreamHandler(printed)
    logging.getLogger("Flight Recorder").addHandler(handler)
    builder.build_db(details, args, "2.10")
    logging.getLogger("Flight Recorder").removeHandler(handler)
    (call,) = read_trace_text(printed.getvalue(), "fr.txt")
    assert sides(call) == [
        (
            "COLLECTIVE_TYPE_MISMATCH",
            "collective type",
            [("all_reduce", (0, 1)), ("broadcast", (2,))],
        )
    ]
    assert (call.sequence, call.kind, call.stack) == (
        1,
        "all_reduce",
        ["step at /w/train.py:7"],
    )
