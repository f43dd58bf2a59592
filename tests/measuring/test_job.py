"""Jobs of several hosts: what the environment says, and how they end."""

import faulthandler
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepmark.ground import outer_launcher
from stepmark.ground.errors import ConfigError
from stepmark.measuring import job, supervise
from stepmark.measuring.machine import Machine
from stepmark.measuring.ranks import _reach, cores_of
from stepmark.measuring.supervise import not_waiting
from stepmark.training.train_plan import placement_notes

pytestmark = pytest.mark.ranks

KEY = "0123456789abcdef"
VARIABLES = {"STEPMARK_HOSTS": "n1,n2,n3", "STEPMARK_PORT": "29500", "STEPMARK_KEY": KEY}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)


def set_all(patch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in (VARIABLES | values).items():
        patch.setenv(name, value)


@pytest.mark.parametrize("name", ["STEPMARK_HOST_RANK", "SLURM_PROCID", "PMI_RANK"])
def test_an_agent_knows_its_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, **{name: "2", "STEPMARK_NPROC": "8"})
    here = job.current()
    assert here is not None
    assert (here.hosts, here.rank, here.leads) == (("n1", "n2", "n3"), 2, False)
    assert (here.port, here.key, here.nproc) == (29500, KEY.encode(), "8")
    assert not outer_launcher.is_rank(), "one process per host is no rank"


def test_an_agent_finds_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, STEPMARK_HOSTS=f"n1,{socket.gethostname()}")
    assert (here := job.current()) is not None
    assert here.rank == 1
    monkeypatch.setenv("STEPMARK_HOSTS", "n1,n2")
    with pytest.raises(ConfigError, match="STEPMARK_HOST_RANK is missing"):
        job.current()


@pytest.mark.parametrize(
    "wrong",
    [
        {"STEPMARK_HOSTS": "n1,n1"},
        {"STEPMARK_HOSTS": "n1,,n2"},
        {"STEPMARK_PORT": "70000"},
        {"STEPMARK_KEY": "short"},
        {"STEPMARK_HOST_RANK": "3"},
        {"STEPMARK_JOIN_S": "soon"},
        {"STEPMARK_BIND": "far"},
    ],
)
def test_wrong_variables_are_refused(
    wrong: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, **{"STEPMARK_HOST_RANK": "0"} | wrong)
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        job.current()


def test_a_job_has_ranks_on_every_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """--nproc counts the ranks of all hosts, STEPMARK_NPROC those of one."""
    set_all(monkeypatch, STEPMARK_HOST_RANK="0")
    cpu, gpus = Machine(device="cpu"), Machine(device="cuda", num_accelerators=8)
    assert gpus.num_ranks("all") == gpus.num_ranks(None, "all") == 24
    assert cpu.num_ranks("6") == 6
    assert gpus.ranks_per_host(24) == 8
    with pytest.raises(ConfigError, match="a multiple of the 3 hosts"):
        cpu.num_ranks("4")
    with pytest.raises(ConfigError, match="from 1 to 24"):
        gpus.num_ranks("25")
    monkeypatch.setenv("STEPMARK_NPROC", "2")
    assert cpu.num_ranks(None, "1") == 6
    assert cpu.num_ranks("1") == 1
    monkeypatch.setenv("STEPMARK_NPROC", "9")
    with pytest.raises(ConfigError, match="from 1 to 8"):
        gpus.num_ranks(None)


def test_tensor_parallel_groups_over_hosts_are_noted() -> None:
    cases = [SimpleNamespace(parallel=SimpleNamespace(tp=tp)) for tp in (1, 2, 4, 3)]
    notes = placement_notes(cases, 2)  # type: ignore[arg-type]
    assert [note.split(":")[0] for note in notes] == ["tp 3", "tp 4"]


def test_mpich_and_intel_mpi_are_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("PMI_SIZE", "4")
    assert not outer_launcher.is_rank(), "srun --mpi=pmi2 sets these two as well"
    monkeypatch.setenv("MPI_LOCALRANKID", "1")
    assert outer_launcher.is_rank()
    assert outer_launcher.num_ranks() == 4
    assert outer_launcher.num_local_ranks() is None
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    assert outer_launcher.num_local_ranks() == 2


def test_a_rank_has_both_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell that exports one of them, as for a script of its own, starts no rank."""
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(name, "1")
        assert not outer_launcher.is_rank()
    monkeypatch.setenv("RANK", "0")
    assert outer_launcher.is_rank()


def test_the_kernels_list_of_cores() -> None:
    assert cores_of("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert cores_of("\n") == set()


@pytest.mark.parametrize(("num_cases", "expected"), [(1, 0), (3, 3)])
def test_cases_that_are_left_out_are_the_exit_code(
    num_cases: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host may be lost after its case was measured: nothing has failed, but the rest is."""
    lost = supervise.RankFailure(
        position=0, cause="lost rank", ranks=(1,), message="host n2 is lost", is_final=True
    )
    monkeypatch.setattr(supervise, "_lead", lambda *_, **__: lost)
    code = supervise.supervise(
        "none", Path("plan"), (), 2, num_cases=num_cases, on_failure=lambda failure: False
    )
    assert code == expected


def stack_in(step: Callable[[Callable[[], None]], object]) -> str:
    """The stack that a rank writes when it is asked inside of `step`."""
    with tempfile.TemporaryFile("w+") as file:
        step(lambda: faulthandler.dump_traceback(file=file))
        file.seek(0)
        return file.read()


def test_ranks_that_wait_for_others_are_not_the_cause() -> None:
    """A rank whose GPU is stuck is in the case as the others are, but waits for no rank."""
    waits, works = stack_in(_reach), stack_in(lambda dump: dump())
    assert not_waiting({0: waits, 1: works, 2: waits}) == [1]
    assert not_waiting({0: waits, 1: waits}) == []
    assert not_waiting({0: works, 1: works}) == [], "nothing tells them apart"
