"""The dense MLP of a block: SwiGLU, or GELU in its tanh form as GPT-2 has it."""

from torch import Tensor, nn
from torch.nn import functional

from stepmark.core.model import Activation


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), or down(gelu(up(x)))."""

    def __init__(
        self, hidden_size: int, width: int, *, activation: Activation, bias: bool = False
    ) -> None:
        super().__init__()
        is_gated = activation == "swiglu"
        self.gate = nn.Linear(hidden_size, width, bias=bias) if is_gated else None
        self.up = nn.Linear(hidden_size, width, bias=bias)
        self.down = nn.Linear(width, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x) if self.gate is not None else None
        y: Tensor = self.down(activate(gate, self.up(x)))
        return y


def activate(gate: Tensor | None, up: Tensor) -> Tensor:
    """What goes into the down projection; gate is None for GELU."""
    if gate is None:
        return functional.gelu(up, approximate="tanh")
    return functional.silu(gate) * up
