"""Words of a training command in a shell script."""

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from stepmark.framework_files.shell import training_words
from stepmark.ground.errors import ConfigError

BASH = shutil.which("bash")
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
        ("case ${S:-8b} in\n 70b|405b) X=2 ;;\n 8*) X=1\n  Y=3 ;;\n *) X=3 ;;\nesac", "1"),
        ('S=b\ncase $S in a) X=2 ;; "b") X=1 ;; esac', "1"),
        ("f() {\n  Y=3\n}\nX=1", "1"),
        ("X=1\nfunction f {\n  X=2\n}", "1"),
        ("X=1\nf()\n{\n  X=$1\n}\nf 2 3", "2"),
        ("X=1\nf(){ local X=2 Y=3; Z=$#; }\nf a b\nX=$X$Z", "12"),
        ("f() { X=1; [ $1 = a ] && return; X=2; }\ng() { f $@; }\ng a", "1"),
        ("f() { shift; X=$1; }\nf 1 2", "2"),
        ("X=1\nwhile [[ $# -gt 0 ]]; do X=2; shift; done", "1"),
        ("declare -a A=(1 2)\nlocal B X=${A[@]}\nX=3", "3"),
        ("N=4\nif (( N > 2 )) && [[ llama3 == llama* ]]; then X=1; else X=2; fi", "1"),
        ("B=1\n[ $B ] && [[ -n $B && ! -f x ]] && { X=1; }", "1"),
        ("Y=1\nX=${Y:+2}\nZ=2\nunset Z\nX=$X${Z:-3}", "23"),
        ("X=$((2 > 1))", "1"),
        ("X=$(( (1 << 3) + 2**4 ))", "24"),
        ("A=(1 2 4)\n: ${X:=${A[1]}}", "2"),
        ("X=1\nexport X=2 Y=$X\nX=$Y", "1"),
        ("case 1 in 1) f() { X=1; }; f ;; (2) if [ a ] && [ b ]; then X=2; fi ;; esac", "1"),
        ("X=1\nif [ a = a ]; then\n for y in 1; do echo $y; done\n X=2\nfi", "2"),
    ],
)
def test_what_runs_is_what_a_shell_runs(script: str, value: str, tmp_path: Path) -> None:
    assert training_words(script + TRAIN) == ["--a", value, "4"]
    if BASH:
        stand_in = 'python() { shift; printf "%s " "$@"; }\ncat() { :; }\n'
        command = [BASH, "-c", stand_in + script + TRAIN]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.stdout.splitlines()[-1].split() == ["--a", value, "4"]


@pytest.mark.parametrize(
    "script",
    [
        "X=1\ncase $(arch) in\n  8b) X=2 ;;\nesac",
        "X=1\nf() { X=2; }\nfor y in 1; do f; done",
        "X=1\nf() { X=2; }\nif f; then echo; fi",
        "X=1\nif grep -q a file; then X=2; fi",
        "X=1\n[[ $(uname) = Linux ]] && X=2",
        "X=1\nif [ a = b -o c = c ]; then X=2; elif [ a = a ]; then X=3; fi",
        "X=1\nsource env.sh\nX=$Y",
        "X=1\nY=1\nwhile [ $Y ]; do unset X Y; done",
        "X=1\nread -r Y X < file",
        "X=1\n(( X = 2 ))",
        "X=1\nlet X=2",
        "X=$(nproc)",
        "X=`nproc`",
        "X=${Y%.*}",
        "X=${Y:?message}",
        "for X in 1 2; do\n  echo $X\ndone",
        "X=1\nwhile true; do X=2; done",
        "X=1\nfor y in 1; do X=2; done\nX=$X",
        "X=$((1 > 0 ? 1 : 2))",
    ],
)
def test_a_variable_that_is_uncertain_is_refused_where_it_is_used(script: str) -> None:
    with pytest.raises(ConfigError, match="uncertain is invalid"):
        training_words(script + TRAIN)
    assert training_words(script + "\npython train.py --b 1\n") == ["--b", "1"]


def test_a_function_starts_the_training_where_it_is_called() -> None:
    script = 'run() {\n  torchrun train.py ${ARGS[@]} "$@"\n}\nARGS=(--a 1)\nrun --b "2 3"\n'
    assert training_words(script) == ["--a", "1", "--b", "2 3"]
    assert training_words(script.replace("run --b", "# run --b")) == []


