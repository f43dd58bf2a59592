"""What each recipe of CONTRIBUTING writes and changes, by the first cell of its line."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A new file, or text put in front of a text that a file has once."""

    file: str  # below src/stepmark
    text: str
    before: str = ""

    def apply(self, package: Path) -> None:
        path = package / self.file
        if not self.before:
            assert not path.exists(), self.file
            path.write_text(self.text)
            return
        content = path.read_text()
        assert content.count(self.before) == 1, (self.file, self.before)
        path.write_text(content.replace(self.before, self.text + self.before))


OPERATOR = '''\
@dataclass(frozen=True, slots=True, kw_only=True)
class Scale(Operator):
    """A tensor times a number."""

    elements: int = count("elements")
    dtype: DType = choice("element type", default=DType.BF16, allowed=STORED)
    phase: Phase = choice("pass", default=Phase.FWD, allowed=("fwd",))

    @property
    def shape_text(self) -> str:
        return f"{self.elements} elements"

    @property
    def bytes_moved(self) -> int:
        return 2 * self.elements * self.dtype.itemsize


'''

SCALE = '''\
"""A tensor times a number. N elements."""

import torch

from stepmark.operators.bench.call import Call, Impl, normal
from stepmark.measuring.verify import compare, poisoned_result, tolerance
from stepmark.model.ops.elementwise import Scale
from stepmark.cases.record import Check

FACTOR = 3.0


def make(op: Scale, device: torch.device) -> Call:
    x_N = normal(op.elements, dtype=op.dtype, device=device)

    def run() -> torch.Tensor:
        return x_N * FACTOR

    def verify() -> Check:
        (y_N,) = poisoned_result(lambda: (run(),))
        allowed = tolerance(op.dtype, length=1, roundings=1)
        return compare(y_N, x_N.double() * FACTOR, allowed, "fp64, all elements")

    return Call(run=run, verify=verify, backend_run="torch eager")


TORCH = Impl(make=make)
'''

RING_BACK = """\
        case Collective.RING_BACK:
            return [to((index - 1) % n, c), of((index + 1) % n, c)]
"""

RECEIVED = """\
        case Collective.RING_BACK:
            return [((index + 1) % n, 0, c)]
"""

GLOO_THREADS = """\
    gloo_threads: int = field_of(
        Role.SETTING,
        2,
        "threads of a gloo communicator, e.g. 1,4 [2]",
        reads=Annotated[tuple[int, ...], comma_list(between(1, 64))],
        group="Ranks",
        needs=Need(words="gloo", is_met=lambda case: case.backend == "gloo"),
        words="{} gloo threads",
        formerly=2,
    )
"""

GLOO_OPTIONS = """\
    if case.backend == "gloo" and case.gloo_threads != 2:
        gloo = dist.ProcessGroupGloo._Options()
        gloo._threads = case.gloo_threads
        gloo._devices = [dist.ProcessGroupGloo.create_default_device()]
        return gloo
"""

LABEL_SMOOTHING = """\
    label_smoothing: float = field_of(
        Role.SETTING,
        0.0,
        "share of the labels' weight that all tokens have [0]",
        reads=Annotated[float, between(0.0, 1.0)],
        group="Techniques",
        words="label smoothing {}",
        formerly=0.0,
    )
"""

SMOOTHED = """\
        if self.label_smoothing:
            return nn.functional.cross_entropy(
                logits_BTV.flatten(0, 1).float(),
                labels_BT.flatten(),
                label_smoothing=self.label_smoothing,
            )
"""

SET_SMOOTHING = """\
        if model.output is not None:
            model.output.label_smoothing = case.label_smoothing
"""

NOT_IN_CHUNKS = """\
    if case.loss_chunks > 1 and case.label_smoothing:
        yield "label-smoothing", case.label_smoothing, "0 with --loss-chunks"
"""

COUNTS = '''\
"""How many operations of each kind a step has."""

from collections import Counter
from collections.abc import Iterable, Iterator

from stepmark.step.workload import Workload


def write(workload: Workload) -> Iterator[str]:
    """Yield a line per kind, of all stages."""
    kinds = Counter(
        type(operation).__name__
        for stage in range(len(workload.stages))
        for operation in workload.expand(stage)
    )
    for kind, count in kinds.items():
        yield f"{kind} {count}\\n"


def omissions(workload: Workload, stages: Iterable[int]) -> list[str]:
    return ["all but the number of operations"]
'''

FORMAT = """\
    "counts": Format(
        module="counts",
        help="how many operations of each kind there are",
        suffix=".txt",
        is_one=lambda head: False,
        reads=False,
    ),
"""

SECTION = '''\
"""Cases by family: how many were measured."""

from collections import Counter
from collections.abc import Sequence

from stepmark.cases.record import Record
from stepmark.tables.page import Section, definitions


def section(records: Sequence[Record]) -> Section:
    counts = Counter(record.case.family for record in records)
    pairs = [(name, str(count)) for name, count in counts.items()]
    return Section("Cases by family", [definitions(pairs)])
'''

