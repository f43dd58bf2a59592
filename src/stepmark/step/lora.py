"""Low-rank adaptation (arXiv:2106.09685): frozen weights, with small trained ones beside them.

y = x w.T + s (x a.T) b.T with a [rank, width] and b [out, rank]. Frozen weights have no
gradient, so they have no weight-gradient product, reduction or optimizer state; gradients still
pass through them. alpha and the scale that follows from it change no operation. Dropout is 0,
the default of torchtune, torchtitan and Megatron-Bridge.

Sources: torchtitan 0b83f01, components/lora.py (apply_lora); Megatron-Bridge 067f987,
src/megatron/bridge/peft/lora.py (LoRA) and utils.py (ParallelLinearAdapter). Under tensor
parallelism, as in ParallelLinearAdapter, the rank of a is divided beside a weight whose rows
are (the result is gathered), its width beside one whose columns are (the result is summed); the
rows of b are divided in both cases. Those messages are the rules' business.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stepmark.ground.errors import ConfigError
from stepmark.model.layers import Linear
from stepmark.model.ops import Phase
from stepmark.step.module import Module
from stepmark.step.workload import Kernel

# Layers that can have adapters. Routers and routed experts never have any: torchtitan adapts
# nn.Linear, and its experts are grouped products.
ADAPTABLE = ("q", "k", "v", "out", "gate", "up", "down", "head")
_NAMES = {"qkv": ("q", "k", "v"), "kv": ("k", "v")}
_ADAPTERS = ("lora_a", "lora_b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Rank of all adapters, and the layers that have one. Raises ConfigError.

    Fused products have one adapter, as in Megatron-Bridge. The default targets are torchtune's
    and Megatron-Bridge's: every linear layer of a block.
    """

    rank: int
    targets: frozenset[str] = frozenset(ADAPTABLE) - {"head"}

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 2**16:
            raise ConfigError("lora_rank", self.rank, "a whole number from 1 to 65536")
        unknown = sorted(self.targets - set(ADAPTABLE))
        if unknown or not self.targets:
            allowed = f"some of {', '.join(ADAPTABLE)}"
            raise ConfigError("lora_targets", ", ".join(unknown) or "none", allowed)

    def adapts(self, role: str) -> bool:
        """Return whether a linear layer of this role has an adapter. Raises ConfigError."""
        names = _names_of(role)
        targeted = [name for name in names if name in self.targets]
        if targeted and len(targeted) < len(names):
            together = ", ".join(names)
            allowed = f"all or none of {together}, which are one product"
            raise ConfigError("lora_targets", ", ".join(sorted(self.targets)), allowed)
        return bool(targeted)

    def layers_of(self, linear: Linear) -> tuple[Linear, Linear]:
        """Return the two layers beside a linear layer, with what tensor parallelism divides."""
        down, up = (f"{linear.name}.{name}" for name in _ADAPTERS)
        return (
            Linear(down, self.rank, linear.width, linear.split),
            Linear(up, linear.out, self.rank, "out" if linear.split else ""),
        )


def _names_of(role: str) -> tuple[str, ...]:
    """Return the layers of ADAPTABLE that a product computes; none of routers and experts.

    Both projections of a latent vector are that layer: mlp.shared_gate is gate, attention.kv_up
    is k and v.
    """
    name = role.rpartition(".")[2].removeprefix("shared_")
    if name in ADAPTABLE:
        return (name,)
    if name == "gate_up":
        return ("gate", "up")
    name = name.removesuffix("_down").removesuffix("_up")
    if name in _NAMES:
        return _NAMES[name]
    return (name,) if name == "q" else ()


def is_adapter(role: str) -> bool:
    """Return whether a module of this role is one of an adapter's two layers."""
    return role.endswith(_ADAPTERS)


def frozen(module: Module) -> Module:
    """Return a module whose weights are not trained, but those of adapters inside."""
    if is_adapter(module.role):
        return module
    return replace(
        module,
        work=tuple(op for op in module.work if op.phase is not Phase.WGRAD),
        params=tuple(replace(param, is_trained=False) for param in module.params),
        inside=tuple(map(frozen, module.inside)),
    )


def scaled_sum(num_bytes: int) -> Iterator[tuple[Phase, Kernel]]:
    """Yield s y' and y + s y' of results of this size, and the scaled gradient of y'."""
    yield Phase.FWD, Kernel(name="lora_add", flops=0, bytes_moved=5 * num_bytes)
    yield Phase.BWD, Kernel(name="lora_scale", flops=0, bytes_moved=2 * num_bytes)
