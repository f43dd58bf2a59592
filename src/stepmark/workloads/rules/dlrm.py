"""The recommender of facebookresearch/dlrm: tables over ranks, MLPs on all.

Each rank has some embedding tables and looks them up for the whole batch; one all-to-all
turns own tables x all samples into all tables x own samples, its backward does the reverse for
gradients. The two MLPs are wrapped in DistributedDataParallel, each by itself. Sources, at
commit 0eb05fd: extend_distributed.py (get_split_lengths, All2All_Req, All2All_Wait: one
all_to_all_single, backward as well), dlrm_s_pytorch.py (distributed_forward: lookups, start of
the exchange, bottom MLP, wait, interaction, top MLP). Compared with its messages on two and
four ranks (tests/data/dlrm).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective, RedOp
from stepmark.model.ops import Bmm, EmbeddingBag, Gemm, Layout, Optimizer, Phase
from stepmark.step.kernel_choice import memory_kernel
from stepmark.step.workload import CommOp, ComputeOp, Group, Item, Stage, Workload
from stepmark.workloads.job import setting
from stepmark.workloads.rules.pytorch.ddp import assign_buckets
from stepmark.workloads.rules.pytorch.settings import DEFAULT_BUCKETS

SOURCE = "facebookresearch/dlrm 0eb05fd: extend_distributed.py, dlrm_s_pytorch.py"
_MAX_WIDTH = 2**24
_MAX_SIZE = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Dlrm:
    """Flags of facebookresearch/dlrm. Sizes are joined by "-", as there."""

    arch_embedding_size: str = setting("4-3-2", "rows of each table")
    arch_sparse_feature_size: int = setting(2, "width of a table's row")
    arch_mlp_bot: str = setting("4-3-2", "bottom MLP: dense features to sparse feature size")
    arch_mlp_top: str = setting("4-2-1", "top MLP after the interaction's own width")
    mini_batch_size: int = setting(1, "samples per step over all ranks")
    num_indices_per_lookup: int = setting(10, "rows summed per sample and table")
    dtype: DType = setting(DType.FP32, "of weights, activations and messages")

    def __post_init__(self) -> None:
        for name in ("arch_embedding_size", "arch_mlp_bot", "arch_mlp_top"):
            _sizes(name, getattr(self, name))
        for name in ("arch_sparse_feature_size", "mini_batch_size", "num_indices_per_lookup"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= _MAX_WIDTH:
                raise ConfigError(name, value, f"a whole number from 1 to {_MAX_WIDTH}")
        if self.bottom[-1] != self.arch_sparse_feature_size:
            raise ConfigError(
                "arch_mlp_bot",
                self.arch_mlp_bot,
                f"it must end in arch_sparse_feature_size ({self.arch_sparse_feature_size})",
            )

    @property
    def tables(self) -> tuple[int, ...]:
        return _sizes("arch_embedding_size", self.arch_embedding_size)

    @property
    def bottom(self) -> tuple[int, ...]:
        return _sizes("arch_mlp_bot", self.arch_mlp_bot)

    @property
    def interaction_width(self) -> int:
        """Width of the products of all pairs of features and the bottom MLP's output."""
        features = len(self.tables) + 1
        return features * (features - 1) // 2 + self.arch_sparse_feature_size

    @property
    def top(self) -> tuple[int, ...]:
        return (self.interaction_width, *_sizes("arch_mlp_top", self.arch_mlp_top))


def _sizes(name: str, text: str) -> tuple[int, ...]:
    words = text.split("-")
    if not all(word.isdecimal() and 1 <= int(word) <= _MAX_SIZE for word in words):
        raise ConfigError(name, text, 'whole numbers joined by "-", e.g. 512-256-64')
    return tuple(map(int, words))


