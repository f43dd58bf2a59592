"""Whether the order of `stepmark plan` is that of measured layouts, and what people chose.

    python validation/plan_rankings.py measured         nanotron's playbook and vTrain's layouts
    python validation/plan_rankings.py published         layouts that papers chose
    python validation/plan_rankings.py published --only GPT-174.6B
    python validation/plan_rankings.py                   both

measured: layouts of one model on as many GPUs, in the order of predicted steps, those that need
more memory than `plan` allows left out. The first, and the fastest measured of the first five,
are compared with the fastest measured of all.

published: all layouts of the model on as many GPUs with the same batch are searched as `plan`
does, with the kernels, optimizer and overlaps that the paper's Megatron-LM had, and with no or
all layers recomputed. The paper's layout is one of them; axes that it does not state are the
fastest. Printed is how much longer its simulated step takes than that of the first.
"""

import argparse
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "validation")]

from published_jobs import PublishedJob, Row, job_of, playbook_row, read_rows  # noqa: E402
from published_steps import grouped, nanotron_bytes, score  # noqa: E402

from stepmark.ground.errors import ConfigError  # noqa: E402
from stepmark.ground.units import GIB, format_time  # noqa: E402
from stepmark.layouts.candidate import Candidate, place  # noqa: E402
from stepmark.layouts.cluster import Cluster  # noqa: E402
from stepmark.layouts.layout_space import LayoutSpace  # noqa: E402
from stepmark.layouts.plan_options import PlanOptions  # noqa: E402
from stepmark.layouts.stage_costs import Estimator  # noqa: E402
from stepmark.model.device import find_device_by_alias  # noqa: E402
from stepmark.model.model import ModelConfig  # noqa: E402
from stepmark.predictions.prediction_grid import row_of  # noqa: E402
from stepmark.step_memory.workload_memory import OUTSIDE_BYTES  # noqa: E402
from stepmark.tables.columns import COUNT, NUMBER, TEXT, given  # noqa: E402
from stepmark.tables.table import Table  # noqa: E402
from stepmark.workloads.rules.megatron.settings import Granularity  # noqa: E402

FEWEST_ROWS = 30  # of a group of the playbook
FEWEST_OF_VTRAIN = 15
FIRST = 5
CLOSE = 0.05  # a published layout's step above that of the first
TOP = 6  # layouts that are simulated
_SOURCES = ("Korthikanti2022", "Narayanan2021")
_LLAMA = {"model": "Llama-3.1-405B", "seq": "8192", "pp": "16", "gpu_type": "H100-SXM-80GB"}
# What differs between versions of Megatron-LM, and no layout chooses.
_OF_VERSION = (
    "attention_backend",
    "attention_dropout",
    "hidden_dropout",
    "gradient_accumulation_fusion",
    "accumulate_allreduce_grads_in_fp32",
    "cross_entropy_loss_fusion",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
)


@dataclass(frozen=True, slots=True)
class MeasuredLayout:
    """A layout with its predicted and its measured step; fits: in the memory `plan` allows."""

    predicted_s: float
    measured_s: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """How good an order is, as times over the fastest measured step, less 1.

    drawn: the median layout, which an order without knowledge would have first.
    """

    num_layouts: int
    num_fits: int
    fastest_fits: bool
    first: float
    first_five: float
    drawn: float


def ranking(layouts: Sequence[MeasuredLayout]) -> Ranking:
    """Return how good the order of predicted steps is."""
    fits = sorted((each for each in layouts if each.fits), key=lambda each: each.predicted_s)
    fastest = min(layouts, key=lambda each: each.measured_s)

    def excess(chosen: Iterable[MeasuredLayout]) -> float:
        step_s = min((each.measured_s for each in chosen), default=math.inf)
        return step_s / fastest.measured_s - 1

    return Ranking(
        num_layouts=len(layouts),
        num_fits=len(fits),
        fastest_fits=fastest.fits,
        first=excess(fits[:1]),
        first_five=excess(fits[:FIRST]),
        drawn=median(each.measured_s for each in layouts) / fastest.measured_s - 1,
    )


