"""Detect torchrun, srun or mpirun: then this process is one rank, and starts none."""

import os

from stepmark.ground.errors import ConfigError

# Rank, local rank, world size, ranks on this host. torchrun's own names come first.
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# Slurm also sets the rank in a batch script; the last variable only in steps of srun.
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")
_PMI = ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS")  # MPICH, Intel MPI
_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE"))
# Hosts of a job with one process per host, its agent, which starts ranks: see job.py.
HOSTS = "STEPMARK_HOSTS"
BIND = "STEPMARK_BIND"  # "closest": ranks run on the cores closest to their GPU
_FIRST_PORT = 20_000
_NUM_PORTS = 10_000


def is_rank() -> bool:
    """Return whether a launcher started this process as one of several ranks."""
    return _names() is not None


def is_agent() -> bool:
    """Return whether this is the process of a host that starts ranks, in a job of hosts."""
    return HOSTS in os.environ


def is_first() -> bool:
    """Return whether this is rank 0, or a process that is no rank."""
    names = _names()
    return names is None or os.environ[names[0]] == "0"


def num_ranks() -> int:
    names = _names()
    return int(os.environ[names[2]]) if names else 1


def num_local_ranks() -> int | None:
    """Return the ranks of this host; None where no launcher says."""
    names = _names()
    text = os.environ.get(names[3], "") if names else ""
    local_size = text.split(",")[0].partition("(")[0]  # Slurm: 8(x2),4
    return int(local_size) if local_size.isdecimal() else None


def leave_hosts() -> None:
    """Make this process, and those that it starts, act for its host instead of as an agent."""
    os.environ.pop(HOSTS, None)


def leave() -> bool:
    """Make this process act for its host instead of as a rank, as do those that it starts.

    Returns False on all ranks of a host but the first.
    """
    names = _names()
    is_first_here = names is None or os.environ.get(names[1], "0") == "0"
    for name in (name for launcher in (_TORCHRUN, _SLURM, _MPI, _PMI) for name in launcher):
        os.environ.pop(name, None)
    return is_first_here


def as_torchrun() -> None:
    """Set the variables that torchrun sets from those of srun or mpirun.

    Raises ConfigError where ranks of several hosts have no address of rank 0.
    """
    names = _names()
    if names is None or names is _TORCHRUN:
        return
    for target, source in zip(_TORCHRUN[:3], names[:3], strict=True):
        os.environ[target] = os.environ[source]
    if "MASTER_ADDR" not in os.environ:
        if str(num_local_ranks()) != os.environ["WORLD_SIZE"]:
            raise ConfigError(
                "MASTER_ADDR", None, "set to the host of rank 0 for several hosts"
            )
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PMIX_NAMESPACE") or ""
    number = int("".join(filter(str.isdecimal, job))[-9:] or 0)
    os.environ.setdefault("MASTER_PORT", str(_FIRST_PORT + number % _NUM_PORTS))


def _names() -> tuple[str, ...] | None:
    if all(name in os.environ for name in _TORCHRUN[:3:2]):
        return _TORCHRUN
    # Slurm last: in its jobs mpirun's processes have its variables, too.
    for names in () if is_agent() else (_MPI, _PMI, _SLURM):
        # A step of one task is a command that srun runs, as mpirun -n 1 does.
        if all(name in os.environ for name in names[:3]) and os.environ[names[2]] != "1":
            return names
    return None
