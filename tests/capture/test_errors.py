"""Mistakes in what is captured: one line that names the place, exit code 2."""

from pathlib import Path

import pytest

from stepmark.capture.run import capture_file
from stepmark.cli.main import status
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Phase
from stepmark.step.workload import ComputeOp

FILE = Path(__file__).with_name("mistakes.py")


def said(spec: str, world_size: int = 4, rank: int = 0) -> str:
    with pytest.raises(ConfigError) as raised:
        capture_file(spec, world_size, rank)
    line = str(raised.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", "in raises' is invalid: it raised KeyError: 'no such key'"),
        ("raises_in_step", "in step' is invalid: it raised ValueError: two lines"),
        ("makes_a_larger_mesh", "found 16 ranks! (see --world-size)"),
        ("picks_by_values", "a value that is unknown while captured is used where"),
        ("reads_as_numpy", "a value that is unknown while captured is used where"),
        ("joins_again", "leave init_process_group out"),
        ("gives_no_shapes", "give the stage input_args, output_args"),
        ("exits", "in exits' is invalid: it raised SystemExit: 3"),
    ],
)
def test_errors_of_the_code_have_a_place(function: str, words: str) -> None:
    line = said(f"{FILE}:{function}")
    assert f"'mistakes.py:{line_of(function)} in " in line
    assert words in line


def line_of(function: str) -> int:
    """Of the comment "here" in it."""
    before, after = FILE.read_text().split(f"def {function}(")
    return (before + after.partition("# here")[0]).count("\n") + 1


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            "returns_nothing",
            "NoneType is invalid: it must be a function that returns a function",
        ),
        ("idle", "'no operation' is invalid: it must be a step that computes something"),
        (
            "makes_a_smaller_mesh",
            "world-size 4 is invalid: it must be 2, the ranks of the largest mesh made",
        ),
        (
            "needs_argument",
            "needs_argument is invalid: it must be a function that is called with no",
        ),
        ("no_such", "no_such is invalid: it must be a function of mistakes.py, e.g. "),
        ("not a name", "'not a name' is invalid: it must be a function's name"),
    ],
)
def test_a_broken_contract_is_said(function: str, words: str) -> None:
    assert words in said(f"{FILE}:{function}")


def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "use the device type cpu" in said(f"{FILE}:wants_cuda")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("wrong.py", "def build(:", "wrong.py:1"),
        ("missing.py", "\nimport no_such_module", "missing.py:2 in <module>"),
        ("text.txt", "", "ends in .py"),
        ("empty.py", "", "a function of empty.py"),
    ],
)
def test_files_that_do_not_load(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    assert words in said(f"{tmp_path / name}:build")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "a Python file that exists" in said(f"{tmp_path}/none.py:build")


@pytest.mark.parametrize(("world_size", "rank"), [(0, 0), (2**21, 0), (4, 4), (4, -1)])
def test_ranks_out_of_range(world_size: int, rank: int) -> None:
    assert "from " in said(f"{FILE}:idle", world_size, rank)


def test_a_value_that_is_read_is_unknown_and_noted() -> None:
    made = capture_file(f"{FILE}:reads_its_loss", 4)
    (note,) = made.notes
    first = line_of("reads_its_loss")
    for line in (first, first + 2):
        assert f"mistakes.py:{line}" in note
    assert "a condition on one does not hold" in note
    phases = {op.phase for op in made.expand() if isinstance(op, ComputeOp)}
    assert phases == {Phase.FWD}  # its backward pass is in a branch


def test_the_command_line_says_it_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["workload", "capture", f"{FILE}:raises", "--world-size", "4"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"mistakes.py:{line_of('raises')}" in err


def test_what_the_file_prints_is_no_part_of_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made.json"
    code = status(
        ["workload", "capture", f"{FILE}:reads_its_loss", "--world-size", "4", "-o", str(out)]
    )
    assert code == 0
    assert out.exists()
    said, err = capsys.readouterr()
    assert "loss" not in said
    assert "loss nan" in err
    assert "# unknown values are read at mistakes.py:" in err


def test_after_a_mistake_the_next_capture_works() -> None:
    said(f"{FILE}:raises_in_step")
    assert capture_file(f"{FILE}:reads_its_loss", 4).num_operations() > 3