PAGE = '''\
"""How many operations of each kind a step has, as a page."""

from collections import Counter

from stepmark.step.workload import Workload
from stepmark.tables.figures import Axis, Figure, Kind, Series
from stepmark.tables.page import Page, Section, paragraph


def page(workload: Workload) -> Page:
    kinds = Counter(type(operation).__name__ for operation in workload.expand(0))
    names = sorted(kinds)
    counts = [kinds[name] for name in names]
    operations = Figure(
        title="Operations of stage 0",
        note="Of one step.",
        x=Axis(title="operations"),
        y=Axis(categories=names),
        series=[Series(kind=Kind.BARS, name="count", x=counts, y=names)],
        height=300,
    )
    rules = Section("Rules", [paragraph(workload.rules)])
    return Page(title=f"Counts of <{workload.name}>", sections=[operations, rules])
'''

TOY_MODEL = """\
source = "made up for a test"
published_params = 0
hidden_size = 64
num_layers = 3
num_heads = 4
num_kv_heads = 4
head_dim = 16
ffn_hidden_size = 128
vocab_size = 512
seq_len = 64
"""

TOY_DEVICE = """
[toy]
names = ["Toy Accelerator"]
vendor = "nvidia"
device_is = "one GPU"
hbm_bytes = 1024

[toy.peak_flops_per_s]
bf16 = 1e12

[toy.sources]
peak_flops_per_s = "https://example.com/toy"
hbm_bytes = "https://example.com/toy"

"""

RECIPES: dict[str, tuple[Edit, ...]] = {
    "an operator": (
        Edit(file="model/ops/elementwise.py", before="ElementwiseOp = Norm", text=OPERATOR),
        Edit(file="model/ops/elementwise.py", before="Norm | Activation |", text="Scale | "),
        Edit(
            file="model/ops/elementwise.py",
            before='    "norm": Norm,',
            text='    "scale": Scale,\n',
        ),
        Edit(file="operators/bench/scale.py", text=SCALE),
        Edit(file="operators/bench/__init__.py", before="matmul, recommender", text="scale, "),
        Edit(
            file="operators/bench/__init__.py",
            before='    "copy": elementwise',
            text='    "scale": {"torch": scale.TORCH},\n',
        ),
    ),
    "a collective": (
        Edit(
            file="model/collectives.py",
            before='    BARRIER = "barrier"',
            text='    RING_BACK = "ring_back"\n',
        ),
        Edit(
            file="model/collectives.py",
            before="    Collective.BARRIER: Facts(",
            text='    Collective.RING_BACK: Facts(parts=Parts.WHOLE, busbw="1"),\n',
        ),
        Edit(
            file="collectives/bench/data.py",
            before="        case Collective.P2P:\n            return [(0, 0, c)]",
            text=RECEIVED,
        ),
        Edit(
            file="collectives/bench/data.py",
            before="        case Collective.P2P:\n            return [of(0, c)",
            text=RING_BACK,
        ),
    ),
    "an option of comm": (
        Edit(
            file="cases/comm_case.py",
            before='    # Concurrent compute, e.g. "gemm:8192".\n',
            text=GLOO_THREADS,
        ),
        Edit(
            file="collectives/bench/communicators.py",
            before='    if case.backend != "nccl" or',
            text=GLOO_OPTIONS,
        ),
        Edit(
            file="collectives/bench/communicators.py",
            before="case.max_ctas, case.cta_policy)",
            text="case.gloo_threads, ",
        ),
    ),
    "a training technique": (
        Edit(
            file="cases/train_case.py",
            before="    cuda_graph: bool = field_of(",
            text=LABEL_SMOOTHING,
        ),
        Edit(
            file="training/transformer.py",
            before="        return self.mean_loss(logits_BTV",
            text=SMOOTHED,
        ),
        Edit(
            file="training/transformer.py",
            before="        self.summed_loss: SummedLoss = summed_loss\n",
            text="        self.label_smoothing = 0.0\n",
        ),
        Edit(
            file="training/parallelize.py",
            before="        precision.apply_fp8(model, case)\n",
            text=SET_SMOOTHING,
        ),
        Edit(
            file="training/train_refusals.py",
            before="    if case.loss_chunks > 1 and case.parallel.tp > 1:",
            text=NOT_IN_CHUNKS,
        ),
    ),
    "a model": (Edit(file="data/models/toy.toml", text=TOY_MODEL),),
    "a device": (Edit(file="data/hardware.toml", before="[mi355x]\n", text=TOY_DEVICE),),
    "a format of workloads": (
        Edit(file="workloads/formats/counts.py", text=COUNTS),
        Edit(file="workloads/formats/__init__.py", before='    "csv": Format(', text=FORMAT),
    ),
    "a column of what is measured": (
        Edit(
            file="operators/op_columns.py",
            before='    Column("clock_mhz"',
            text="""\
    Column("range_s", figure(lambda f: f.times.max - f.times.min), SECONDS, "range", SHOWN),
""",
        ),
    ),
    "a section of a run's page": (
        Edit(file="runs/families.py", text=SECTION),
        Edit(
            file="runs/run_page.py",
            before="from stepmark.collectives import comm_figures",
            text="from stepmark.runs import families\n",
        ),
        Edit(
            file="runs/run_page.py",
            before='        Section("Environment"',
            text="        families.section(records),\n",
        ),
    ),
    "a page": (Edit(file="workloads/counts_page.py", text=PAGE),),
}
