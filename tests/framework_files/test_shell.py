"""Words of a training command in a shell script."""

import pytest

from stepmark.framework_files.shell import training_words
from stepmark.ground.errors import ConfigError

TRAIN = "\npython train.py --a ${X} $((2*2))\n"


@pytest.mark.parametrize(
    ("script", "value"),
    [
        ("X=1\n[ a = b ] && X=2", "1"),
        ("X=1\n[ a = a ] && X=2", "2"),
        ("X=1\n[ a = a ] || X=2", "1"),
        ("X=1\n[ a = b ] ||\n  X=2", "2"),
        ("X=1\nX=2 echo hello", "1"),
        ("X=1\ncat > file <<EOF\nX=2\nEOF", "1"),
        ("X=1\ncat <<'END' > file\nX=2\nEND", "1"),
        ("case a in\n b) X=2 ;;\nesac\nX=1", "1"),
        ("f() {\n  Y=3\n}\nX=1", "1"),
        ("X=1\nif [ a = a ]; then\n for y in 1; do echo $y; done\n X=2\nfi", "2"),
    ],
)
def test_what_runs_is_what_a_shell_runs(script: str, value: str) -> None:
    assert training_words(script + TRAIN) == ["--a", value, "4"]


@pytest.mark.parametrize(
    "script",
    [
        "X=1\ncase $SIZE in\n  8b) X=2 ;;\nesac",
        "X=1\nfunction f {\n  X=2\n}",
        "X=1\nf() { X=2; }",
        "for X in 1 2; do\n  echo $X\ndone",
        "X=1\nwhile true; do X=2; done",
        "X=1\nfor y in 1; do X=2; done\nX=$X",
        "Y=1\nX=${Y:+2}",
        "X=$((1 > 0 ? 1 : 2))",
    ],
)
def test_a_variable_that_is_uncertain_is_refused_where_it_is_used(script: str) -> None:
    with pytest.raises(ConfigError, match="uncertain is invalid"):
        training_words(script + TRAIN)
    assert training_words(script + "\npython train.py --b 1\n") == ["--b", "1"]
