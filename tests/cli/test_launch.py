"""stepmark launch: scripts that pass every word on, and jobs that are followed."""

import dataclasses
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from stepmark.cli import launch, main
from stepmark.ground.errors import ConfigError
from stepmark.ground.host_names import read_hosts
from stepmark.ground.options import build, load, options
from stepmark.launching.launch_options import LaunchOptions, SlurmJob

from .launch_programs import COMM, DOCS, HOSTS, SLURM, Programs, called, script_of

pytestmark = pytest.mark.usefixtures("launch_folder")


# A shell would read each of these words as something else.
NASTY = ("train", "--model", 'it\'s $(touch x) `touch x` "$HOME" ; # \\ & *.json')


# Scripts


# Writes its words and our variables to files, as what would start stepmark on each host.
RECORD = """printf '%s\\0' "$@" > words; env | grep -E '^(STEPMARK_.*|A)=' > variables"""


def recorded(programs: Programs) -> tuple[list[str], dict[str, str]]:
    words = (programs.folder / "words").read_text().split("\0")[:-1]
    pairs = (programs.folder / "variables").read_text().splitlines()
    return words, {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def run_script(text: str, **variables: str) -> int:
    return subprocess.run(
        ["bash"], input=text, text=True, env={**os.environ, **variables}, check=False
    ).returncode


@pytest.mark.parametrize("words", [COMM, NASTY])
def test_a_slurm_script_gives_srun_every_word(
    words: tuple[str, ...], programs: Programs, tmp_path: Path
) -> None:
    programs.add("scontrol", """[ "$*" = "show hostnames n[1-2]" ] && printf 'n1\\nn2\\n'""")
    programs.add("srun", f"{RECORD}; exit 3")
    text = script_of(*SLURM, "--export", "A=it's, $HOME", words=words)
    code = run_script(text, SLURM_JOB_ID="34567", SLURM_JOB_NODELIST="n[1-2]")
    given, variables = recorded(programs)
    out = tmp_path / f"runs/stepmark-{words[0]}-34567"
    where = given.index(sys.executable)
    assert code == 3  # the exit code of stepmark is that of the script
    assert given[:where] == ["--export=ALL", "--kill-on-bad-exit=0", "--cpu-bind=none"]
    assert given[where:] == [
        *(sys.executable, "-m", "stepmark", words[0], "--out", str(out)),
        *words[1:],
    ]
    key = variables.pop("STEPMARK_KEY")
    assert len(bytes.fromhex(key)) == 16
    assert variables == {
        "STEPMARK_HOSTS": "n1,n2",
        "STEPMARK_PORT": "24567",
        "STEPMARK_NPROC": "2",
        "STEPMARK_BIND": "closest",
        "A": "it's, $HOME",
    }
    assert out.is_dir()
    assert not (tmp_path / "x").exists()


def _doctor_steps(
    programs: Programs, launcher: str, text: str, **variables: str
) -> tuple[list[list[str]], int]:
    """Run a script of `doctor --nodes`; return the words of its steps, and its exit code."""
    count = "n=$(($(cat count 2> /dev/null || echo 0) + 1)); echo $n > count"
    python = programs.add("python", f"""{count}; printf '%s\\0' "$@" > step.$n; exit $n""")
    body = {
        "pssh": """exec env -i PATH="$PATH" bash -c "${!#}" """,
        "ssh": """[ $1 = b ] || exec env -i PATH="$PATH" bash -c "$2" """,
        "srun": f'while [ $1 != {python} ]; do shift; done; exec "$@"',
        "mpirun": f'while [ $1 != {python} ]; do shift; done; exec "$@"',
    }
    programs.add(launcher, body[launcher])
    code = run_script(text.replace("/python-of-test", str(python)), **variables)
    files = sorted(programs.folder.glob("step.*"))
    return [file.read_text().split("\0")[2:-1] for file in files], code


@pytest.mark.parametrize("launcher", ["srun", "mpirun", "pssh", "ssh"])
def test_nodes_are_checked_by_each_host_then_as_pairs_then_judged(
    launcher: str, programs: Programs, tmp_path: Path
) -> None:
    programs.add("scontrol", "printf 'a\\nb\\n'")
    target = SLURM if launcher == "srun" else (f"--{launcher}", *HOSTS)
    words = ("doctor", "--nodes", "--launches", "3", "--floor=0.1", "--json", "x y.json")
    text = script_of(*target, "--python", "/python-of-test", "--out", "my runs", words=words)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n"} if launcher == "srun" else {}
    (check, network, verdict), code = _doctor_steps(programs, launcher, text, **job)
    (folder,) = (tmp_path / "my runs").iterdir()
    assert folder.name.startswith("stepmark-doctor-")
    assert check == [
        *("doctor", "--nodes", "--out", str(folder), "--device", "cuda", "--launches", "3")
    ]
    assert network[:4] == ["comm", "p2p-matrix", "--out", f"{folder}/network"]
    assert "--partners" not in network
    assert network[network.index("--launches") + 1] == "3"
    assert verdict == [
        *("doctor", "--nodes", "--from", str(folder), "--expect", "a,b"),
        *("--floor=0.1", "--json", "x y.json", "--gpus-per-node", "2"),
    ]
    assert code == 3  # that of the verdict, the third step
    if launcher in ("pssh", "ssh"):
        assert text.count("STEPMARK_NPROC=2") == text.count("STEPMARK_NPROC=1") == 1


def test_a_measured_network_is_part_of_the_verdict(programs: Programs, tmp_path: Path) -> None:
    words = ("doctor", "--nodes")
    text = script_of("--mpirun", *HOSTS, "--python", "/python-of-test", words=words)
    run = '"$out"/network/2026/run.json'
    text = text.replace("# The verdict", f"mkdir -p {run[:-9]}; touch {run}\n# The verdict")
    (*_, verdict), _ = _doctor_steps(programs, "mpirun", text)
    (folder,) = (tmp_path / "runs").iterdir()
    assert verdict[-2:] == ["--pairs", f"{folder}/network/2026"]


def test_the_steps_of_a_check_share_its_budget() -> None:
    for words in (("--budget", "20m"), ("--budget=20m",)):
        text = script_of(*SLURM, words=("doctor", "--nodes", *words))
        budgets = [
            line.split("--budget ")[1].split()[0]
            for line in text.splitlines()
            if "--budget" in line
        ]
        assert budgets == ["600s", "600s"]
    words = ("--budget", "10m")
    one = script_of("--slurm", "--gpus-per-node", "2", words=("doctor", "--nodes", *words))
    assert one.count("--budget 600s") == one.count("--budget") == 1
    text = script_of(*SLURM, words=("doctor", "--nodes"))
    assert text.count("--budget 300s") == text.count("--budget") == 1


def test_a_budget_in_which_healthy_devices_would_count_as_stuck_is_refused() -> None:
    words = ("doctor", "--nodes", "--budget", "21m")
    code, _, err = called(*SLURM, "--", *words)
    assert code == 2
    assert "budget 21m is invalid: it must be at most 2 x --timeout (1200s)" in err
    assert "--budget 630s" in script_of(*SLURM, words=(*words, "--timeout", "11m"))


@pytest.mark.parametrize(
    ("flags", "words", "time"),
    [
        (SLURM, (), "00:35:00"),
        (SLURM, ("--budget", "20m"), "00:40:00"),
        (SLURM, ("--timeout", "60s"), "00:15:00"),
        (("--slurm", "--gpus-per-node", "2"), (), "00:30:00"),
        ((*SLURM, "--time", "2h"), ("--budget", "20m"), "02:00:00"),
    ],
)
def test_a_check_ends_even_if_devices_hang(
    flags: tuple[str, ...], words: tuple[str, ...], time: str
) -> None:
    text = script_of(*flags, words=("doctor", "--nodes", *words))
    assert f"#SBATCH --time={time}\n" in text
    assert text.count("--time=") == 1


def test_one_host_has_no_network_and_many_have_some_pairs() -> None:
    words = ("doctor", "--nodes")
    ranks = ("--nproc-per-node", "2")
    assert "p2p-matrix" not in script_of("--slurm", *ranks, words=words)
    text = script_of("--slurm", "-N", "21", *ranks, words=words)
    assert "p2p-matrix" in text
    assert "--device cpu" in text
    assert "--partners 2" in text
    assert "--nproc 2" in text


def test_a_restarted_job_resumes_the_run_that_it_began(
    programs: Programs, tmp_path: Path
) -> None:
    programs.add("scontrol", "echo n1")
    programs.add("srun", RECORD)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    text, plain = script_of(*SLURM, "--requeue"), script_of(*SLURM)
    begun = tmp_path / "runs/stepmark-comm-7/2026/run.json"
    verbs = []
    for restarts in ("0", "1", "1"):
        run_script(text, SLURM_RESTART_COUNT=restarts, **job)
        verbs.append(recorded(programs)[0][6])
        if restarts == "1":
            begun.parent.mkdir(exist_ok=True)
            begun.touch()
    assert verbs == ["comm", "comm", "resume"]
    assert recorded(programs)[0][6:] == ["resume", "--out", str(begun.parents[1]), "latest"]
    run_script(plain, SLURM_RESTART_COUNT="1", **job)
    assert recorded(programs)[0][6] == "comm"


EFFECTS = [
    (("-N", "3"), "#SBATCH --nodes=3"),
    (("-p", "gpu"), "#SBATCH --partition=gpu"),
    (("--output", "%x of %j"), "#SBATCH --output='%x of %j'"),
    (("-A", "me"), "#SBATCH --account=me"),
    (("--qos", "high"), "#SBATCH --qos=high"),
    (("--time", "30m"), "#SBATCH --time=00:30:00"),
    (("--time", "90s"), "#SBATCH --time=00:01:30"),
    (("--time", "26h"), "#SBATCH --time=26:00:00"),
    (("--time", "1-02:00:00"), "#SBATCH --time=1-02:00:00"),
    (("--nodelist", "n[1-2]"), "#SBATCH --nodelist='n[1-2]'"),
    (("--exclude", "n3"), "#SBATCH --exclude=n3"),
    (("--job-name", "mine"), "#SBATCH --job-name=mine"),
    (("--job-name", "mine"), 'out="$PWD"/runs/mine-"$SLURM_JOB_ID"'),
    (("--requeue",), "#SBATCH --requeue"),
    (("--modules", "rocm/7.1,gcc"), "module load rocm/7.1 || exit 2"),
    (("--modules", "rocm/7.1,gcc"), "#!/bin/bash -l"),
    (("--container", "nvcr.io#a/b:1"), "  --container-image='nvcr.io#a/b:1' \\"),
    (("--container", "i", "--export", "A=1"), 'KEY,A \\\n  stepmark "${arguments[@]}"'),
    (("--container", "i", "--container-mounts", "/d:/d"), '="$PWD:$PWD",/d:/d \\'),
    (("--container", "i", "--out", "/d"), '="$PWD:$PWD","$out:$out" \\'),
    (("--python", "/opt/p"), '  /opt/p -m stepmark "${arguments[@]}"'),
    (("--out", "/scratch/my runs"), "out='/scratch/my runs'/stepmark-comm-"),
    (("--port", "4000"), "export STEPMARK_PORT=4000"),
    (("--fabric", "tcp"), "export NCCL_NET=Socket  # "),
    (("--fabric", "slingshot,amd"), "export HSA_FORCE_FINE_GRAIN_PCIE=1  # "),
    (("--fabric", "efa"), "export NCCL_NET='AWS Libfabric'  # "),
    (("--export", "A=1,B=x,y"), "export B=x,y  # --export"),
]


@pytest.mark.parametrize(("flags", "line"), EFFECTS)
def test_each_flag_has_an_effect(flags: tuple[str, ...], line: str) -> None:
    assert line in script_of(*SLURM, *flags)
    assert line not in script_of(*SLURM)


def test_every_slurm_flag_is_tested() -> None:
    tested = {word for flags, _ in EFFECTS for word in flags if word.startswith("-")}
    for option in options(SlurmJob):
        if option.name not in ("submit", "on_interrupt"):  # tested below
            assert tested & {*option.spellings}, option.name


def test_ranks_without_gpus() -> None:
    text = script_of("--slurm", "--nproc-per-node", "4")
    assert "export STEPMARK_NPROC=4" in text
    assert "#SBATCH --nodes=1" in text
    assert "gpus" not in text
    assert "STEPMARK_BIND" not in text


def test_mpirun_starts_one_process_per_host(programs: Programs) -> None:
    programs.add("mpirun", RECORD)
    run_script(script_of("--mpirun", *HOSTS, "--export", "A=1", words=NASTY))
    words, variables = recorded(programs)
    where = words.index(sys.executable)
    assert words[where:] == [sys.executable, "-m", "stepmark", *NASTY]
    assert words[:4] == ["--host", "a:1,b:1", "-np", "2"]
    passed = {words[i + 1] for i, word in enumerate(words[:where]) if word == "-x"}
    assert passed == variables.keys()
    assert variables["STEPMARK_HOSTS"] == "a,b"
    assert len(bytes.fromhex(variables["STEPMARK_KEY"])) == 16


def test_pssh_gives_each_host_the_key_through_stdin(programs: Programs, tmp_path: Path) -> None:
    """The fake pssh runs its command as a shell of a host does."""
    python = programs.add("a python", RECORD)
    programs.add(
        "pssh",
        """printf '%s\\0' "$@" > pssh; cd /; exec env -i PATH="$PATH" bash -c "${!#}" """,
    )
    (tmp_path / "iplist").write_text("# hosts\nme@10.0.0.1:22\n\n10.0.0.2\n")
    hosts = ("--hosts", "iplist", "--nproc-per-node", "2")
    text = script_of(
        "--pssh", *hosts, "--python", str(python), "--export", "A=b c", words=NASTY
    )
    run_script(text)
    words, variables = recorded(programs)
    assert words == ["-m", "stepmark", *NASTY]
    key = variables.pop("STEPMARK_KEY")
    assert len(bytes.fromhex(key)) == 16
    assert key not in text
    assert variables == {
        "STEPMARK_HOSTS": "10.0.0.1,10.0.0.2",
        "STEPMARK_PORT": "29500",
        "STEPMARK_NPROC": "2",
        "A": "b c",
    }
    given = (programs.folder / "pssh").read_text().split("\0")
    assert given[:8] == ["-I", "-i", "-t", "0", "-p", "2", "-h", "iplist"]


def test_ssh_gives_each_host_its_rank_and_the_key_through_stdin(programs: Programs) -> None:
    """The fake ssh runs its command as a shell of a host does, and keeps its words."""
    python = programs.add(
        "a python",
        """printf '%s\\0' "$@" "$A" > words.$STEPMARK_HOST_RANK
    env | grep ^STEPMARK_ > variables.$STEPMARK_HOST_RANK; exit $((STEPMARK_HOST_RANK + 3))""",
    )
    programs.add(
        "ssh",
        """printf '%s\\0' "$@" > "ssh.$1"; cd /; exec env -i PATH="$PATH" bash -c "$2" """,
    )
    text = script_of("--ssh", *HOSTS, "--python", str(python), "--export", "A", words=NASTY)
    assert run_script(text, A=PASSED) == 3  # that of the first host
    keys = set()
    for rank, host in enumerate("ab"):
        words = (programs.folder / f"words.{rank}").read_text().split("\0")
        assert words == ["-m", "stepmark", *NASTY, PASSED, ""]
        pairs = (programs.folder / f"variables.{rank}").read_text().splitlines()
        variables = dict(pair.split("=") for pair in pairs)
        keys.add(variables.pop("STEPMARK_KEY"))
        assert variables["STEPMARK_HOSTS"] == "a,b"
        assert variables["STEPMARK_NPROC"] == "2"
        given = (programs.folder / f"ssh.{host}").read_text()
        assert PASSED.strip() not in given
        assert not any(key in given for key in keys)
    assert len(keys) == 1


def test_users_in_a_file_of_hosts_are_not_dropped_for_ssh(tmp_path: Path) -> None:
    (tmp_path / "iplist").write_text("me@10.0.0.1:22\n")
    code, out, err = called("--ssh", "--hosts", "iplist", "--gpus-per-node", "1", "--", *COMM)
    assert (code, out) == (2, "")
    assert "--hosts me@10.0.0.1:22 is invalid" in err


def test_torchrun_has_a_command_per_host() -> None:
    text = script_of("--torchrun", *HOSTS, "--port", "4000", "--fabric", "tcp", words=NASTY)
    commands = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(commands) == 2
    for rank, command in enumerate(commands):
        words = shlex.split(command)
        where = words.index("torchrun")
        assert words[0] == "env"
        assert words[where:] == [
            *("torchrun", "--nnodes", "2", "--node-rank", str(rank)),
            *("--nproc-per-node", "2", "--master-addr", "a", "--master-port", "4000"),
            *("-m", "stepmark", *NASTY),
        ]


PASSED = "  it's $HOME `x` \\n 7"  # a secret, which only the environment has


def test_slurm_passes_a_variable_without_writing_it(programs: Programs) -> None:
    programs.add("scontrol", "echo n1")
    programs.add("srun", RECORD)
    text = script_of(*SLURM, "--export", "A,NCCL_DEBUG=INFO")
    assert "#SBATCH --export=ALL,A\n" in text
    assert "--export=ALL," not in script_of(*SLURM)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    assert run_script(text, A=PASSED, **job) == 0
    assert recorded(programs)[1]["A"] == PASSED
    assert "KEY,A,NCCL_DEBUG \\" in script_of(
        *SLURM, "--container", "i", "--export", "A,NCCL_DEBUG=INFO"
    )


@pytest.mark.parametrize("target", [SLURM, ("--mpirun", *HOSTS), ("--pssh", *HOSTS)])
@pytest.mark.parametrize("value", [None, "two\nlines"])
def test_a_script_refuses_to_pass_what_is_not_there(
    target: tuple[str, ...], value: str | None, programs: Programs
) -> None:
    programs.add("scontrol", "echo n1")
    for name in ("srun", "mpirun", "pssh"):
        programs.add(name, "touch started")
    variables = {} if value is None else {"A": value}
    assert run_script(script_of(*target, "--export", "A"), **variables) == 2
    assert not (programs.folder / "started").exists()


def test_mpirun_passes_a_variable_without_writing_it(programs: Programs) -> None:
    programs.add("mpirun", RECORD)
    run_script(script_of("--mpirun", *HOSTS, "--export", "A"), A=PASSED)
    words, variables = recorded(programs)
    assert words[words.index("A") - 1] == "-x"
    assert variables["A"] == PASSED


def test_pssh_passes_a_variable_through_stdin(programs: Programs) -> None:
    python = programs.add("a python", RECORD)
    programs.add(
        "pssh",
        """printf '%s\\0' "$@" > pssh; cd /; exec env -i PATH="$PATH" bash -c "${!#}" """,
    )
    words = ("--pssh", *HOSTS, "--python", str(python), "--export", "A")
    run_script(script_of(*words), A=PASSED)
    _, variables = recorded(programs)
    assert variables["A"] == PASSED
    assert len(bytes.fromhex(variables["STEPMARK_KEY"])) == 16
    assert PASSED.strip() not in (programs.folder / "pssh").read_text()


def test_torchrun_inherits_a_variable() -> None:
    assert "A=" not in script_of("--torchrun", *HOSTS, "--export", "A", "--fabric", "tcp")


@pytest.mark.parametrize(
    "pair", ["HF_TOKEN=Zq7xJ2vK", "https_proxy=http://me:Zq7xJ2vK@host", "A=Bearer Zq7xJ2vK"]
)
def test_a_script_holds_no_secret(pair: str) -> None:
    code, out, err = called(*SLURM, "--export", pair, "--", *COMM)
    name = pair.partition("=")[0]
    assert (code, out) == (2, "")
    assert f"use --export {name}, which passes the value on" in err
    assert "Zq7xJ2vK" not in err


def test_a_command_in_a_script_holds_no_secret() -> None:
    code, out, err = called(*SLURM, "--", "train", "--model", "https://me:Zq7xJ2vK@host/a")
    assert (code, out) == (2, "")
    assert "without a secret: pass it by --export NAME" in err
    assert "Zq7xJ2vK" not in err


def test_a_variable_that_is_passed_is_set_where_the_job_is_submitted(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.add("sbatch", "touch submitted; exit 1")
    words = (*SLURM, "--submit", "--export", "A", "--", *COMM)
    code, _, err = called(*words)
    assert code == 2
    assert "--export A is invalid: it must be a variable that is set" in err
    assert not (programs.folder / "submitted").exists()
    monkeypatch.setenv("A", "1")
    called(*words)
    assert (programs.folder / "submitted").exists()


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11,20],m", ["n08", "n09", "n10", "n11", "n20", "m"]),
        ("r[1-2]n[1-2].x", ["r1n1.x", "r1n2.x", "r2n1.x", "r2n2.x"]),
    ],
)
def test_hosts(text: str, hosts: list[str]) -> None:
    assert read_hosts(text) == tuple(hosts)


