"""stepmark doctor --nodes: check the devices of this host, and judge all hosts together.

Each device is measured by a child process with a time limit, because a stuck driver call cannot
be interrupted. This process loads no driver. Hosts meet in files only.
"""

import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from stepmark.cases.comm_case import CommCase
from stepmark.cases.record import AnyCase
from stepmark.collectives.comm_options import MATRIX_OF_PAIRS, CommOptions
from stepmark.ground import outer_launcher
from stepmark.ground.errors import ConfigError
from stepmark.ground.files import write_text
from stepmark.ground.options import argv, dashed, plain
from stepmark.ground.packages import require
from stepmark.ground.signals import catching
from stepmark.ground.units import MIB, comma_list, plural
from stepmark.measuring import child, job
from stepmark.measuring.delivery import make_folder, write_files
from stepmark.measuring.machine import Machine
from stepmark.model.collectives import Collective
from stepmark.nodes import node_check
from stepmark.nodes.device_check import result_of
from stepmark.nodes.doctor_findings import Nic, nics
from stepmark.nodes.node_check import Fact, NodeCheck, Remark, merged
from stepmark.nodes.node_options import (
    LIST_S,
    MOST_FOR_ALL_PAIRS,
    TIMEOUT_S,
    DoctorOptions,
    check_budget,
)
from stepmark.nodes.node_verdict import (
    TOO_FEW,
    FigureVerdict,
    FleetVerdict,
    Outcome,
    is_too_wide,
    judge,
)
from stepmark.store import plans
from stepmark.store.reader import is_run, read_info
from stepmark.store.runs import new_run_id
from stepmark.store.view import console
from stepmark.tables.columns import (
    COUNT,
    NO_HEADING,
    NUMBER,
    RATIO,
    WHOLE_SHARE,
    Row,
    given,
    number,
)
from stepmark.tables.row_tables import print_lines
from stepmark.tables.table import Table

_DEVICE_CHECK = "stepmark.nodes.device_check"
FAILING = "failing_nodes.txt"
SLOW_LINKS = "slow_links.txt"  # source and destination, a link in each line
_OUT = Path("node-check")
_GRACE_S = 3.0  # from SIGTERM to SIGKILL
# For collectives without --budget: enough for the start of ranks in all launches.
_COMM_S = {"cuda": 120.0, "cpu": 30.0}
_LAUNCHES = {"cuda": 5, "cpu": 2}  # Student's t over fewer than five has wide intervals
_MESSAGE_BYTES = {"cuda": 64 * MIB, "cpu": MIB}
_FOR_VERDICT = (
    "nodes",
    "read_from",
    "pairs",
    "expect",
    "gpus_per_node",
    "floor",
    "json",
    "csv",
)
_MOST_FIGURES = 40  # of those that are healthy, on a terminal
_FABRIC = "network between hosts: give a run of comm p2p-matrix on them as --pairs"


def run(options: DoctorOptions) -> int:
    """Check this host, or judge the checks of --from. Returns the exit code."""
    here = None if options.read_from else job.current()
    outer_launcher.leave_hosts()
    if options.read_from is not None:
        for name, value in plain(options).items():
            if name not in _FOR_VERDICT:
                raise ConfigError(dashed(name), value, "it has no effect with --from")
        checks = node_check.read_all(options.read_from, options.expect or ())
        if options.pairs is not None:
            checks = _with_pairs(checks, options.pairs, options.expect or ())
        return _conclude(checks, options, options.read_from)
    if options.expect:
        raise ConfigError("expect", ",".join(options.expect), "only with --from")
    if options.pairs is not None:
        raise ConfigError("pairs", options.pairs, "only with --from")
    check_budget(options.budget, options.timeout)
    require("torch")
    is_in_job = here is not None or outer_launcher.is_rank()
    if not outer_launcher.leave():
        return 0  # another rank of this host checks it
    begin = time.monotonic()
    out = options.out or _OUT
    make_folder("out", out)
    name = _name_of_host(here)
    with catching() as signals:
        check = _Host(name, out, options, signals, begin + (options.budget or 0.0)).check()
    if signals:
        return 128 + signals[0]
    file = out / node_check.FOLDER / f"{name}.json"
    make_folder("out", file.parent)
    node_check.write(check, file)
    if is_in_job:
        sys.stderr.write(f"{file}; verdict: stepmark doctor --nodes --from {out}\n")
        return 0  # a failing node must not end the check of the others
    return _conclude(node_check.read_all(out), options, out)  # with hosts checked before


