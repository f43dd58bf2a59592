"""A tiny framework: gathers each layer, reduces its gradients; to try the command line."""

from dataclasses import dataclass, field
from enum import StrEnum

from stepmark.core.collectives import Collective
from stepmark.core.errors import ConfigError
from stepmark.core.message import RECV, SEND
from stepmark.core.ops import Gemm, Phase
from stepmark.core.workload import CommOp, ComputeOp, Item, Run, Stage, Workload
from stepmark.workload.job import Comms, Job, mesh_groups


class Order(StrEnum):
    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fake:
    bucket_size: int = field(default=500_000_000, metadata={"help": "elements reduced at once"})
    sharded: bool = field(default=True, metadata={"help": "gather each layer"})
    share: float = field(default=0.5, metadata={"help": "a part of something"})
    order: Order = field(default=Order.FIRST, metadata={"help": "first or last"})
    limit: int | None = field(default=None, metadata={"help": "at most so many"})

    def __post_init__(self) -> None:
        if self.bucket_size < 1:
            raise ConfigError("bucket_size", self.bucket_size, "1 or more")


def workload(job: Job, settings: Fake) -> Workload:
    """GPipe's order on pp stages: all forwards, then all backwards, last micro-batch first."""
    model, pp = job.model, job.parallel.pp
    if model.num_layers % pp:
        raise ConfigError("pp", pp, f"a divisor of {model.num_layers} layers")
    groups = mesh_groups(job.parallel, {"dp": ("dp_shard",), "pp": ("pp",)})
    comms = Comms(groups=groups, dtype=job.dtype)
    size = model.hidden_size * job.parallel.data_ranks * 16

    def gemm(phase: Phase) -> ComputeOp:
        op = Gemm(m=job.tokens, n=model.hidden_size, k=model.hidden_size, dtype=job.dtype)
        return ComputeOp(op=op, phase=phase, module="mlp.up", layer=0, microbatch=0)

    def gather(phase: Phase) -> tuple[CommOp, ...]:
        return comms(
            Collective.ALL_GATHER,
            size,
            "dp",
            phase=phase,
            module="layer",
            layer=0,
            microbatch=0,
        )

    reduce = comms(
        *(Collective.REDUCE_SCATTER, size, "dp"), phase=Phase.BWD, module="layer", layer=0
    )
    held = gather(Phase.FWD) if settings.sharded else ()
    blocks: dict[str, tuple[Item, ...]] = {
        "layer": (*held, gemm(Phase.FWD)),
        "layer back": (gemm(Phase.DGRAD), gemm(Phase.WGRAD), *reduce),
    }
    per, count = model.num_layers // pp, job.num_microbatches
    stages = []
    for stage in range(pp):

        def move(collective: str, peer: int, phase: Phase, index: int) -> tuple[CommOp, ...]:
            return comms(
                *(collective, job.tokens * model.hidden_size, "pp"),
                phase=phase,
                module="pp",
                peer=peer,
                microbatch=index,
            )

        first, last = stage == 0, stage == pp - 1
        items: list[Item] = []
        for index in range(count):
            items += () if first else move(RECV, -1 % pp, Phase.FWD, index)
            items.append(
                Run(block="layer", times=per, layer=stage * per, layer_step=1, microbatch=index)
            )
            items += () if last else move(SEND, 1, Phase.FWD, index)
        for index in reversed(range(count)):
            items += () if last else move(RECV, 1, Phase.DGRAD, index)
            back = Run(
                block="layer back",
                times=per,
                layer=(stage + 1) * per - 1,
                layer_step=-1,
                microbatch=index,
            )
            items.append(back)
            items += () if first else move(SEND, -1 % pp, Phase.DGRAD, index)
        blocks[f"stage {stage}"] = tuple(items)
        layers = tuple(range(stage * per, (stage + 1) * per))
        stages.append(Stage(step=f"stage {stage}", layers=layers))
    return Workload(
        name=model.name,
        rules="fake",
        source="nowhere",
        world_size=job.parallel.world_size,
        num_microbatches=count,
        model=model,
        settings={"bucket_size": settings.bucket_size, "sharded": settings.sharded},
        groups=groups,
        blocks=blocks,
        stages=tuple(stages),
        notes=("made for tests",),
    )
