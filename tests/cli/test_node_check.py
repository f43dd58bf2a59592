"""stepmark doctor --nodes: on this machine's CPU, from files of other hosts, and bad input."""

import csv
import itertools
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from tests.collectives.comm_records import comm_case, comm_run, noisy
from tests.nodes.test_node_verdict import fleet
from tests.store.writers import new_run

from stepmark.cases.comm_case import CommCase
from stepmark.cases.plan import Entry, How, Plan
from stepmark.ground.units import MIB
from stepmark.measuring.job import Job
from stepmark.model.collectives import Collective
from stepmark.nodes import node_check, node_check_verb
from stepmark.nodes.node_check import NodeCheck
from stepmark.store import plans

from .process import stepmark, stepmark_process

DOCTOR = ["doctor", "--nodes"]


def folder_of(tmp_path: Path, checks: list[NodeCheck]) -> Path:
    for check in checks:
        file = tmp_path / "checks" / "nodes" / f"{check.host}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        node_check.write(check, file)
    return tmp_path / "checks"


def failing(folder: Path) -> str:
    return (folder / "failing_nodes.txt").read_text()


def test_checks_survive_their_file(tmp_path: Path) -> None:
    checks = fleet(3, 2, {(1, 0): float("nan")})
    again = node_check.read_all(folder_of(tmp_path, checks))
    assert again[::2] == checks[::2]
    assert str(again[1]) == str(checks[1])