def measured_groups(
    rows: Iterable[Row], fewest: int = FEWEST_ROWS
) -> dict[str, list[MeasuredLayout]]:
    """Return measured layouts by model, GPUs and batch, of groups with enough of them.

    One that cannot be predicted is one that `plan` would not show.
    """
    groups = grouped(map(score, rows), lambda row: f"{name_of(row)}, batch {row['gbs']}")
    return {
        name: [
            MeasuredLayout(each.outcome.step_s, each.published_s, fits(each.row))
            if each.outcome
            else MeasuredLayout(math.inf, each.published_s, fits=False)
            for each in own
        ]
        for name, own in groups.items()
        if len(own) >= fewest
    }


def fits(row: Row) -> bool:
    """Return whether a measured layout fits in the memory that `plan` allows."""
    published = job_of(row)
    device = find_device_by_alias(published.device)
    assert device
    assert device.hbm_bytes
    if row["source"] == "nanotron":
        needed = max(nanotron_bytes(published)) + OUTSIDE_BYTES
    else:
        candidate = Candidate(
            framework=published.framework,
            job=published.job,
            settings=published.settings,
            options={},
        )
        needed = candidate.needed_bytes
    return needed <= PlanOptions.memory * device.hbm_bytes


def print_measured() -> None:
    """Print the rankings of the groups of both sources, and their medians."""
    playbook = [playbook_row(row) for row in read_rows("playbook-layouts.csv")]
    ran = [row for row in playbook if row["ran"] == "1"]
    steps = read_rows("published-steps.csv")
    vtrain = [row for row in steps if row["source"].startswith("vTrain")]
    print_rankings("playbook", measured_groups(ran))
    print_rankings("vTrain", measured_groups(vtrain, FEWEST_OF_VTRAIN))


def print_rankings(source: str, groups: Mapping[str, Sequence[MeasuredLayout]]) -> None:
    """Print the ranking of each group, and medians of all."""
    rankings = {name: ranking(own) for name, own in groups.items()}
    firsts = [each.first for each in rankings.values()]
    fives = [each.first_five for each in rankings.values()]
    print(
        f"{source}: the fastest of the first {FIRST} takes {median(fives):.1%} longer than the "
        f"fastest of all in the median, {max(fives):.1%} at most; the first "
        f"{median(firsts):.1%}, {max(firsts):.1%} at most"
    )
    rows = [
        {
            "group": name,
            "layouts": each.num_layouts,
            "fit": each.num_fits,
            "fastest": "fits" if each.fastest_fits else "too large",
            "first": f"{each.first:+.1%}",
            "five": f"{each.first_five:+.1%}",
            "drawn": f"{each.drawn:+.0%}",
        }
        for name, each in rankings.items()
    ]
    columns = [
        given("group", TEXT),
        given("layouts", COUNT),
        given("fit", COUNT),
        given("fastest", TEXT),
        given("first", NUMBER),
        given("five", NUMBER, f"first {FIRST}"),
        given("drawn", NUMBER, "median"),
    ]
    print(*Table(rows, columns).text(), sep="\n")


def published_rows() -> Iterator[Row]:
    """Yield the layouts of Megatron-LM's papers and of Llama 3.

    With selective recomputation where a paper compares it with a full one. Llama's: table 4 of
    arXiv:2407.21783. Those of arXiv:2205.05198 have one chunk where none are stated (table 3).
    """
    for row in read_rows("published-steps.csv"):
        is_baseline = "full recompute baseline" in row["notes"]
        is_megatron = "ZeRO-3" not in row["notes"]
        if row["source"].startswith(_SOURCES) and is_megatron and not is_baseline:
            has_chunks = row["vpp"] or row["source"].startswith("Narayanan2021")
            yield row if has_chunks else {**row, "vpp": "1"}
    for row in read_rows("published-layouts.csv"):
        if _LLAMA.items() <= row.items():
            yield row


