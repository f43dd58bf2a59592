"""AICB's lines with its errors put right, each by a rule of its own, to compare with ours.

What a Megatron step sends is written here once more, from Megatron-LM's sources and apart from
the package's rules.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import lcm
from typing import NamedTuple

from .aicb_samples import DATA


class Line(NamedTuple):
    """kind and group without their class names; size: of the group; of: bytes or shapes."""

    kind: str
    group: str
    size: str
    of: str
    stage: str
    src: str = "None"
    additional: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Of a GPT with learned positions and tied embeddings. layers: of stage 0."""

    tp: int
    dp: int
    pp: int = 1
    microbatches: int
    layers: int
    hidden: int
    ffn: int
    vocab: int  # padded to a multiple of 128 x tp
    seq: int
    gated: bool = True
    sequence_parallel: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def activation(self) -> int:
        return 2 * self.seq * self.hidden

    @property
    def table(self) -> int:
        """Parameters of this rank's part of the embedding."""
        return self.vocab // self.tp * self.hidden

    @property
    def norms(self) -> int:
        """Parameters that all tp ranks hold: weights and biases of two norms a layer."""
        return self.layers * 4 * self.hidden + (2 * self.hidden if self.pp == 1 else 0)

    @property
    def body(self) -> int:
        """Parameters of a rank but for the table."""
        matrices = 4 * self.hidden**2 + (3 if self.gated else 2) * self.hidden * self.ffn
        return self.layers * matrices // self.tp + self.norms + self.seq * self.hidden


JOBS = {
    "tutorial_gpt7b_tp4_pp1_w4096_gbs8192": Job(
        **{"tp": 4, "dp": 1024, "microbatches": 8, "layers": 36},
        **{"hidden": 4096, "ffn": 10880, "vocab": 50688, "seq": 4096},
    ),
    "tutorial_gpt13b_tp8_pp1_w8_gbs2": Job(
        **{"tp": 8, "dp": 1, "microbatches": 2, "layers": 40},
        **{"hidden": 5120, "ffn": 13632, "vocab": 51200, "seq": 4096},
    ),
    "gpt13b_tp2_pp1_w2048_gbs4096_distopt": Job(
        **{"tp": 2, "dp": 1024, "microbatches": 4, "layers": 40},
        **{"hidden": 5120, "ffn": 13632, "vocab": 50432, "seq": 2048},
    ),
    "gpt175b_tp8_pp8_w1024_gbs1536_sp": Job(
        **{"tp": 8, "dp": 16, "pp": 8, "microbatches": 96, "layers": 12},
        **{"hidden": 12288, "ffn": 4 * 12288, "vocab": 51200, "seq": 2048},
        **{"gated": False, "sequence_parallel": True},
    ),
}


def command(job: str, file: str) -> list[str]:
    """The parameters that AICB was given, from the samples' README."""
    part = (DATA / "README.md").read_text().split(f"\n{job}\n")[1]
    line = next(one for one in part.splitlines() if one.startswith(f"    {file}: "))
    words = line.split()
    return words[next(index for index, word in enumerate(words) if word[:2] == "--") :]


def lines_of(text: str, *, computation: bool) -> list[Line]:
    found = []
    for row in text.splitlines()[1:]:
        kind, group, size, of, stage, dst, src, additional, *rest = row.split(",")
        assert (dst, rest) == ("None", ["None"] * 3 + ["1"])
        made = Line(
            kind[9:], group.removeprefix("CommGroup."), size, of, stage, src, additional
        )
        if computation or made.kind != "computation":
            found.append(made)
    return found


END = Line("epoch_end", "None", "None", "0", "")


def corrected(theirs: list[Line], job: Job, *, computation: bool) -> list[Line]:
    """What AICB would have written without its errors."""
    start, stop = theirs.index(END) + 1, _first_of_step(theirs)
    found = [*_setup(job), END]
    for of_one in _passes(theirs[start:stop]):
        found += _pass(of_one, job)
    found += [*_step(job), END]
    return [line for line in found if computation or line.kind != "computation"]


def _first_of_step(theirs: list[Line]) -> int:
    return next(index for index, line in enumerate(theirs) if line.stage == "step")


def _setup(job: Job) -> list[Line]:
    """AICB's are of an old version; a tied table is made equal on both ends of the pipeline."""
    if job.pp == 1:
        return [Line("barrier", "all", str(job.world), "0", "init")]
    return [Line("all_reduce", "embedding_group", "2", str(2 * job.table), "init.embedding")]


def _passes(lines: list[Line]) -> Iterator[list[Line]]:
    """Each micro-batch's forward, backward, or what is between."""
    for _, held in groupby(lines, key=lambda line: line.stage.startswith("backward.")):
        yield list(held)


def _pass(lines: list[Line], job: Job) -> list[Line]:
    if not lines[0].stage.startswith("backward."):
        return [*_forward(lines, job)]
    embedding = [line for line in lines if line.stage == "backward.MegatronEmbedding"]
    linear = [line for line in lines if line.stage != "backward.MegatronEmbedding"]
    back = [_product(line, job) for line in _reversed(linear)]
    if job.pp == 1:
        back = [*_head(job)[1:], *back]
    # Its gradient is whole on each rank; it is gathered where the sequence is split.
    gather = [line._replace(kind="all_gather") for line in embedding]
    return [*back, *(gather if job.sequence_parallel else [])]