def _name_of_host(here: job.Job | None) -> str:
    """Return the name by which the job, Slurm or the host itself knows this host."""
    name = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    return name if here is None or name in here.hosts else here.hosts[here.rank]


def _with_pairs(
    checks: Sequence[NodeCheck], path: Path, expected: Sequence[str]
) -> list[NodeCheck]:
    """Return the checks with rates between their hosts, of a run. Raises ConfigError.

    A run on other hosts is refused, unless an expected host has no check.
    """
    if not is_run(path):
        raise ConfigError("pairs", path, "the folder of a run, with its run.json")
    names = {_short(check.nodename or check.host): check.host for check in checks}
    hosts = {device.rank: device.host for device in read_info(path).environment.devices}
    is_complete = {*expected} <= {check.host for check in checks}
    for host in hosts.values():
        if _short(host) not in names and is_complete:
            raise ConfigError(
                "pairs", path, f"a run on hosts of --from; {host} is none of them"
            )

    def where(case: AnyCase) -> tuple[str, ...]:
        if not isinstance(case, CommCase) or case.collective is Collective.PING_PONG:
            return ()
        ends = tuple(names.get(_short(hosts[rank]), "") for rank in case.pair or ())
        return ends if len(set(ends)) == 2 and all(ends) else ()

    first = checks[0]
    empty = NodeCheck(host=first.host, checked_at=first.checked_at)
    result = result_of(path, empty, where)
    # Pairs inside a host may have the same size: they are another figure.
    ports = {check.host: check.port_bytes_per_s for check in checks}
    network = tuple(
        replace(f, name=f"network {f.name}", peak=_slower([ports[host] for host in f.where]))
        for f in result.figures
    )
    result = replace(result, figures=network)
    if result == empty and not is_complete:
        sys.stderr.write(f"--pairs {path} has no rate between two of these hosts\n")
        return list(checks)
    if result == empty:
        raise ConfigError("pairs", path, "a run of comm p2p-matrix on two hosts or more")
    num_ranks = Counter(names.get(_short(host)) for host in hosts.values())
    others = [_with_fabric(check, num_ranks[check.host]) for check in checks]
    return [merged(others[0], [result]), *others[1:]]


def _with_fabric(check: NodeCheck, num_ranks: int) -> NodeCheck:
    """Return the check of a host on which so many ranks have measured the network."""
    not_tested = [remark for remark in check.not_tested if remark.text != _FABRIC]
    num_others = check.num_devices - num_ranks
    if num_others > 0:
        text = (
            f"ways of {num_others} of {check.num_devices} GPUs to the network: "
            f"{plural(num_ranks, 'rank')} of each host measured it"
        )
        not_tested.append(Remark(where=check.host, text=text))
    return replace(check, not_tested=tuple(not_tested))


