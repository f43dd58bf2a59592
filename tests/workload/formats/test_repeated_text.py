"""The text is that of every operation in turn, whatever is kept and repeated."""

from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from stepmark.core.workload import Operation, Workload
from stepmark.workload.formats import repeated_text
from stepmark.workload.formats.repeated_text import RepeatedText, joined, repeated

from ...core.workload_samples import workloads


def line(op: Operation) -> str:
    return f"{op.module}\n"


@settings(max_examples=60)
@given(workloads(), st.integers(0, 30), st.integers(1, 30))
def test_text_is_that_of_every_operation(workload: Workload, kept: int, chunk: int) -> None:
    with mock.patch.multiple(repeated_text, _BLOCK=kept, _CHUNK=chunk):
        text = RepeatedText(workload.blocks, line)
        for number, stage in enumerate(workload.stages):
            pieces = list(text.chunks(stage.step))
            assert "".join(pieces) == "".join(map(line, workload.expand(number)))
            assert all(len(piece) >= chunk for piece in pieces[:-1])


@given(st.text(max_size=9), st.integers(1, 50), st.integers(1, 30))
def test_repeats_are_whole(text: str, times: int, chunk: int) -> None:
    with mock.patch.object(repeated_text, "_CHUNK", chunk):
        pieces = list(repeated(text, times))
        assert "".join(pieces) == text * times
        assert max(map(len, pieces)) <= max(chunk, len(text)) or not text
        assert "".join(joined(pieces)) == text * times