def test_one_of_several_trainings_that_is_uncertain_is_refused() -> None:
    script = "if [ $(nproc) -gt 8 ]; then\n  python a.py --a 1\nelse\n  python a.py --a 2\nfi"
    with pytest.raises(ConfigError, match="training uncertain is invalid"):
        training_words(script)
    assert training_words(script.replace("--a 2", "--a 1")) == ["--a", "1"]


def test_what_a_command_prints_is_an_argument_only_where_nothing_depends_on_it() -> None:
    script = "python a.py --save x/$(date) --a 1"
    assert training_words(script, idle={"--save"})[2:] == ["--a", "1"]
    for line in (script, "python a.py --save x $(cat arguments) --a 1"):
        with pytest.raises(ConfigError, match=r"\$\(.*uncertain"):
            training_words(line, idle={"--save"} if "cat" in line else ())


@pytest.mark.parametrize("end", ["2>&1 | tee log", "> log 2>&1 &", "&> log", "<in >>log 2>err"])
def test_redirections_are_no_arguments(end: str) -> None:
    assert training_words(f"python a.py --a 1 --b {end}") == ["--a", "1", "--b"]


def test_a_module_is_started_as_a_file_is() -> None:
    line = "torchrun --nproc_per_node=8 -m megatron.train --a 1"
    assert training_words(line) == ["--nproc_per_node", "8", "--a", "1"]
    assert training_words("python -m pip install --upgrade x") == []


@pytest.mark.parametrize(
    "script",
    ["f() { f; }\nf", "if [ a ]; then\n" * 60, "f() { g; g; }\ng() { f; }\nf", "x\n" * 30_000],
)
def test_a_script_without_end_is_refused(script: str) -> None:
    with pytest.raises(ConfigError, match="script"):
        training_words(script)


def command(rng: random.Random, depth: int = 0) -> str:
    """Return a command that assigns, or chooses what does."""
    name, other = rng.choice("ABC"), rng.choice("ABC")
    value = rng.choice(
        ["1", "x", f"${name}", f"${{{other}:-3}}", f"${{{name}:+y}}", '"$A $B"', "$1"]
    )
    test = rng.choice(
        [f"[ -z ${name} ]", f"[[ ${other} == x* ]]", f'[ "${name}" = 1 ]', f"[ ${name} -gt 0 ]"]
    )
    simple = [
        f"{name}={value}",
        f"{name}+={value}",
        f"{test} && {name}={value}",
        f"{test} || {name}={value}",
        f"export {name}={value} {other}=${name}",
        f"unset {name}",
    ]
    if depth > 2 or rng.random() < 0.6:
        return rng.choice(simple)
    first, second = (command(rng, depth + 1) for _ in range(2))
    return rng.choice(
        [
            f"if {test}; then {first}; else {second}; fi",
            f"case {value} in 1|y) {first};; x*) {second} ;; esac",
            f"f() {{ {first}; {second}; }}; f {value}",
            f"while {test}; do {first}; break; done",
        ]
    )


@pytest.mark.skipif(BASH is None, reason="no bash")
def test_random_scripts_run_as_in_bash() -> None:
    num_equal = 0
    for seed in range(120):
        rng = random.Random(seed)
        lines = [command(rng) for _ in range(rng.randrange(2, 8))]
        script = "\n".join(lines) + '\npython a.py --a "$A" --b $B "${C}"\n'
        try:
            words = training_words(script)
        except ConfigError:  # a loop
            continue
        stand_in = 'python() { shift; printf "<%s>\\n" "$@"; }\n'
        done = subprocess.run(
            [str(BASH), "-c", stand_in + script], capture_output=True, text=True, check=False
        )
        assert [f"<{word}>" for word in words] == done.stdout.splitlines(), script
        num_equal += 1
    assert num_equal > 60


def test_arguments_behind_a_comment_are_not_of_the_command() -> None:
    script = "python a.py --a 1 \\\n  # --b 2 \\\n  --c 3\n"
    with pytest.raises(ConfigError, match="--c alone is invalid: it must be a part"):
        training_words(script)


def test_lines_of_arguments_are_one_line() -> None:
    assert training_words("--a 1\n--b 2  # a comment\n--c") == ["--a", "1", "--b", "2", "--c"]


def test_a_training_in_a_subshell() -> None:
    assert training_words("(cd /x && python a.py --a 1)") == ["--a", "1"]