@pytest.mark.parametrize(
    ("flags", "number"),
    [
        (("-w", "n07,n19"), 2),
        (("-w", "n[07,19,21]"), 3),
        (("-w", "n07,n19", "-N", "4"), 4),
        (("-w", "./list", "-N", "4"), 4),
        ((), 1),
    ],
)
def test_a_slurm_job_has_the_hosts_of_its_list(flags: tuple[str, ...], number: int) -> None:
    text = script_of("--slurm", "--gpus-per-node", "2", *flags)
    assert f"#SBATCH --nodes={number}\n" in text
    text = script_of("--slurm", "--gpus-per-node", "2", *flags, words=("doctor", "--nodes"))
    assert ("p2p-matrix" in text) == (number > 1)


def test_hosts_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("# mine\na slots=8\nme@b:22  # second\n\n")
    assert read_hosts(str(tmp_path / "list")) == ("a", "b")


@pytest.mark.parametrize(
    "text", ["", ",", "a,a", "n[3-1]", "n[1-x]", "n[1", "no/file", "a b", "n[1-999999]", "-x"]
)
def test_bad_hosts(text: str) -> None:
    with pytest.raises(ConfigError):
        read_hosts(text)


BAD = [
    ((), COMM, "--slurm"),
    (("--slurm",), COMM, "--gpus-per-node"),
    (("--slurm", "--gpus-per-node", "0"), COMM, "--nproc-per-node"),
    (("--slurm", "--nproc-per-node", "0"), COMM, "--nproc-per-node"),
    ((*SLURM, "--nproc-per-node", "4"), COMM, "one rank per GPU"),
    ((*SLURM, "--pssh"), COMM, "--pssh"),
    ((*SLURM, "--hosts", "a,b"), COMM, "--nodelist"),
    (SLURM, (), "command"),
    (SLURM, ("nonsense",), "nonsense"),
    (SLURM, ("logs", "x"), "a verb that measures"),
    (SLURM, ("trace",), "a verb that measures"),
    (SLURM, (*COMM, "--nonsense"), "--nonsense"),
    (SLURM, ("comm", "all_redu"), "all_redu"),
    (SLURM, ("op", "gem"), "gem"),
    (SLURM, ("op", "gemm", "--m", "64", "--budget", "soon"), "soon"),
    (SLURM, (*COMM, "--nproc", "8"), "--nproc 8"),
    (SLURM, (*COMM, "-g", "8"), "-g 8"),
    (SLURM, (*COMM, "--out", "x"), "--out"),
    (SLURM, (*COMM, "--dry-run"), "--dry-run"),
    (SLURM, (*COMM, "--resume", "x"), "--resume"),
    ((*SLURM, "--fabric", "carrier-pigeon"), COMM, "infiniband, roce, efa, slingshot, tcp"),
    ((*SLURM, "--export", "A B"), COMM, "NAME=VALUE"),
    ((*SLURM, "--export", "1A=2"), COMM, "NAME=VALUE"),
    ((*SLURM, "--export", "A=1\nrm"), COMM, "printable"),
    ((*SLURM, "--partition", "a\nb"), COMM, "printable"),
    ((*SLURM, "--job-name", "a/b"), COMM, "--job-name"),
    ((*SLURM, "--time", "30"), COMM, "30m"),
    ((*SLURM, "--time", "soon"), COMM, "--time"),
    ((*SLURM, "--time", "99x"), COMM, "HH:MM:SS"),
    (SLURM, (*COMM, "-t", "8"), "-t 8 is invalid: it must be 1, since each GPU has a process"),
    ((*SLURM, "--container-mounts", "/d:/d"), COMM, "--container"),
    ((*SLURM, "--port", "80"), COMM, "--port"),
    ((*SLURM, "-N", "0"), COMM, "-N 0"),
    (
        (*SLURM, "-w", "n[07,19,21]"),
        COMM,
        "-N 2 is invalid: it must be at least the 3 hosts that --nodelist names",
    ),
    ((*SLURM, "-w", "n[07"), COMM, "n[07 is invalid: it must be a host name"),
    (("--slurm", "--gpus-per-node", "2", "-w", "./list"), COMM, "--nodes is missing"),
    (("--pssh", "--gpus-per-node", "2"), COMM, "--hosts"),
    (("--torchrun", *HOSTS, "-p", "gpu"), COMM, "only with --slurm"),
    (("--mpirun", *HOSTS, "-N", "2"), COMM, "only with --slurm"),
    (("--mpirun", *HOSTS, "--submit"), COMM, "only with --slurm"),
    (("--pssh", *HOSTS, "--on-interrupt", "cancel"), COMM, "only with --slurm"),
    ((*SLURM, "--on-interrupt", "explode"), COMM, "leave, cancel"),
    (("--follow", "7", "--requeue"), (), "--requeue"),
    ((*SLURM, "-o", "x.txt"), COMM, "-o x.txt is invalid: it must be a folder for runs"),
    (("--pssh", *HOSTS, "--output", "x"), COMM, "only with --slurm"),
    (SLURM, ("doctor",), "command doctor is invalid: it must be doctor --nodes"),
    (SLURM, ("doctor", "--nodes", "--device", "cpu"), "--device cpu"),
    (SLURM, ("doctor", "--nodes", "--from", "x"), "the job gives a verdict on its own hosts"),
    ((*SLURM, "--requeue"), ("doctor", "--nodes"), "a verb that can resume its run"),
    (("--torchrun", *HOSTS), ("doctor", "--nodes"), "another target: ranks of torchrun"),
    (("--follow", "7"), COMM, "beside --follow"),
    (("--fabric", "list", "--slurm"), (), "beside --fabric"),
]


