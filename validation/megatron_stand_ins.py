"""Replace CUDA and TransformerEngine for megatron-core on a CPU, for megatron_step.py.

Calls of torch.cuda are redirected to the CPU. Parts that only TransformerEngine has are
replaced: norms whose weights are marked for sequence parallelism, unsharded down projections
of latent attention, the order of grouped experts' weights, and attention over a part of the
sequence (without its exchange of keys and values). Routing is even.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter


class Stream:
    """The only stream of a CPU, which runs in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def record_event(self, *_: Any) -> "Stream":
        return self

    def synchronize(self) -> None: ...


def on_cpu() -> None:
    """Redirect megatron-core's calls of torch.cuda to the CPU."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    cuda.is_available = lambda: False
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = cuda.default_stream = lambda *_: Stream()
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    for name in ("FloatTensor", "BFloat16Tensor", "HalfTensor", "IntTensor"):
        setattr(cuda, name, getattr(torch, name))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    tensor.record_stream = lambda self, *_: None
    # Megatron-core groups tensors by the name of their type.
    kind = torch.Tensor.type
    tensor.type = lambda self, *a, **k: (
        kind(self, *a, **k) if a or k else kind(self).replace("torch.", "torch.cuda.")
    )
    for name in ("zeros", "ones", "empty", "tensor", "full", "arange"):
        setattr(torch, name, _placed(getattr(torch, name)))
    distributed: Any = torch.distributed
    distributed.all_gather = _uneven_gather(distributed.all_gather)
    exchange: Any = token_dispatcher
    exchange.maybe_move_tensor_to_cpu = _on_cpu
    states: Any = random
    states.CudaRNGStatesTracker.fork = lambda self, *_, **__: contextlib.nullcontext()
    states._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    states._set_cuda_rng_state = lambda *_, **__: None


def _uneven_gather(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Return all_gather with parts of several sizes, which gloo lacks.

    It is a broadcast from each rank, as ProcessGroupNCCL::allgather makes it.
    """

    def all_gather(parts: Any, own: torch.Tensor, group: Any = None, **options: Any) -> Any:
        if len({part.numel() for part in parts}) == 1:
            return gather(parts, own, group=group, **options)
        parts[torch.distributed.get_rank(group)].copy_(own)
        for rank, part in enumerate(parts):
            torch.distributed.broadcast(part, group=group, group_src=rank)
        return None

    return all_gather


def _on_cpu(splits: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return the splits of the exchange, which are already on the CPU."""
    return splits.numpy() if as_numpy and isinstance(splits, torch.Tensor) else splits


def _placed(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make_on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return make_on_cpu


class Norm(torch.nn.Module):
    """Norm whose weights are marked, like the fused ones, as sequence parallel."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        layer_norm = config.normalization == "LayerNorm"
        self.inner = (torch.nn.LayerNorm if layer_norm else torch.nn.RMSNorm)(hidden_size, eps)
        for weight in self.inner.parameters():
            weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class UnshardedLinear(torch.nn.Module):
    """Linear layer that every tp rank holds unsharded."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(output_size, input_size) * 0.02)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.linear(x, self.weight), None


class Grouped(SequentialMLP):
    """Experts whose weights are in the order of TransformerEngine's grouped layers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        experts = self._modules.pop("local_experts")
        for name in ("linear_fc1", "linear_fc2"):
            self.add_module(
                name, torch.nn.ModuleList(getattr(expert, name) for expert in experts)
            )
        self.add_module("local_experts", experts)


class NoFp8:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


class LocalAttention(torch.nn.Module):
    """Substitute for attention that uses this rank's tokens only and sends nothing."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        groups = query.shape[2] // value.shape[2]
        output = value.repeat_interleave(groups, dim=2) + 0 * (
            query.sum(-1, keepdim=True) + key.sum((2, 3), keepdim=True)
        )
        return output.flatten(2)


def route_evenly() -> None:
    """Send token i to the experts from i x top_k on, regardless of the router."""
    router: Any = TopKRouter
    gating = router.gating

    def even(self: Any, x: torch.Tensor) -> torch.Tensor:
        logits = gating(self, x)
        experts, top_k = self.config.num_moe_experts, self.topk
        first = torch.arange(logits.numel() // experts, device=logits.device) * top_k
        chosen = (first[:, None] + torch.arange(top_k, device=logits.device)) % experts
        wanted = torch.nn.functional.one_hot(chosen, experts).sum(1).reshape(logits.shape)
        return logits * 1e-3 + wanted.to(logits.dtype)

    router.gating = even


def replay_compute() -> None:
    """Install the substitutes for TransformerEngine, and even routing."""
    modules: Any = multi_latent_attention
    modules.TELinear = UnshardedLinear
    states: Any = random
    if not hasattr(states, "FP8GlobalStateManager"):
        states.FP8GlobalStateManager = NoFp8
        for name in ("activation_recompute_forward", "fp8_autocast"):
            setattr(states, name, lambda **_: contextlib.nullcontext())
        moe_utils.__dict__.setdefault("te_general_gemm", None)
    route_evenly()