def write_model(model: ModelConfig, folder: Path) -> Path:
    """Write a model without experts as a file that `plan` reads."""
    lines = [
        f"{each.name} = {json.dumps(getattr(model, each.name))}"
        for each in fields(model)
        if each.default is MISSING or getattr(model, each.name) != each.default
    ]
    path = folder / f"{model.name}.toml"
    path.write_text("\n".join(lines))
    return path


def as_published(candidate: Candidate, published: PublishedJob) -> Candidate:
    """Return a layout with the type, kernels, optimizer and overlaps of a published job."""
    own = published.settings
    changes: dict[str, Any] = {name: getattr(own, name) for name in _OF_VERSION}
    changes["sequence_parallel"] = own.sequence_parallel and candidate.parallel.tp > 1
    is_selective = own.recompute_granularity is Granularity.SELECTIVE
    if is_selective and candidate.recompute == "none":
        changes["recompute_granularity"] = Granularity.SELECTIVE
    job = replace(candidate.job, dtype=published.job.dtype)
    return replace(candidate, job=job, settings=replace(candidate.settings, **changes))


@dataclass
class PublishedSearch:
    """All layouts of a published job's model, GPUs and batch."""

    row: Row
    cluster: Cluster
    layouts: Sequence[Candidate]
    _simulated: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    def is_published(self, candidate: Candidate) -> bool:
        """Return whether a layout is the published one, as far as this is stated."""
        stated = {name: int(self.row[name] or 0) for name in ("tp", "pp", "cp", "vpp", "mbs")}
        axes = candidate.axes
        same = all(axes[name] == value for name, value in stated.items() if value)
        return same and axes["recompute"] == self.row["recompute"]

    def by_estimate(self) -> list[tuple[float, Candidate]]:
        """Return the layouts, the fastest by estimate first."""
        estimator = Estimator(self.cluster.seconds, self.cluster.send_s)
        estimates = []
        for candidate in self.layouts:
            try:
                estimates.append((estimator.step_s(candidate), candidate))
            except ConfigError:  # as messages that do not divide
                continue
        return sorted(estimates, key=lambda pair: pair[0])

    def fastest(
        self, estimates: Iterable[tuple[float, Candidate]], most_bytes: float
    ) -> Mapping[str, Any] | None:
        """Return the row of the fastest of the first layouts that fit; None: none fits."""
        fitting = (pair for pair in estimates if pair[1].needed_bytes <= most_bytes)
        rows = [self.simulated(candidate) for _, candidate in itertools.islice(fitting, TOP)]
        return min(rows, key=lambda row: row["step_s"], default=None)

    def simulated(self, candidate: Candidate) -> Mapping[str, Any]:
        """Return the row of a layout, which is simulated once, with the bytes that it needs."""
        if id(candidate) not in self._simulated:
            self._simulated[id(candidate)] = {
                **candidate.axes,
                "dp": candidate.parallel.data_ranks,
                **row_of(self.cluster.predicted(candidate).figures()),
                "needed_bytes": candidate.needed_bytes,
            }
        return self._simulated[id(candidate)]


def search_of(row: Row, folder: Path) -> PublishedSearch:
    """Return the search that has a published layout. Raises ConfigError."""
    published = job_of(row)
    job = published.job
    options = PlanOptions(
        models=(str(write_model(job.model, folder)),),
        gpus=(int(row["gpus"]),),
        gbs=job.gbs,
        device=published.device,
        framework="megatron",
        recompute=("none", "full"),
    )
    (num_gpus,) = options.gpus
    cluster = Cluster(options, num_gpus)
    space = LayoutSpace(options=options, num_gpus=num_gpus, gpus_per_host=cluster.gpus_per_host)
    layouts = [
        as_published(candidate, published) for candidate in space.layouts([*space.axes()])
    ]
    return PublishedSearch(row, cluster, layouts)