@pytest.mark.parametrize(("flags", "words", "named"), BAD)
def test_bad_input_is_one_line(
    flags: tuple[str, ...], words: tuple[str, ...], named: str
) -> None:
    code, out, err = called(*flags, "--", *words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert named in err


def test_a_verb_without_the_dashes_before_it() -> None:
    code, out, err = called(*SLURM, *COMM, "-b", "8")
    assert (code, out) == (2, "")
    assert "command comm is invalid: it must come behind --: stepmark launch OPTIONS --" in err
    code, out, err = called(*SLURM, "--job-name", "run", *COMM, "-b", "8")
    assert (code, out) == (2, "")
    assert "command comm is invalid" in err, "run is the job's name"


def test_a_job_goes_on_with_a_run(programs: Programs, tmp_path: Path) -> None:
    programs.add("scontrol", "echo n1")
    programs.add("srun", RECORD)
    for out, folder in (((), tmp_path / "runs"), (("--out", "x y"), tmp_path / "x y")):
        text = script_of(*SLURM, *out, "--requeue", words=("resume", "2026", "--force"))
        run_script(text, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n1", SLURM_RESTART_COUNT="1")
        words = recorded(programs)[0]
        assert words[6:] == ["resume", "--out", str(folder), "2026", "--force"]
    assert not (tmp_path / "runs").exists()


def test_verbs_that_measure_are_those_with_ranks_and_runs() -> None:
    classes = {
        name: load(entry.options) for name, entry in main.VERBS.items() if entry.options
    } | {"op": main.command("op", []).cls}
    measuring = {
        name
        for name, kind in classes.items()
        if {"nproc", "out", "dry_run"} <= {field.name for field in dataclasses.fields(kind)}
    }
    assert measuring == {*launch.MEASURING}


def test_every_option_is_documented() -> None:
    text = DOCS.read_text()
    for option in options(LaunchOptions):
        long = [word for word in option.words if word.startswith("--")]
        assert option.argument or any(f"`{word}" in text for word in long), option.name


@pytest.mark.parametrize(
    ("arguments", "program"),
    [((*SLURM, "--submit", "--", *COMM), "sbatch"), (("--follow", "12"), "scontrol")],
)
def test_without_slurm(
    arguments: tuple[str, ...], program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, err = called(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"stepmark: {program} is missing")
    assert err.count("\n") == 1


def test_defaults_are_those_of_the_command_line() -> None:
    assert build(LaunchOptions, {"words": ["run"]}) == LaunchOptions(words=("run",))


@pytest.mark.parametrize(
    ("words", "is_refused"),
    [
        ("train lama-3.1-70b", True),
        ("op gemm --model lama-3.1-70b", True),
        ("train llama-3.1-70b", False),
        ("train only-on-the-hosts.json", False),
        ("run", False),
    ],
)
def test_a_name_of_no_model_is_refused_before_the_job(words: str, is_refused: bool) -> None:
    code, out, err = called(*SLURM, "--", *words.split())
    assert code == (2 if is_refused else 0)
    assert ("did you mean llama-3.1-70b" in err) == is_refused
    assert out.startswith("#!/bin/bash") != is_refused
