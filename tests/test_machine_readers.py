"""AGENTS.md and llms.txt are true: commands work, and their JSON has the keys named there."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from tests import machine_readers
from tests.cli.process import stepmark
from tests.machine_readers import AGENTS, LLMS, ROOT, Question

QUESTIONS = machine_readers.questions()
MEASURE = "op"
UNDECIDED = ("check",)  # one launch a side cannot tell: exit code 3
OUTPUTS = ROOT / "docs" / "outputs.md"


def values(document: Any, key: str) -> list[Any]:
    """Return the values of a key such as a[].b. Raises KeyError."""
    found = [document]
    for part in filter(None, re.split(r"\.|(\[\])", key)):
        if part == "[]":
            found = [item for each in found for item in each]
        else:
            found = [each[part] for each in found if part in each]
        if not found:
            raise KeyError(key)
    return found


def test_a_key_that_is_missing_is_found_out() -> None:
    document = {"a": [{"b": 1}, {"b": None}], "c": {"d": []}}
    assert values(document, "a[].b") == [1, None]
    assert values([document], "[].c.d") == [[]]
    for key in ("b", "a[].c", "c.e", "c.d[].x"):
        with pytest.raises(KeyError):
            values(document, key)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("examples", "results", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def check_question(question: Question, folder: Path) -> dict[str, Any]:
    """Run the command of a question, and return its document."""
    program, verb, *words = shlex.split(question.command)
    assert (program, words[-2:]) == ("stepmark", ["--json", "-"])
    done = stepmark(verb, *words, cwd=folder)
    assert done.returncode == (3 if verb in UNDECIDED else 0), done.stderr
    document = json.loads(done.stdout)
    assert question.keys
    for key in question.keys:
        assert values(document, key), key
    return {"verb": verb, "document": document}


@pytest.mark.parametrize(
    "question",
    [each for each in QUESTIONS if each.command.split()[1] != MEASURE],
    ids=lambda question: question.command.split()[1],
)
def test_a_question_is_answered_by_its_keys(question: Question, folder: Path) -> None:
    check_keys_of_outputs(**check_question(question, folder))


@pytest.mark.ranks
def test_a_question_that_is_measured_is_answered(folder: Path) -> None:
    [question] = (each for each in QUESTIONS if each.command.split()[1] == MEASURE)
    check_keys_of_outputs(**check_question(question, folder))


def check_keys_of_outputs(verb: str, document: Any) -> None:
    """Of the table in docs/outputs.md, a row of this verb has all its keys and no other."""
    section = OUTPUTS.read_text().partition("## JSON\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    own = [re.sub(r"\(.*?\)", "", row[2]) for row in rows if f"`{verb}" in row[1]]
    if isinstance(document, list):
        assert own[0].startswith(" a list of")
    else:
        named = [sorted(re.findall("`([^`]+)`", keys)) for keys in own]
        assert sorted(document) in named


def test_every_command_and_key_is_in_both_files() -> None:
    """Renew llms.txt with: python tests/machine_readers.py."""
    assert LLMS.read_text() == machine_readers.llms()
    assert len(QUESTIONS) == AGENTS.read_text().count("```sh\n") > 9
    verbs = {each.command.split()[1] for each in QUESTIONS}
    assert verbs >= {"predict", "plan", "workload", "trace", "logs", "compare", "check", "op"}


@pytest.mark.parametrize("file", [AGENTS, LLMS], ids=lambda file: file.name)
def test_a_file_is_short_and_its_links_lead_somewhere(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) <= 120
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / target).is_file(), target


def test_the_site_has_both_with_links_to_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import site_hooks

    site = tmp_path / "site"
    site.mkdir()
    site_hooks.on_post_build({"site_dir": str(site)})
    targets: list[str] = []
    for file in (AGENTS, LLMS):
        written = (site / file.name).read_text()
        assert written.count("](") == file.read_text().count("](")
        targets += re.findall(r"\]\(([^)#]+)", written)
    assert {"outputs.html", "verbs/index.html", "AGENTS.md"} <= {*targets}
    for target in targets:
        page = re.sub(r"^(?!\.\./)(.*)\.html$", r"docs/\1.md", target).removeprefix("../")
        assert (ROOT / page).is_file(), target


def test_what_is_refused_is_one_sentence_and_no_json(folder: Path) -> None:
    done = stepmark("predict", "llama-3.1-9b", "--device", "h200", "--json", "-", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"stepmark: .*llama-3\.1-9b is invalid: did you mean .*\?\n", done.stderr
    )
    done = stepmark("logs", "tests/data/faults/dtype", "--json", "-", cwd=folder)
    assert done.returncode == 1
    assert json.loads(done.stdout)["exit_code"] == 1
