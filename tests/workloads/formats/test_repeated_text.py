"""The text is that of every operation in turn, whatever is kept and repeated."""

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
from tests.step.workload_samples import compute, workloads

from stepmark.step.workload import Operation, Run, Workload
from stepmark.workloads.formats import walk
from stepmark.workloads.formats.walk import RepeatedText, joined, repeated


def line(op: Operation) -> str:
    return f"{op.module}\n"


@given(workloads(), st.sampled_from([0, 3, 12]), st.integers(1, 30))
def test_text_is_that_of_every_operation(workload: Workload, kept: int, chunk: int) -> None:
    with mock.patch.multiple(walk, _BLOCK=kept, _CHUNK=chunk):
        text = RepeatedText(workload.blocks, line)
        for number, stage in enumerate(workload.stages):
            pieces = list(text.chunks(stage.step))
            assert "".join(pieces) == "".join(map(line, workload.expand(number)))
            assert all(len(piece) >= chunk for piece in pieces[:-1])


def test_nested_repeats_are_whole_however_little_is_kept() -> None:
    blocks = {
        "inner": (compute("a"), compute("b")),
        "middle": (Run(block="inner", times=3), compute("c")),
        "outer": (compute("d"), Run(block="middle", times=2), Run(block="inner", times=2)),
    }
    wanted = "d\n" + ("a\nb\n" * 3 + "c\n") * 2 + "a\nb\n" * 2
    for kept in range(len(wanted) + 1):
        with mock.patch.multiple(walk, _BLOCK=kept, _CHUNK=5):
            assert "".join(RepeatedText(blocks, line).chunks("outer")) == wanted


@given(st.text(max_size=9), st.integers(1, 50), st.integers(1, 30))
def test_repeats_are_whole(text: str, times: int, chunk: int) -> None:
    with mock.patch.object(walk, "_CHUNK", chunk):
        pieces = list(repeated(text, times))
        assert "".join(pieces) == text * times
        assert max(map(len, pieces)) <= max(chunk, len(text)) or not text
        assert "".join(joined(pieces)) == text * times