def test_a_healthy_fleet(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, fleet(5, 8))
    done = stepmark(*DOCTOR, "--from", str(folder), "--gpus-per-node", "8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert failing(folder) == ""
    assert done.stdout.count("healthy") >= 5


def test_a_slow_and_a_missing_host_are_to_be_avoided(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, fleet(5, 8, {(3, 2): 0.8}))
    expect = ",".join(f"n{host:03}" for host in range(6))
    words = ["--from", str(folder), "--expect", expect, "--csv", "rows.csv", "--json", "-"]
    done = stepmark(*DOCTOR, *words, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert failing(folder) == "n003,n005\n"
    document = json.loads(done.stdout)
    nodes = {node["host"]: node["outcome"] for node in document["nodes"]}
    assert nodes == dict.fromkeys(nodes, "healthy") | {"n003": "slow", "n005": "failed"}
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert [row["where"] for row in rows if row["outcome"] != "healthy"] == ["n003/2", "n005"]
    assert len(rows) == 5 * 8 + 1


def test_of_two_hosts_the_slower_is_to_be_avoided(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, fleet(2, 1, {(1, 0): 0.8}))
    done = stepmark(*DOCTOR, "--from", str(folder), cwd=tmp_path)
    assert done.returncode == 1
    assert failing(folder) == "n001\n"
    assert "what two cannot tell:\n  gemm" in done.stdout


def test_no_interval_is_printed_that_means_nothing(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, fleet(3, 1, launches=2, noise=0.3))
    done = stepmark(*DOCTOR, "--from", str(folder), cwd=tmp_path)
    assert done.returncode == 3
    assert done.stdout.count("too few launches ") == 6  # in the rows, and as their reasons
    assert "467454934" not in done.stdout


def test_hosts_without_gpus_have_no_column_of_them(tmp_path: Path) -> None:
    checks = fleet(3, 1)
    headings = []
    for number, count in ((0, 0), (1, 1)):
        folder = folder_of(
            tmp_path / str(number), [replace(c, num_devices=count) for c in checks]
        )
        done = stepmark(*DOCTOR, "--from", str(folder), cwd=tmp_path)
        headings.append(
            next(x.split() for x in done.stdout.splitlines() if x.startswith("node "))
        )
    assert headings == [["node", "outcome", "why"], ["node", "GPUs", "outcome", "why"]]


def test_a_job_names_its_hosts_whatever_they_call_themselves(tmp_path: Path) -> None:
    """Pairs have the names of the hosts, the check those of the job."""
    checks = [
        replace(check, host=f"10.0.0.{number}", nodename=f"n{number:03}.cluster")
        for number, check in enumerate(fleet(4, 8))
    ]
    checks = [
        replace(c, figures=tuple(replace(f, where=(c.host,)) for f in c.figures))
        for c in checks
    ]
    folder = folder_of(tmp_path, checks)
    run = run_of_pairs(tmp_path, 4, slow=2)
    words = ["--from", str(folder), "--pairs", str(run), "--json", "-"]
    done = stepmark(*DOCTOR, *words, cwd=tmp_path)
    nodes = {node["host"]: node["outcome"] for node in json.loads(done.stdout)["nodes"]}
    assert nodes["10.0.0.2"] == "slow", done.stderr


def test_a_table_of_a_large_fleet_leaves_out_what_is_healthy(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, fleet(20, 8, {(3, 2): 0.8}))
    done = stepmark(*DOCTOR, "--from", str(folder), cwd=tmp_path)
    assert "159 healthy figures are not shown" in done.stdout
    assert len(done.stdout.splitlines()) < 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["doctor", "--nproc", "2"], "--nproc 2 is invalid: it works only with --nodes."),
        (["doctor", "--from", "x"], "--from x is invalid: it works only with --nodes."),
        ([*DOCTOR, "--from", "nowhere"], "--from nowhere is invalid: it must be a folder with"),
        ([*DOCTOR, "--from", "x", "--nproc", "2"], "--nproc 2 is invalid: it has no effect"),
        ([*DOCTOR, "--expect", "a,b"], "--expect a,b is invalid: it works only with --from."),
        ([*DOCTOR, "--floor", "2"], "--floor 2 is invalid: it must be a share"),
        (
            [*DOCTOR, "--device", "tpu"],
            "--device tpu is invalid: did you mean cpu? It must be one of cuda, cpu.",
        ),
        ([*DOCTOR, "--out", "/proc/x"], "--out /proc/x is invalid: it must be a folder that"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    done = stepmark(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSON"),
        ("[]", "a JSON object"),
        ("{}", "schema 1"),
        ('{"schema": 1, "host": 3}', "a node check"),
        ('{"schema": 1, "host": "a", "checked_at": "", "figures": [{}]}', "a node check"),
    ],
)
def test_a_damaged_file_is_a_failure_of_its_host(
    text: str, message: str, tmp_path: Path
) -> None:
    """The others are judged."""
    folder = folder_of(tmp_path, fleet(3, 1))
    (folder / "nodes" / "a.json").write_text(text)
    words = ["--gpus-per-node", "1", "--json", "-"]
    done = stepmark(*DOCTOR, "--from", str(folder), *words, cwd=tmp_path)
    assert done.returncode == 1
    nodes = {node["host"]: node for node in json.loads(done.stdout)["nodes"]}
    assert {host for host, node in nodes.items() if node["outcome"] == "failed"} == {"a"}
    (reason,) = nodes["a"]["reasons"]
    assert message in reason
    assert "a.json" in reason
    assert failing(folder) == "a\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"where": ("n000", "n002")},
            "'n000-n002' is invalid: it must be of hosts that have a",
        ),
        ({"where": ()}, "figures of one place or two"),
        ({"where": ("n000", "n001", "n001")}, "figures of one place or two"),
        ({"unit": "bit/s"}, "in FLOP/s or B/s"),
    ],
)
def test_a_file_with_figures_that_cannot_be_judged(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    first, second = fleet(2, 1)
    figures = (*first.figures, replace(first.figures[0], **change))  # type: ignore[arg-type]
    folder = folder_of(tmp_path, [replace(first, figures=figures), second])
    done = stepmark(*DOCTOR, "--from", str(folder), cwd=tmp_path)
    is_refused = change.get("where") == ("n000", "n002")
    assert done.returncode == (2 if is_refused else 1)
    output = done.stderr if is_refused else done.stdout
    assert message in output
    assert "n000.json" in output
    if is_refused:
        words = ["--from", str(folder), "--expect", "n000,n001,n002"]
        assert stepmark(*DOCTOR, *words, cwd=tmp_path).returncode == 1, "n002 has failed"


def test_pairs_of_other_hosts_are_refused_with_expected_hosts(tmp_path: Path) -> None:
    """All checks are there, under one name of the machine that made them."""
    checks = [replace(check, nodename="vm") for check in fleet(4, 1)]
    folder = folder_of(tmp_path, checks)
    run = run_of_pairs(tmp_path, 4)
    words = ["--from", str(folder), "--pairs", str(run), "--expect", "n[000-003]"]
    done = stepmark(*DOCTOR, *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "a run on hosts of --from" in done.stderr
    words[-1] = "n[000-004]"
    done = stepmark(*DOCTOR, *words, cwd=tmp_path)
    assert done.returncode == 1, "n004 has no result"
    assert "has no rate between two of these hosts" in done.stderr


def test_expected_hosts_may_be_ranges(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, fleet(3, 1))
    done = stepmark(*DOCTOR, "--from", str(folder), "--expect", "n[000-004]", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert failing(folder) == "n003,n004\n"
    for hosts in ("n[000", "n000,n000", "n/0"):
        done = stepmark(*DOCTOR, "--from", str(folder), "--expect", hosts, cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "--expect" in done.stderr


@pytest.mark.parametrize(("num_devices", "is_named"), [(8, True), (1, False), (0, False)])
def test_gpus_whose_way_to_the_network_is_not_tested(
    num_devices: int, is_named: bool, tmp_path: Path
) -> None:
    """One rank of each host measures the network, through one GPU's ports."""
    checks = [replace(check, num_devices=num_devices) for check in fleet(4, 1)]
    folder = folder_of(tmp_path, checks)
    run = run_of_pairs(tmp_path, 4)
    done = stepmark(*DOCTOR, "--from", str(folder), "--pairs", str(run), cwd=tmp_path)
    text = "ways of 7 of 8 GPUs to the network: 1 rank of each host measured it (n000, n001, "
    assert (text in done.stdout) == is_named
    assert ("to the network" in done.stdout) == is_named


def test_a_host_has_the_name_by_which_its_job_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host is expected by this name."""
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    name = node_check_verb._name_of_host
    own = os.uname().nodename
    jobs = {
        hosts: Job(hosts=hosts, rank=1, port=1, key=b"", nproc=None, join_s=1.0)
        for hosts in (("10.0.0.1", "10.0.0.2"), ("a", own), ("n1", "n2"))
    }
    assert [name(None), *map(name, jobs.values())] == [own, "10.0.0.2", own, "n2"]
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert [name(None), *map(name, jobs.values())] == ["n1", "10.0.0.2", own, "n1"]


def test_properties_of_ports_are_those_of_hardware(tmp_path: Path) -> None:
    for port, speed, state in (("eth0", "400000", "up"), ("eth1", "400000", "down")):
        (tmp_path / "net" / port / "device").mkdir(parents=True)
        (tmp_path / "net" / port / "speed").write_text(speed)
        (tmp_path / "net" / port / "operstate").write_text(state)
    (tmp_path / "net" / "veth1").mkdir()
    ports = node_check_verb._ports(tmp_path)
    assert node_check_verb._text_of(ports) == "1 x 400 Gb/s up, 1 x 400 Gb/s down"
    assert [port.bytes_per_s for port in ports] == [50e9, 50e9]


def test_a_process_sees_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    assert node_check_verb._only(1, 2, "cuda") == {"CUDA_VISIBLE_DEVICES": "1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-ab")
    assert node_check_verb._only(1, 2, "cuda") == {"CUDA_VISIBLE_DEVICES": "GPU-ab"}
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "6,7")
    assert node_check_verb._only(0, 2, "cuda") == {"HIP_VISIBLE_DEVICES": "6"}
    assert node_check_verb._only(0, 1024, "cpu") == {"OMP_NUM_THREADS": "1"}


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_on_a_cpu(tmp_path: Path) -> None:
    words = ["--nproc", "2", "--device", "cpu", "--json", "check.json"]
    done = stepmark_process(*DOCTOR, *words, cwd=tmp_path, timeout=300)
    assert done.returncode == 3, done.stderr  # two ranks are too few to compare
    document = json.loads((tmp_path / "check.json").read_text())
    figures = {row["figure"].split()[0] for row in document["figures"]}
    assert figures == {"gemm", "copy", "p2p", "all_reduce"}
    assert all(row["rate"] > 0 and row["launches"] == 2 for row in document["figures"])
    texts = " ".join(remark["text"] for remark in document["remarks"])
    assert "memory test: 0 wrong bytes" in texts
    assert "network between hosts" in texts
    (check,) = node_check.read_all(tmp_path / "node-check")
    assert (check.num_devices, check.stage, check.failures) == (0, "", ())


def test_a_budget_in_which_a_healthy_device_would_count_as_stuck_is_refused(
    tmp_path: Path,
) -> None:
    done = stepmark(*DOCTOR, "--budget", "700s", cwd=tmp_path)
    assert done.returncode == 2
    assert "at most --timeout (600s)" in done.stderr


@pytest.mark.ranks
@pytest.mark.slow
def test_what_the_budget_has_no_time_for_is_said(tmp_path: Path) -> None:
    words = ["--nproc", "2", "--device", "cpu", "--budget", "1s", "--launches", "9"]
    done = stepmark_process(*DOCTOR, *words, cwd=tmp_path, timeout=300)
    assert done.returncode == 3, done.stderr
    (check,) = node_check.read_all(tmp_path / "node-check")
    assert check.figures
    assert all(len(figure.values) < 9 for figure in check.figures)
    assert "skipped: --budget leaves nothing" in " ".join(note.text for note in check.notes)
    assert "collectives inside the node: --budget leaves nothing" in done.stdout


@pytest.mark.ranks
@pytest.mark.slow
def test_a_device_that_hangs_is_killed_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPMARK_TEST_HOOK", "tests.cli.hanging")
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    words = ["--nproc", "2", "--device", "cpu", "--launches", "1"]
    begin = time.monotonic()
    done = stepmark_process(*DOCTOR, *words, "--timeout", "40s", cwd=tmp_path, timeout=120)
    assert time.monotonic() - begin < 100
    assert done.returncode == 1, done.stderr
    (check,) = node_check.read_all(tmp_path / "node-check")
    (failure,) = check.failures
    assert failure.where.endswith("/1")
    assert failure.text == "stuck while starting: not done within 40 s, killed"
    assert len(check.figures) == 2  # of the other device
    assert "not all devices could be measured" in done.stdout
    assert failing(tmp_path / "node-check") == f"{check.host}\n"


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_of_a_job_writes_its_file_and_leaves_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PROCID": "3", "LOCALID": "0", "STEP_NUM_TASKS": "4"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    words = ["--device", "cpu", "--launches", "1", "--out", "shared"]
    done = stepmark_process(*DOCTOR, *words, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    (check,) = node_check.read_all(tmp_path / "shared")
    assert check.host == "node7"
    assert len(check.figures) == 2
    assert not (tmp_path / "shared" / "failing_nodes.txt").exists()
    monkeypatch.setenv("SLURM_LOCALID", "1")
    done = stepmark_process(*DOCTOR, *words, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_the_gpus_of_this_host(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    words = ["--device", "cuda", "--budget", "20s", "--gpus-per-node", str(count)]
    done = stepmark_process(*DOCTOR, *words, cwd=tmp_path, timeout=580)
    (check,) = node_check.read_all(tmp_path / "node-check")
    assert not check.failures, check.failures
    assert not check.unclear, check.unclear
    assert done.returncode == 3, done.stdout  # no other host
    names = {figure.name.split()[0] for figure in check.figures}
    assert names >= {"gemm", "copy", "host-copy"}
    assert ("all_reduce" in names) == (count > 1)
    assert "B/s" in {figure.unit for figure in check.figures}
    assert replace(check, figures=()).num_devices == count


def run_of_pairs(
    root: Path,
    num_hosts: int,
    slow: int | None = None,
    slow_link: tuple[int, int] | None = None,
) -> Path:
    """Write a run of all ordered pairs of one rank per host, of five launches."""
    random = Random(5)
    devices = tuple(
        replace(comm_run().environment.devices[0], rank=rank, host=f"n{rank:03}.cluster")
        for rank in range(num_hosts)
    )
    info = comm_run(num_hosts)
    info = replace(info, environment=replace(info.environment, devices=devices))
    cases = [
        comm_case(Collective.P2P, MIB, num_ranks=2, world_size=num_hosts, pair=pair)
        for pair in itertools.permutations(range(num_hosts), 2)
    ]
    with new_run(root, info) as writer:
        path = writer.path
        entries = [
            Entry(position=0, launch=launch, case=case)
            for launch in range(1, 6)
            for case in cases
        ]
        entries = [replace(entry, position=i) for i, entry in enumerate(entries)]
        plans.write(
            path,
            Plan(
                command="comm",
                device="cuda",
                world_size=num_hosts,
                entries=tuple(entries),
                how=How(),
            ),
        )
        for entry in entries:
            assert isinstance(entry.case, CommCase)
            ends = entry.case.pair or ()
            time_s = 1e-4 * (3.0 if slow in ends or ends == slow_link else 1.0)
            writer.append(noisy(entry.case, time_s, random, entry.launch))
    return path


@pytest.mark.parametrize(
    ("num_hosts", "outcome"), [(7, "slow"), (4, "slow"), (3, "cannot tell")]
)
def test_a_host_whose_network_is_slow(num_hosts: int, outcome: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, fleet(num_hosts, 8))
    run = run_of_pairs(tmp_path, num_hosts, slow=2)
    words = ["--from", str(folder), "--pairs", str(run), "--json", "-"]
    done = stepmark(*DOCTOR, *words, cwd=tmp_path)
    nodes = {node["host"]: node["outcome"] for node in json.loads(done.stdout)["nodes"]}
    assert nodes["n002"] == outcome, done.stderr
    assert failing(folder) == ("n002\n" if outcome == "slow" else "")
    if outcome == "slow":
        assert {nodes[host] for host in nodes if host != "n002"} == {"healthy"}
        assert done.returncode == 1


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_a_host_without_a_check_leaves_the_verdict_on_the_others(
    num_hosts: int, tmp_path: Path
) -> None:
    """It hung, and the run of the network may have it all the same."""
    folder = folder_of(tmp_path, fleet(num_hosts, 8)[:-1])
    run = run_of_pairs(tmp_path, num_hosts)
    names = [f"n{host:03}" for host in range(num_hosts)]
    words = ["--from", str(folder), "--pairs", str(run), "--expect", ",".join(names)]
    done = stepmark(*DOCTOR, *words, "--json", "-", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert failing(folder) == f"{names[-1]}\n"
    document = json.loads(done.stdout)
    assert [node["outcome"] for node in document["nodes"]][-1] == "failed"
    pairs = [row["where"] for row in document["figures"] if "network" in str(row["figure"])]
    assert len(pairs) == (num_hosts - 1) * (num_hosts - 2)


def test_pairs_of_other_hosts_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, fleet(3, 8))
    run = run_of_pairs(tmp_path, 4)
    for pairs, words in (
        (run, "n003.cluster is none of them"),
        (folder, "the folder of a run"),
    ):
        done = stepmark(*DOCTOR, "--from", str(folder), "--pairs", str(pairs), cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr
    done = stepmark(*DOCTOR, "--pairs", str(run), cwd=tmp_path)
    assert (done.returncode, "only with --from" in done.stderr) == (2, True)


@pytest.mark.parametrize("has_slurm", [True, False])
def test_a_slow_link_is_in_a_file_with_the_command_that_may_tell(
    has_slurm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/bin/sbatch" if has_slurm else None)
    folder = folder_of(tmp_path, fleet(6, 8))
    run = run_of_pairs(tmp_path, 6, slow_link=(3, 1))
    words = ["--from", str(folder), "--pairs", str(run), "--json", "-"]
    done = stepmark(*DOCTOR, *words, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert failing(folder) == ""
    assert (folder / "slow_links.txt").read_text() == "n003 n001\n"
    assert json.loads(done.stdout)["slow_links"] == [["n003", "n001"]]
    target = "--slurm -w" if has_slurm else "--ssh --hosts"
    command = f"stepmark launch {target} n003,n001,n000,n002 --gpus-per-node 8 -- doctor"
    assert command in done.stderr
    run = run_of_pairs(tmp_path / "again", 6)
    done = stepmark(*DOCTOR, "--from", str(folder), "--pairs", str(run), cwd=tmp_path)
    assert (folder / "slow_links.txt").read_text() == ""
    assert "stepmark launch" not in done.stderr
