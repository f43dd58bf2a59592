"""A module of a model on one rank: what it computes, which parameters it has, what it keeps."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Activation, Attention, CrossEntropy, Norm, Op, Phase, Rope
from stepmark.step.workload import ComputeOp, Kernel

PassedOp = Norm | Activation | Rope | Attention | CrossEntropy  # one per pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One tensor on one rank of tp and ep. part: the role whose backward makes its gradient."""

    name: str  # within the unit, e.g. "attention.qkv.weight"
    shape: tuple[int, ...]
    part: str = ""
    is_norm: bool = False
    is_partial: bool = False  # every tp rank holds it, with the gradient of its own rows
    is_trained: bool = True
    is_expert: bool = False  # of the ranks of ep; experts are its first dimension
    is_copy: bool = False  # the same tensor as another one that is here
    is_narrow: bool = False  # its products have a narrower type than everything else

    def __post_init__(self) -> None:
        is_valid = all(isinstance(size, int) and size > 0 for size in self.shape)
        if not self.shape or not is_valid:
            raise ConfigError(self.name, self.shape, "a shape of whole numbers from 1")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def shard_dim(self, ranks: int) -> int:
        """Return the dimension that FSDP divides: 1 of experts that are fewer than the ranks.

        Raises ConfigError where torch would: it pads dimension 0 alone. torchtitan b5bcd76,
        distributed/fsdp.py: apply_fsdp.
        """
        if not self.is_expert or ranks <= self.shape[0] or len(self.shape) == 1:
            return 0
        if self.shape[1] % ranks:
            rule = (
                f"at most {self.shape[0]} experts of a rank, or a divisor of an expert's "
                f"{self.shape[1]} rows ({self.name}), as torch pads no rows; dp_replicate "
                "makes shards fewer"
            )
            raise ConfigError("shards of experts", ranks, rule)
        return 1

    def padded(self, ranks: int) -> int:
        """Return the elements of all shards: rows are divided evenly, the last ones padded.

        torch, _fsdp_param.py: _init_sharded_param; _fsdp_common.py: _get_dim0_padded_size.
        """
        if self.shard_dim(ranks):
            return self.numel
        return -(-self.shape[0] // ranks) * ranks * math.prod(self.shape[1:])

    def shard(self, ranks: int) -> int:
        """Return the elements of the first rank's shard, which has no padding."""
        return self.padded(ranks) // ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensors:
    """Elements per token that a module keeps for its backward pass.

    whole: on every tp rank; the others are divided by tp. eager: not where it is compiled.
    statistics are in fp32. Masks of dropout have a byte each: masks of the rank's own rows,
    divided_masks of attention's scores.
    """

    whole: int = 0
    divided: int = 0
    eager: int = 0
    statistics: int = 0
    masks: int = 0
    divided_masks: int = 0

    def __add__(self, other: "SavedTensors") -> "SavedTensors":
        return SavedTensors(
            whole=self.whole + other.whole,
            divided=self.divided + other.divided,
            eager=self.eager + other.eager,
            statistics=self.statistics + other.statistics,
            masks=self.masks + other.masks,
            divided_masks=self.divided_masks + other.divided_masks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module and those inside it in the order they run, or computation between modules.

    name: its path within the unit that it belongs to, as named_modules() has it; a unit is
    a child of the whole model. role: name of its work in workload files and tables.
    work: one forward pass, then one backward pass, each in the order it runs.
    twins: tensor-parallel ranks that do the same work, which the model needs once.
    registered: names of the modules inside in the order of the constructor, where that is not
    the order they run in. uses: names of parameters that other units store.
    """

    name: str = ""
    role: str = ""
    work: tuple[ComputeOp, ...] = ()
    params: tuple[Param, ...] = ()
    inside: "tuple[Module, ...]" = ()
    times: int = 1  # number of copies in a row, each with its own parameters
    num_replicas: int = 1
    keeps: SavedTensors = SavedTensors()
    registered: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    is_module: bool = True  # False: computation that hooks do not see
    is_linear: bool = False
    in_backward: bool = True  # its output has a gradient
    has_input_grad: bool = True  # so has its input

    def __post_init__(self) -> None:
        if self.registered:
            in_registered_order(self.name, self.inside, self.registered)

    @property
    def fwd(self) -> tuple[ComputeOp, ...]:
        return tuple(op for op in self.work if op.phase is Phase.FWD)

    @property
    def bwd(self) -> tuple[ComputeOp, ...]:
        return tuple(op for op in self.work if op.phase is not Phase.FWD)

    @property
    def is_row(self) -> bool:
        """Whether it is a product whose input tensor parallelism divides."""
        return self.role.endswith(("out", "down"))

    @property
    def all_params(self) -> tuple[Param, ...]:
        """Parameters of this module and of those inside, in the order of registration."""
        inside = in_registered_order(self.name, self.inside, self.registered)
        return (*self.params, *(param for module in inside for param in module.all_params))

    def walk(self) -> "Iterator[Module]":
        """Yield this module and those inside, in the order they run."""
        yield self
        for module in self.inside:
            yield from module.walk()

    def leaves(self) -> "Iterator[tuple[str, int, Module]]":
        """Yield (path, times, leaf) of a whole model, in forward order."""
        for unit in self.inside:
            for leaf in unit.walk():
                if leaf.work or leaf.params:
                    yield ".".join(filter(None, (unit.name, leaf.name))), unit.times, leaf


def between(name: str, *operations: tuple[Phase, Op | Kernel]) -> Module:
    """Return computation that is no module of its own."""
    return Module(name=name, role=name, work=work_of(name, *operations), is_module=False)


def both(op: PassedOp) -> tuple[tuple[Phase, Op], ...]:
    """Return an operator's forward and backward pass."""
    return (Phase.FWD, replace(op, phase=Phase.FWD)), (Phase.BWD, replace(op, phase=Phase.BWD))


def in_registered_order(
    name: str, inside: tuple[Module, ...], order: tuple[str, ...]
) -> tuple[Module, ...]:
    """Return modules with parameters by the order of their names. Raises ConfigError."""
    if not order:
        return inside
    with_params = {
        module.name: module for module in inside if any(leaf.params for leaf in module.walk())
    }
    if len(set(order)) != len(order) or not set(with_params) <= set(order):
        allowed = f"each of {', '.join(with_params)} once"
        raise ConfigError(f"{name}: registered", ", ".join(order), allowed)
    names = [module.name for module in inside]
    if unknown := set(order) - set(names):
        allowed = f"names of {', '.join(filter(None, names))}"
        raise ConfigError(f"{name}: registered", min(unknown), allowed)
    return tuple(with_params[key] for key in order if key in with_params)


def work_of(
    role: str, *operations: tuple[Phase, Op | Kernel], layer: int | None = 0
) -> tuple[ComputeOp, ...]:
    """Return operations as a module's work, in the order they run."""
    return tuple(
        ComputeOp(op=op, phase=phase, module=role, layer=layer, microbatch=0)
        for phase, op in operations
    )


def outside_layers(leaf: Module) -> Module:
    """Return a module that is in no layer."""
    work = tuple(replace(op, layer=None) for op in leaf.work)
    return replace(leaf, work=work, inside=tuple(map(outside_layers, leaf.inside)))


def role_of(name: str) -> str:
    """Return the role, as in workload files, of a block's module."""
    for prefix, role in _ROLES.items():
        if name.startswith(prefix):
            return role + name.removeprefix(prefix)
    return name


_ROLES = {
    "ffn.held.": "mlp.experts_",
    "ffn.shared.": "mlp.shared_",
    "ffn.": "mlp.",
    "attention.q.": "attention.q_",
}


# Products of one input, whose gradients are complete together.
TOGETHER = {
    f"mlp.{prefix}{name}": f"mlp.{prefix}gate_up"
    for prefix in ("", "experts_", "shared_")
    for name in ("gate", "up")
}