def _reversed(lines: list[Line]) -> list[Line]:
    """Layers run backward from the last; AICB's run from the first.

    Without sequence parallelism the sum of a column's input gradients is begun before the
    product for its weights.
    """
    held = [list(some) for _, some in groupby(lines, key=lambda line: "Column" in line.stage)]
    found = []
    for some in reversed(held):
        kinds = [line.kind for line in some]
        swapped = kinds == ["computation", "computation", "all_reduce"]
        found += [some[0], some[2], some[1]] if swapped else some
    return found


def _product(line: Line, job: Job) -> Line:
    """Shapes of matrix products: a gated MLP has two matrices side by side; a gathered
    sequence has seq rows, not tp times as many."""
    if line.kind != "computation":
        return line
    words = line.of
    if "mlp_column" in line.stage and job.gated:
        words = words.replace(f"{job.ffn // job.tp}", f"{2 * job.ffn // job.tp}")
    if "column" in line.stage and job.sequence_parallel:
        words = words.replace(f"{job.seq * job.tp}", f"{job.seq}")
    return line._replace(of=words)


def _head(job: Job) -> list[Line]:
    """AICB declares a head and never calls it: product, and backward product, sum, product."""
    name = "MegatronColumnLinear"
    width, tokens = job.vocab // job.tp, job.seq
    shapes = [
        f"(({tokens} 1 {job.hidden}) ({job.hidden} {width}))",
        f"(({tokens} 1 {width}) ({width} {job.hidden}))",
        f"(({width} {tokens}) ({tokens} {job.hidden}))",
    ]
    ahead, of_data, of_weights = (
        Line("computation", "None", "None", of, f"{word}.{name}.final_column")
        for of, word in zip(shapes, ("forward", "backward", "backward"), strict=True)
    )
    reduce = Line(
        "all_reduce", "tp_group", str(job.tp), str(job.activation), f"backward.{name}"
    )
    return [ahead, of_data, reduce, of_weights]


def _data(job: Job) -> list[Line]:
    """Tokens, labels, mask of the loss, mask of attention, positions, and two lengths.

    Source: get_batch_on_this_tp_rank, megatron/training/utils.py of Megatron-LM core_v0.16.1.
    """
    sizes = [8 * job.seq, 8 * job.seq, 4 * job.seq, job.seq**2, 8 * job.seq, 8, 8]
    kept = sizes if job.pp == 1 else [sizes[0], *sizes[3:]]  # the loss is the last stage's
    return [
        Line("broadcast", "tp_group", str(job.tp), str(of), "forward_step", "0") for of in kept
    ]


def _forward(lines: list[Line], job: Job) -> Iterator[Line]:
    """And what goes between the stages."""
    sent: list[Line] = []
    losses = [line for line in lines if line.stage.endswith("CrossEntropy")]
    for line in lines:
        moved = line._replace(size=str(job.pp), of=str(job.activation // job.tp))
        if line.kind == "broadcast":
            if line.of == "40":
                yield from _data(job)
        elif line.kind == "irecv":
            # Both directions in one call; what comes is a gradient.
            sent.append(moved._replace(stage="backward_step"))
        elif line.kind == "isend":
            yield moved
            yield from sent
            sent = []
        elif "average_losses" not in line.stage:
            if losses and line is losses[0]:
                yield _head(job)[0]
            yield _product(line, job)
    yield from sent


def _step(job: Job) -> list[Line]:
    """One reduction and one gather of all parameters of the stage, norms, and small sums."""

    def dense(kind: str, num_bytes: int, params: int) -> Line:
        padded = -(-params // lcm(job.dp, 128)) * lcm(job.dp, 128)
        return Line(kind, "dp_group", str(job.dp), str(num_bytes * padded), "step")

    def small(group: str, size: int, name: str, of: int = 4) -> Line:
        return Line("all_reduce", group, str(size), str(of), f"step.{name}")

    found: list[Line] = []
    # A table that two stages share is a bucket of its own.
    parts = [job.body, job.table] if job.pp > 1 else [job.body + job.table]
    if job.dp > 1:
        found += [dense("reduce_scatter", 4, part) for part in parts]
    if job.sequence_parallel:
        found.append(small("tp_group", job.tp, "_allreduce_layernorm_grads", 4 * job.norms))
    if job.pp > 1:
        name = "backward.gradients.embedding"
        found.append(Line("all_reduce", "embedding_group", "2", str(4 * job.table), name))
    group = ("tp_group", job.tp) if job.world == job.tp else ("all", job.world)
    found.append(small(*group, "gradient_norm"))
    if job.dp > 1:
        found += [dense("all_gather", 2, part) for part in parts]
    if job.pp > 1:  # AICB has no group of tensor and pipeline parallel ranks
        return found
    found += [small("tp_group", job.tp, name) for name in ("success", "gradient_norm")]
    if job.dp > 1:
        found.append(small("dp_group", job.dp, "loss", 8))
    return [*found, small("tp_group", job.tp, "learning_rate")]
