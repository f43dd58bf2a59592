"""The dense MLP of a block: SwiGLU, or GELU in its tanh form as GPT-2 has it."""

from torch import Tensor, nn

from stepmark.bench.training.activation import activate
from stepmark.core.model import Activation


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), or down(gelu(up(x)))."""

    def __init__(
        self, hidden_size: int, width: int, *, activation: Activation, bias: bool = False
    ) -> None:
        super().__init__()
        is_gated = activation == "swiglu"
        self.settles_gradients = False  # True: worth it where they are cast to FP8
        self.gate = nn.Linear(hidden_size, width, bias=bias) if is_gated else None
        self.up = nn.Linear(hidden_size, width, bias=bias)
        self.down = nn.Linear(width, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x) if self.gate is not None else None
        y: Tensor = self.down(activate(gate, self.up(x), settled=self.settles_gradients))
        return y