@dataclass(frozen=True, slots=True)
class Choice:
    """A published layout beside the first of a search, all rows simulated.

    alike: the first of those that recompute as the published layout does.
    """

    name: str
    num_layouts: int
    published: Mapping[str, Any]
    first: Mapping[str, Any]
    alike: Mapping[str, Any]
    measured_s: float | None
    fits: bool

    def excess(self, other: Mapping[str, Any]) -> float:
        """Return how much longer the published layout takes than another, less 1."""
        return float(self.published["step_s"] / other["step_s"] - 1)

    def lines(self) -> Iterator[str]:
        """Yield both layouts, and what differs if they are not close."""
        yield (
            f"{self.name}: {self.excess(self.first):+.1%}, {self.excess(self.alike):+.1%} with "
            f"its recomputation; {self.num_layouts} layouts"
        )
        measured = f", measured {format_time(self.measured_s)}" if self.measured_s else ""
        needed = f"{self.published['needed_bytes'] / GIB:.0f} GiB"
        needs = "" if self.fits else f", needs {needed}, more than plan allows"
        yield f"  published {_text(self.published)}{measured}{needs}"
        yield f"  first     {_text(self.first)}"
        if self.alike != self.first:
            yield f"  alike     {_text(self.alike)}"
        for name, other in (("first", self.first), ("alike", self.alike)):
            if self.excess(other) > CLOSE:
                yield f"  to {name}: {_parts(self.published, other)}"


def _text(row: Mapping[str, Any]) -> str:
    return f"{place(row).removeprefix('megatron, ')}: {format_time(row['step_s'])}"


def _parts(row: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return what a layout's parts are more than another's, of the other's step."""
    before, after = parts_s(other), parts_s(row)
    return ", ".join(
        f"{name} {(after[name] - before[name]) / other['step_s']:+.1%}" for name in before
    )


def parts_s(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a step by what it waits for; computing has the rest."""
    waiting = {
        "exposed communication": row["exposed_comm_s"],
        "pipeline bubble": row["bubble_s"],
    }
    return {"computing": row["step_s"] - sum(waiting.values()), **waiting}


def choice_of(search: PublishedSearch) -> Choice:
    """Return the published layout beside the first of the search.

    A layout that ran fits, so others may need as much memory.
    """
    estimates = search.by_estimate()
    published = [pair for pair in estimates if search.is_published(pair[1])]
    allowed = search.cluster.most_bytes
    own = search.fastest(published, allowed) or search.simulated(published[0][1])
    most_bytes = max(allowed, own["needed_bytes"])
    alike = [pair for pair in estimates if pair[1].recompute == search.row["recompute"]]
    first = search.fastest(estimates, most_bytes)
    first_alike = search.fastest(alike, most_bytes)
    assert first
    assert first_alike
    return Choice(
        name=name_of(search.row),
        num_layouts=len(search.layouts),
        published=own,
        first=first,
        alike=first_alike,
        measured_s=float(search.row.get("iteration_s") or 0) or None,
        fits=own["needed_bytes"] <= allowed,
    )


def name_of(row: Row) -> str:
    return f"{row['model'].removesuffix('-vtrain')} on {row['gpus']}"


def print_published(only: str) -> None:
    """Print what papers chose beside what is searched, and how many are close."""
    choices = []
    with tempfile.TemporaryDirectory() as folder:
        for row in published_rows():
            if only in name_of(row):
                choices.append(choice_of(search_of(row, Path(folder))))
                print(*choices[-1].lines(), sep="\n", flush=True)
    close = sum(each.excess(each.first) <= CLOSE for each in choices)
    alike = sum(each.excess(each.alike) <= CLOSE for each in choices)
    large = sum(not each.fits for each in choices)
    print(
        f"published: {close} of {len(choices)} within {CLOSE:.0%} of the first, {alike} of the "
        f"first with their recomputation; {large} need more memory than plan allows"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ranking", nargs="?", choices=("measured", "published"))
    parser.add_argument("--only", default="", help="published rows whose name has this")
    options = parser.parse_args(argv)
    printers: dict[str, Callable[[], None]] = {
        "measured": print_measured,
        "published": lambda: print_published(options.only),
    }
    for name, show in printers.items():
        if options.ranking in (None, name):
            show()


if __name__ == "__main__":
    main()
