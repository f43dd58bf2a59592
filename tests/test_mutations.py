"""The faults that `make mutations` tries can still be put where they belong."""

from pathlib import Path

import pytest
from tests import mutate


def test_each_fault_has_its_place_and_tests() -> None:
    faults = mutate.faults()
    assert len(faults) >= 30
    assert [problem for fault in faults if (problem := fault.problem())] == []
    assert len({(fault.file, fault.new) for fault in faults}) == len(faults)


def test_rooms_that_measure_and_describe_have_faults() -> None:
    rooms = {fault.file.split("/")[0] for fault in mutate.faults()}
    assert rooms >= {"ground", "measuring", "workloads", "traces", "store"}


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("def test_one():\n    assert VALUE == 1\n", "test_it.py::test_one"),
        ("def test_one():\n    assert VALUE\n", None),
    ],
)
def test_a_fault_is_found_by_the_test_that_fails(
    test: str, expected: str | None, tmp_path: Path
) -> None:
    (tmp_path / "src" / "stepmark").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "src" / "stepmark" / "__init__.py").touch()
    source = tmp_path / "src" / "stepmark" / "it.py"
    source.write_text("VALUE = 1\n")
    (tmp_path / "tests" / "test_it.py").write_text(f"from stepmark.it import VALUE\n{test}")
    fault = mutate.Fault(
        what="two", file="it.py", old="VALUE = 1", new="VALUE = 2", tests=("test_it.py",)
    )
    assert fault.problem(tmp_path) == ""
    assert mutate.found_by(tmp_path, fault) == expected
    assert source.read_text() == "VALUE = 1\n"


def test_tests_that_do_not_run_find_nothing(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text("import no_such_module\n")
    with pytest.raises(RuntimeError, match="do not run"):
        mutate.failed_test(tmp_path, ["test_it.py"])


def test_a_test_that_always_fails_finds_nothing(tmp_path: Path) -> None:
    (tmp_path / "src" / "stepmark").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "src" / "stepmark" / "it.py").write_text("VALUE = 1\n")
    (tmp_path / "tests" / "test_it.py").write_text("def test_it():\n    assert False\n")
    fault = mutate.Fault(what="", file="it.py", old="1", new="2", tests=("test_it.py",))
    with pytest.raises(RuntimeError, match="without the fault, too"):
        mutate.found_by(tmp_path, fault)