def _slower(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return min(known) if len(known) == len(rates) else None


def _short(host: str) -> str:
    return host.partition(".")[0]


def _conclude(checks: Sequence[NodeCheck], options: DoctorOptions, folder: Path) -> int:
    """Print the verdict and write its files. Returns the exit code."""
    verdict = judge(
        checks,
        floor=options.floor,
        expected=options.expect or (),
        gpus_per_node=options.gpus_per_node,
    )
    hosts = verdict.failing_hosts
    write_text(folder / FAILING, ",".join(hosts) + "\n" if hosts else "", "out")
    links = verdict.slow_links
    lines = [f"{source} {destination}\n" for source, destination in links]
    write_text(folder / SLOW_LINKS, "".join(lines), "out")
    document = {
        "nodes": msgspec.to_builtins(verdict.nodes),
        "figures": rows(verdict),
        "medians": verdict.medians,
        "differences": verdict.differences,
        "unknown": verdict.unknown,
        "slow_links": links,
        "remarks": [
            {"kind": kind, "where": remark.where, "text": remark.text}
            for check in checks
            for kind in ("failures", "unclear", "not_tested", "notes")
            for remark in getattr(check, kind)
        ],
    }
    write_files(options, "nodes", document, rows(verdict))
    if not options.to_stdout:
        printed(verdict, checks)
    sys.stderr.write(f"nodes to avoid: {len(hosts)}, in {folder / FAILING}\n")
    if links:
        sys.stderr.write(
            f"slow links of unknown cause: {len(links)}, in {folder / SLOW_LINKS}; test their "
            f"hosts again with good ones:\n  {retest_command(verdict)}\n"
        )
    return exit_code(verdict)


def retest_command(verdict: FleetVerdict) -> str:
    """Return what checks the hosts of slow links again, with two that are healthy."""
    ends = list(dict.fromkeys(host for link in verdict.slow_links for host in link))
    good = [node.host for node in verdict.nodes if node.outcome is Outcome.HEALTHY]
    good = [*good, "GOOD1", "GOOD2"][:2]
    hosts = ",".join([*ends[: MOST_FOR_ALL_PAIRS - len(good)], *good])
    target = f"--slurm -w {hosts}" if shutil.which("sbatch") else f"--ssh --hosts {hosts}"
    num_gpus = max(node.num_devices for node in verdict.nodes)
    ranks = f"--gpus-per-node {num_gpus}" if num_gpus else "--nproc-per-node 1"
    return f"stepmark launch {target} {ranks} -- doctor --nodes"


def _interval(row: Row) -> str:
    low = number(row, "low")
    high = number(row, "high")
    if low is None or high is None:
        return ""
    return TOO_FEW if is_too_wide(low, high) else f"{RATIO.show(low)} to {RATIO.show(high)}"


_COLUMNS = (
    given("where"),
    given("figure"),
    given("rate", NUMBER),
    given("unit", heading=NO_HEADING),
    given("pct_peak", WHOLE_SHARE, "of peak"),
    given("of_others", RATIO, "of others"),
    given("low", RATIO, "99 % interval", _interval),
    given("outcome"),
)
_GPUS = given("num_devices", COUNT, "GPUs")  # not in a table of CPUs
_NODE_COLUMNS = (given("node"), _GPUS, given("outcome"), given("why"))


def rows(verdict: FleetVerdict) -> list[Row]:
    """Return one row per figure. A host without figures has one row, with its outcome."""
    table = [_row(figure) for figure in verdict.figures]
    places = {place.partition("/")[0] for f in verdict.figures for place in f.figure.where}
    return table + [
        dict.fromkeys(table[0] if table else ("where",), None)
        | {"where": node.host, "outcome": node.outcome.value, "reason": "; ".join(node.reasons)}
        for node in verdict.nodes
        if node.host not in places
    ]


def _row(verdict: FigureVerdict) -> Row:
    figure = verdict.figure
    scale, unit = node_check.UNITS[figure.unit]
    value = figure.value
    return {
        "where": "-".join(figure.where),
        "figure": figure.name,
        "device": figure.device,
        "rate": None if value is None else value / scale,
        "unit": unit,
        "launches": len(figure.values),
        "pct_peak": 100 * value / figure.peak if value and figure.peak else None,
        "of_others": verdict.speed,
        "low": verdict.low,
        "high": verdict.high,
        "outcome": verdict.outcome.value,
        "reason": verdict.reason,
    }


def printed(verdict: FleetVerdict, checks: Sequence[NodeCheck]) -> None:
    """Print the figures, the nodes with their reasons, and what was not tested."""
    terminal = console()
    good = [f for f in verdict.figures if f.outcome is Outcome.HEALTHY]
    shown = verdict.figures
    if len(good) > _MOST_FIGURES:
        shown = tuple(f for f in shown if f.outcome is not Outcome.HEALTHY)
        print_lines([f"{len(good)} healthy figures are not shown; --csv has them"], terminal)
    if shown:
        print_lines([*Table([*map(_row, shown)]).text(_COLUMNS), ""], terminal)
    nodes: list[Row] = []
    for node in verdict.nodes:
        first, *others = node.reasons or ("",)
        facts = {"num_devices": node.num_devices, "outcome": node.outcome.value}
        nodes.append({"node": node.host, **facts, "why": first})
        nodes += [{"why": reason} for reason in others]
    has_gpus = any(node.num_devices for node in verdict.nodes)
    columns = [column for column in _NODE_COLUMNS if has_gpus or column is not _GPUS]
    print_lines(Table(nodes).text(columns), terminal)
    sections = {
        "medians of all (a comparison does not show what slows all alike)": verdict.medians,
        "differences between nodes": verdict.differences,
        "what two cannot tell": verdict.unknown,
    }
    for title, texts in sections.items():
        if texts:
            print_lines(["", f"{title}:", *(f"  {text}" for text in texts)], terminal)
    print_lines(_remarks(checks), terminal)


def _remarks(checks: Sequence[NodeCheck]) -> list[str]:
    """Return what was not tested, and notes; equal ones of several places are one line."""
    lines: list[str] = []
    for title in ("not_tested", "notes"):
        places: dict[str, list[str]] = {}
        for check in checks:
            for remark in getattr(check, title):
                places.setdefault(remark.text, []).append(remark.where)
        lines += ["", f"{title.replace('_', ' ')}:"] if places else []
        for what, where in places.items():
            lines.append(f"  {what} ({comma_list(where, 4)})")
    return lines


def exit_code(verdict: FleetVerdict) -> int:
    """Return 1 if a node failed or is slow, 3 if one cannot be judged, else 0."""
    if verdict.failing_hosts:
        return 1
    return 3 if any(node.outcome is Outcome.CANNOT_TELL for node in verdict.nodes) else 0


@dataclass(frozen=True, slots=True)
class _Host:
    """The check of this host.

    signals: those that the user has sent meanwhile. end_s: of --budget, on the monotonic clock.
    """

    name: str
    out: Path
    options: DoctorOptions
    signals: Sequence[int]
    end_s: float

    def check(self) -> NodeCheck:
        now = datetime.now(UTC)
        folder = self.out / "runs" / self.name / new_run_id(now)
        make_folder("out", folder)
        empty = NodeCheck(
            host=self.name,
            checked_at=now.isoformat(timespec="seconds"),
            nodename=os.uname().nodename,
        )
        here, problem = self._machine(folder)
        if here is None:
            return replace(empty, failures=(Remark(where=self.name, text=problem),))
        count = here.num_ranks(self.options.nproc, "all")
        noun = "GPU" if here.device != "cpu" else "rank"
        sys.stderr.write(f"checking {plural(count, noun)} of {self.name} at the same time\n")
        with ThreadPoolExecutor(count) as pool:
            devices = [
                pool.submit(self._device, index, count, here.device, folder, empty)
                for index in range(count)
            ]
        checks = [device.result() for device in devices]
        not_tested = [_FABRIC]
        if count == 1:
            not_tested.append("collectives inside the node: it needs a second device")
        elif any(check.stage for check in checks):
            not_tested.append("collectives inside the node: not all devices could be measured")
        elif self.options.budget and self.end_s <= time.monotonic():
            not_tested.append("collectives inside the node: --budget leaves nothing")
        elif not self.signals:
            checks.append(self._collectives(count, here.device, folder, empty))
        remarks = tuple(Remark(where=self.name, text=text) for text in not_tested)
        num_devices = here.num_accelerators or 0
        ports = _ports(Path("/sys/class"))
        facts = {"network ports": _text_of(ports) or "none of hardware"}
        if here.device != "cpu":
            facts["GPUs"] = str(num_devices)
        rates = [port.bytes_per_s for port in ports if port.is_up and port.bytes_per_s]
        whole = replace(
            empty,
            num_devices=num_devices,
            not_tested=remarks,
            facts=tuple(Fact(where=self.name, name=n, value=facts[n]) for n in facts),
            port_bytes_per_s=max(rates, default=None),
        )
        return merged(whole, checks)

    def _machine(self, folder: Path) -> tuple[Machine | None, str]:
        """Return the machine, which another process examines, or why it is not known."""
        words = [_DEVICE_CHECK, "list", self.options.device or ""]
        ended = self._run(folder / "list", words, LIST_S)
        if ended.exit_code == 0:
            answer = json.loads((folder / "list.out").read_text())
            return Machine(**answer), ""
        return None, _how_it_ended(ended, LIST_S, "listing devices", folder / "list.err")

    def _device(
        self, index: int, count: int, device: str, folder: Path, empty: NodeCheck
    ) -> NodeCheck:
        """Measure one device in a process of its own, which sees no other device."""
        place = f"{self.name}/{index}"
        stem = folder / f"device-{index}"
        file = stem.with_suffix(".json")
        now_s = time.monotonic()
        # Collectives of several devices have the other half of --budget.
        end_s = now_s + (self.end_s - now_s) / min(count, 2)
        end = str(end_s) if self.options.budget else ""
        launches = self.options.launches or _LAUNCHES[device]
        words = [_DEVICE_CHECK, "check", str(file), device, place, end, str(launches)]
        limit_s = self.options.timeout or TIMEOUT_S
        ended = self._run(stem, words, limit_s, _only(index, count, device))
        result = node_check.read(file, "out") if file.is_file() else empty
        if ended.exit_code == 0:
            return result
        stage = result.stage or "starting"
        text = _how_it_ended(ended, limit_s, stage, stem.with_suffix(".err"))
        failures = (*result.failures, Remark(where=place, text=text))
        return replace(result, failures=failures, stage=stage)

    def _collectives(
        self, count: int, device: str, folder: Path, empty: NodeCheck
    ) -> NodeCheck:
        """Measure pairs and an all-reduce through `stepmark comm`."""
        limit_s = self.options.timeout or TIMEOUT_S
        runs = folder / "comm"
        options = CommOptions(
            names=(MATRIX_OF_PAIRS, "all_reduce"),
            begin=_MESSAGE_BYTES[device],
            end=_MESSAGE_BYTES[device],
            launches=self.options.launches or _LAUNCHES[device],
            device=device,
            nproc=str(count),
            budget=self.end_s - time.monotonic() if self.options.budget else _COMM_S[device],
            out=str(runs),
        )
        ended = self._run(folder / "collectives", ["stepmark", "comm", *argv(options)], limit_s)

        def where(case: AnyCase) -> tuple[str, ...]:
            if not isinstance(case, CommCase) or case.collective is Collective.PING_PONG:
                return ()
            return tuple(f"{self.name}/{rank}" for rank in case.pair or ()) or (self.name,)

        result = empty
        for path in runs.glob(f"*/{plans.FILE}"):
            result = result_of(path.parent, empty, where)
        if ended.exit_code == 0 or (result.failures and not ended.timed_out):
            return result
        text = _how_it_ended(ended, limit_s, "collectives", folder / "collectives.err")
        failure = Remark(where=self.name, text=text)
        return replace(result, failures=(*result.failures, failure))

    def _run(
        self,
        stem: Path,
        words: Sequence[str],
        limit_s: float,
        changes: dict[str, str] | None = None,
    ) -> child.Ended:
        """Run `python -m WORDS`, with its output beside the results."""
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        path = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        return child.run(
            [sys.executable, "-m", *words],
            {**os.environ, **path, **(changes or {})},
            out=stem.with_suffix(".out"),
            err=stem.with_suffix(".err"),
            limit_s=limit_s,
            signals=self.signals,
            grace_s=_GRACE_S,
        )


def _ports(root: Path) -> list[Nic]:
    """Return network ports of hardware. Virtual ones differ by what a host runs."""
    return [
        port
        for port in nics(root)
        if port.kind == "infiniband" or (root / "net" / port.name / "device").exists()
    ]


def _text_of(ports: Sequence[Nic]) -> str:
    """Return how many ports have which rate and state, the most frequent first."""
    counts = Counter(
        f"{port.rate or 'unknown rate'} {'up' if port.is_up else 'down'}" for port in ports
    )
    return ", ".join(f"{count} x {text}" for text, count in counts.most_common())


def _only(index: int, count: int, device: str) -> dict[str, str]:
    """Return the variables that show a process one device, or its share of the cores."""
    if device == "cpu":
        cores = max(1, (os.cpu_count() or 1) // count)
        return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cores))}
    names = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    name = next((name for name in names if os.environ.get(name)), names[1])
    visible = [word.strip() for word in os.environ.get(name, "").split(",") if word.strip()]
    return {name: visible[index] if visible else str(index)}


def _how_it_ended(ended: child.Ended, limit_s: float, stage: str, err: Path) -> str:
    """Return why a child process has no complete result."""
    if ended.timed_out:
        text = f"stuck while {stage}: not done within {limit_s:.0f} s, killed"
        if ended.survivors:
            pids = ", ".join(map(str, ended.survivors))
            text += f"; SIGKILL does not end process {pids}: reboot the host"
        return text
    last = err.read_text(errors="replace").strip().splitlines()[-1:] or ["no message"]
    return f"ended with exit code {ended.exit_code} while {stage}: {last[0]}"
