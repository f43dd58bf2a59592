"""A real Slurm of two nodes: a controller on this machine, and a slurmd on each host."""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.network import GATEWAY, Host, sh

_CONFIG = """
ClusterName=stepmark
SlurmctldHost={controller}({gateway})
AuthType=auth/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
KillWait=30
InactiveLimit=0
{nodes}
PartitionName=debug Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""
_MARK = "# stepmark tests"


class Slurm:
    """Started at once; needs root and Debian's slurm-wlm, which may run several slurmd."""

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self.folder, self._hosts = folder, hosts
        for name in ("slurmctld", "slurmd", "munged"):
            assert shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin"), (
                f"make test-cluster needs {name}: apt-get install slurm-wlm munge"
            )
        self._name_hosts()
        (folder / "state").mkdir()
        nodes = []
        for host in hosts:
            (folder / f"spool.{host.name}").mkdir()
            nodes.append(
                f"NodeName={host.name} NodeHostname={host.name} NodeAddr={host.address} "
                f"Port={17_000 + host.number} CPUs=2 RealMemory=2000 State=UNKNOWN"
            )
        self.config = folder / "slurm.conf"
        self.config.write_text(
            _CONFIG.format(
                controller=os.uname().nodename.partition(".")[0],
                gateway=GATEWAY,
                folder=folder,
                nodes="\n".join(nodes),
                names=",".join(host.name for host in hosts),
            )
        )
        os.environ["SLURM_CONF"] = str(self.config)
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        self._start_munge()
        self._daemon("slurmctld", "-D")
        for host in self._hosts:
            self._daemon(*host.inside("/usr/sbin/slurmd", "-D", "-N", host.name))
        end_s = time.monotonic() + 30
        while sh("sinfo -h -N -o %T | sort -u").split() != ["idle"]:
            assert time.monotonic() < end_s, self.logs()
            time.sleep(0.2)

    def _daemon(self, *command: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin"},
                start_new_session=True,
            )
        self._daemons.append(process)

    def _start_munge(self) -> None:
        # Its socket alone says nothing: one of a dead daemon makes all of Slurm hang.
        if subprocess.run(["munge", "-n"], check=False, capture_output=True).returncode == 0:
            return
        sh("install -d -o munge -g munge /run/munge")
        sh("runuser -u munge -- /usr/sbin/munged --force")

    def _name_hosts(self) -> None:
        lines = [f"{host.address} {host.name} {_MARK}\n" for host in self._hosts]
        self._unname_hosts()
        with open("/etc/hosts", "a", encoding="utf-8") as file:
            file.writelines(lines)

    def _unname_hosts(self) -> None:
        path = Path("/etc/hosts")
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(x for x in lines if not x.endswith(f"{_MARK}\n")))

    def logs(self) -> str:
        return "\n".join(
            f"{file.name}:\n{file.read_text(errors='replace')[-2000:]}"
            for file in self.folder.glob("*.log")
        )

    def stop(self) -> None:
        subprocess.run(["scancel", "-u", "root"], check=False)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._unname_hosts()
        del os.environ["SLURM_CONF"]