def workload(settings: Dlrm, world_size: int) -> Workload:
    """Return one step. Raises ConfigError for more ranks than tables, or an uneven batch."""
    tables = len(settings.tables)
    batch = settings.mini_batch_size
    if world_size > tables:
        raise ConfigError("world-size", world_size, f"at most one rank per table ({tables})")
    if batch % world_size:
        raise ConfigError("mini_batch_size", batch, f"a multiple of {world_size} ranks")
    most = -(-tables // world_size)
    note = (
        f"{tables} tables on {world_size} ranks: rank 0's part, {most} tables, is shown;"
        f" the last ranks have {tables // world_size}"
    )
    return Workload(
        name="dlrm",
        rules="dlrm",
        source=SOURCE,
        world_size=world_size,
        settings={name: getattr(settings, name) for name in Dlrm.__dataclass_fields__},
        groups={"world": Group(digits=((world_size, 1),))},
        blocks={"step": tuple(_step(settings, world_size, most))},
        stages=(Stage(step="step"),),
        notes=(note,) if tables % world_size else (),
    )


def _step(settings: Dlrm, world_size: int, local_tables: int) -> list[Item]:
    samples = settings.mini_batch_size // world_size
    bottom = _Mlp("bottom", settings.bottom, samples, settings.dtype)
    top = _Mlp("top", settings.top, samples, settings.dtype)
    several = world_size > 1
    return [
        *_bags(settings, local_tables, Phase.FWD),
        *_exchange(settings, world_size, local_tables, Phase.FWD, "exchange", "bags"),
        *bottom.forward(),
        *_interaction(settings, samples, Phase.FWD, ("exchange",) if several else ()),
        *top.forward(),
        _kernel("loss", Phase.FWD, 3 * samples, settings.dtype),
        _kernel("loss", Phase.BWD, 3 * samples, settings.dtype),
        *top.backward(first=False, reduced=several),
        *_interaction(settings, samples, Phase.BWD, ()),
        *_exchange(settings, world_size, local_tables, Phase.BWD, "returned", "split"),
        *bottom.backward(first=True, reduced=several),
        *_bags(settings, local_tables, Phase.BWD, ("returned",) if several else ()),
        *_update(settings, local_tables, reduced=several),
    ]


class _Mlp:
    """Linear layers with an activation after each."""

    def __init__(self, name: str, widths: Sequence[int], rows: int, dtype: DType) -> None:
        self.name = name
        self.rows = rows
        self.dtype = dtype
        self.layers = list(pairwise(widths))

    def forward(self) -> list[Item]:
        return [
            item
            for index, (k, n) in enumerate(self.layers)
            for item in (
                self._gemm(index, Phase.FWD, self.rows, n, k, Layout.NT),
                self._activation(index, Phase.FWD, n),
            )
        ]

    def backward(self, *, first: bool, reduced: bool) -> list[Item]:
        """first: its input needs no gradient. reduced: buckets are reduced as they fill."""
        items: list[Item] = []
        buckets = self.buckets() if reduced else {}
        for index, (k, n) in reversed(list(enumerate(self.layers))):
            items.append(self._activation(index, Phase.BWD, n))
            if index or not first:
                items.append(self._gemm(index, Phase.DGRAD, self.rows, k, n, Layout.NN))
            name = f"{self.name}.{index}.wgrad"
            items.append(self._gemm(index, Phase.WGRAD, n, k, self.rows, Layout.TN, name))
            if elements := buckets.get(index):
                items.append(
                    CommOp(
                        collective=Collective.ALL_REDUCE,
                        dtype=self.dtype,
                        count=elements,
                        group="world",
                        phase=Phase.BWD,
                        module=self.name,
                        stream="dp",
                        name=f"{self.name}.reduced",
                        after=(name,),
                        redop=RedOp.SUM,
                    )
                )
        return items

    def buckets(self) -> dict[int, int]:
        """Return DistributedDataParallel's buckets: elements by the layer that completes one.

        The last layer comes first; bias and weight of a layer are ready at once.
        """
        sizes = [
            (index, elements)
            for index, (k, n) in reversed(list(enumerate(self.layers)))
            for elements in (n, n * k)
        ]
        buckets = assign_buckets(
            [size for _, size in sizes], self.dtype.itemsize, DEFAULT_BUCKETS
        )
        return {
            sizes[bucket[-1]][0]: sum(sizes[index][1] for index in bucket) for bucket in buckets
        }

    def _gemm(
        self, index: int, phase: Phase, m: int, n: int, k: int, layout: Layout, name: str = ""
    ) -> ComputeOp:
        op = Gemm(m=m, n=n, k=k, dtype=self.dtype, layout=layout)
        return ComputeOp(op=op, phase=phase, module=f"{self.name}.{index}", name=name)

    def _activation(self, index: int, phase: Phase, width: int) -> ComputeOp:
        return _kernel(f"{self.name}.{index}.relu", phase, 2 * self.rows * width, self.dtype)


def _bags(settings: Dlrm, tables: int, phase: Phase, after: tuple[str, ...] = ()) -> list[Item]:
    """Return lookups in this rank's tables for all samples; the first tables are rank 0's."""
    items: list[Item] = []
    for index, rows in enumerate(settings.tables[:tables]):
        op = EmbeddingBag(
            rows=rows,
            dim=settings.arch_sparse_feature_size,
            pooling=settings.num_indices_per_lookup,
            batch=settings.mini_batch_size,
            dtype=settings.dtype,
            phase=phase,
        )
        named = "bags" if phase is Phase.FWD else ""
        items.append(
            ComputeOp(op=op, phase=phase, module=f"table.{index}", name=named, after=after)
        )
    return items


def _exchange(
    settings: Dlrm, world_size: int, tables: int, phase: Phase, name: str, after: str
) -> list[CommOp]:
    """Return the exchange of own tables' rows for all samples by all tables' for own samples.

    tables: of the rank with most, which has the largest buffer.
    """
    if world_size == 1:
        return []
    elements = tables * settings.mini_batch_size * settings.arch_sparse_feature_size
    even = len(settings.tables) % world_size == 0
    exchange = CommOp(
        collective=Collective.ALL_TO_ALL if even else Collective.ALL_TO_ALL_V,
        dtype=settings.dtype,
        count=elements // world_size,
        group="world",
        phase=phase,
        module="exchange",
        stream="exchange",
        name=name,
        after=(after,),
    )
    return [exchange]


def _interaction(settings: Dlrm, rows: int, phase: Phase, after: tuple[str, ...]) -> list[Item]:
    """Return z = T T^T per sample, T the features; backward dT = (dz + dz^T) T."""
    features = len(settings.tables) + 1
    width = settings.arch_sparse_feature_size
    sizes = (features, features, width) if phase is Phase.FWD else (features, width, features)
    m, n, k = sizes
    layout = Layout.NT if phase is Phase.FWD else Layout.NN
    product = Bmm(batch=rows, m=m, n=n, k=k, dtype=settings.dtype, layout=layout)
    name = "split" if phase is Phase.BWD else ""
    item = ComputeOp(op=product, phase=phase, module="interaction", name=name, after=after)
    return [item] if phase is Phase.FWD else [item, item]


def _update(settings: Dlrm, tables: int, *, reduced: bool) -> list[Item]:
    """Return plain SGD of the whole MLPs and of the rows that were looked up."""
    dense = sum(
        k * n + n for widths in (settings.bottom, settings.top) for k, n in pairwise(widths)
    )
    rows = tables * settings.mini_batch_size * settings.num_indices_per_lookup
    touched = rows * settings.arch_sparse_feature_size
    waits = ("bottom.reduced", "top.reduced") if reduced else ()
    op = Optimizer(num_params=dense, kind="sgd", dtype=settings.dtype)
    return [
        ComputeOp(op=op, phase=Phase.OPTIM, module="mlps", after=waits),
        _kernel("tables", Phase.OPTIM, 3 * touched, settings.dtype),
    ]


def _kernel(module: str, phase: Phase, elements: int, dtype: DType) -> ComputeOp:
    """Return an elementwise kernel that reads or writes so many elements."""
    name = module.rpartition(".")[2]
    op = memory_kernel(name, elements * dtype.itemsize)
    return ComputeOp(op=op, phase=phase, module=module)
