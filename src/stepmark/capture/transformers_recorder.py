"""Record the operations of a forward pass of transformers on meta tensors, by module."""

import contextlib
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, masking_utils
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from stepmark.capture.compute import computation
from stepmark.ground.dtypes import parse_dtype
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Attention, Copy, Norm, Op, Phase
from stepmark.step.native import OpFields, plain_op
from stepmark.step.workload import ComputeOp, Kernel
from stepmark.training.messages import tensors
from stepmark.workloads.formats.huggingface.trace import ELEMENTWISE, TracedCall

IMPLEMENTATION = "stepmark_trace"  # name of attention and of its masks, for transformers
_SCAN = "mamba_selective_scan"  # of a family's file, where it has layers of Mamba 1
_MOST_KERNELS = 1000  # of a module that has no loop, e.g. with chunks of 64 tokens
Mask = tuple[bool, int]  # whether the future is masked, and the window; 0: none


def is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not any(module.children())


class TraceRecorder(TorchDispatchMode):
    """Records the operations inside `with recording()`, each with the module that is called.

    Kernels that are no products are summed for each layer. A norm is one operation, whatever
    its class does; so is attention. Models are built after it: it is their attention.
    """

    def __init__(self, seq_len: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seq_len = seq_len
        self.calls: list[TracedCall] = []
        self._names: dict[nn.Module, str] = {}
        self._layer = re.compile("$^")
        self._above: list[nn.Module] = []
        self._is_silent = False
        self._place = ""  # the layer that the last operation belongs to; empty: none
        self._bytes: dict[bool, int] = defaultdict(int)  # by whether a gradient follows
        self._num_kernels: dict[nn.Module, int] = defaultdict(int)
        self._masked = set[str]()
        AttentionInterface.register(IMPLEMENTATION, self._attention)
        AttentionMaskInterface.register(IMPLEMENTATION, _mask)

    @property
    def modules_with_loops(self) -> list[str]:
        """Classes of modules that issue at least a kernel for each token."""
        counts = self._num_kernels.items()
        return sorted({type(module).__name__ for module, num in counts if num >= self._seq_len})

    @property
    def masked_modules(self) -> list[str]:
        """Classes of modules with attention under a mask whose values are unknown."""
        return sorted(self._masked)

    @contextlib.contextmanager
    def recording(self, model: nn.Module, layers: str) -> Iterator[None]:
        """Record a call of the model. layers: path of the list of its layers, if any."""
        self._names = {module: path for path, module in model.named_modules()}
        if layers:
            self._layer = re.compile(rf"{re.escape(layers)}\.\d+(?=\.|$)")
        self._above = [model]
        called = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._call(called, module, args, kwargs)

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(nn.Module, "__call__", call))
            source = sys.modules[type(model).__module__]
            if hasattr(source, _SCAN):
                stack.enter_context(mock.patch.object(source, _SCAN, self._scan))
            for owner, name in _READS_TOKENS:
                stack.enter_context(mock.patch.object(owner, name, return_value=None))
            stack.enter_context(_DirectAttention(self._add_attention))
            stack.enter_context(self)
            yield
        self._move_to("")
        self._flush()

    def _call(
        self,
        called: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self._is_silent or module not in self._names or self._is_foreign(module):
            return called(module, *args, **kwargs)
        self._above.append(module)
        try:
            operands = list(tensors([*args, *kwargs.values()]))
            if not is_norm(module) or len(operands) != 1:
                return called(module, *args, **kwargs)
            with mock.patch.object(self, "_is_silent", True):
                result = called(module, *args, **kwargs)
            self._add_norm(module, operands[0])
            return result
        finally:
            self._above.pop()

    def _is_foreign(self, module: nn.Module) -> bool:
        """Return whether it is a module that layers share, such as an activation."""
        here = self._layer_of(self._above[-1])
        is_elsewhere = here and self._layer_of(module) != here
        return bool(is_elsewhere) and next(module.parameters(), None) is None

    def _layer_of(self, module: nn.Module) -> str:
        match = self._layer.match(self._names[module])
        return match[0] if match else ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled, and the check takes as long as the rest."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._is_silent:
            return result
        if func is torch.ops.aten.embedding.default:
            self._add(Copy(num_bytes=result.numel() * result.element_size()))
            return result
        operation = computation(func, args, kwargs, result, backward=False)
        if operation is not None:
            operands = tensors([*args, *kwargs.values()])
            self._add(operation[0], has_grad=any(each.requires_grad for each in operands))
        return result

    def _add_norm(self, module: nn.Module, x: Tensor) -> None:
        has_bias = getattr(module, "bias", None) is not None
        is_layernorm = isinstance(module, nn.LayerNorm) or has_bias
        op = Norm(
            tokens=x.numel() // x.shape[-1],
            hidden=x.shape[-1],
            kind="layernorm" if is_layernorm else "rmsnorm",
            dtype=parse_dtype(str(x.dtype)),
        )
        self._add(op, has_grad=x.requires_grad)

    def _attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Stand for transformers' attention functions, of [batch, heads, seq, head_dim]."""
        mask: Mask | None = getattr(attention_mask, "mask", None)
        if attention_mask is None:
            causal = kwargs.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            mask = bool(causal), (kwargs.get("sliding_window") or 0) if causal else 0
        output = self._add_attention(
            query,
            key,
            value,
            mask,
            sinks=kwargs.get("s_aux") is not None,
            softcap=float(kwargs.get("softcap") or 0),
        )
        return output.transpose(1, 2).contiguous(), None

    def _add_attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, **fields: Any
    ) -> Tensor:
        """Record attention, and return a tensor of its output's shape and gradient.

        mask: None is one whose values are unknown, with which kernels compute all pairs.
        """
        causal, window = mask or (False, 0)
        if mask is None:
            self._masked.add(type(self._above[-1]).__name__)
        if query.shape[2] != key.shape[2]:
            causal, window = False, 0
        op = Attention(
            batch=query.shape[0],
            heads=query.shape[1],
            kv_heads=key.shape[1],
            seq_q=query.shape[2],
            seq_kv=key.shape[2],
            head_dim_qk=query.shape[3],
            head_dim_v=value.shape[3],
            causal=causal,
            window=window if 0 < window < key.shape[2] else 0,
            dtype=parse_dtype(str(query.dtype)),
            **fields,
        )
        self._add(op, has_grad=query.requires_grad)
        with mock.patch.object(self, "_is_silent", True):
            width = value.shape[-1]
            return query.sum(-1, keepdim=True).expand(*query.shape[:-1], width).contiguous()

    def _scan(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Record the fused kernel of mamba_ssm: it reads its operands and writes its output.

        transformers' own is a loop over tokens, which keeps a state of each in memory.
        """
        operands = [hidden_states, *tensors([*args, *kwargs.values()])]
        num_bytes = sum(each.numel() * each.element_size() for each in operands)
        num_bytes += hidden_states.numel() * hidden_states.element_size()
        self._add(Kernel(name=_SCAN, flops=0, bytes_moved=num_bytes))
        with mock.patch.object(self, "_is_silent", True):
            output = hidden_states.clone()
        return (output, None) if kwargs.get("return_last_state") else output

    def _add(self, op: Op | Kernel, *, has_grad: bool = True) -> None:
        module = self._above[-1]
        self._move_to(self._layer_of(module))
        if isinstance(op, Kernel) and not op.flops:
            self._bytes[has_grad] += op.bytes_moved or 0
            self._num_kernels[module] += 1
            self._check_loop(module)
        else:
            is_linear = isinstance(module, nn.Linear)
            self._append(op, self._names[module], has_grad=has_grad, is_linear=is_linear)

    def _check_loop(self, module: nn.Module) -> None:
        """Raise ConfigError for a module that computes its tokens one after the other.

        It would be traced for minutes, and is a fused kernel in any training.
        """
        if self._num_kernels[module] > _MOST_KERNELS + 3 * self._seq_len:
            rule = "a class that has no loop over tokens in Python"
            raise ConfigError("model_type", type(module).__name__, rule)

    def _move_to(self, place: str) -> None:
        if place != self._place:
            self._flush()
            self._place = place

    def _flush(self) -> None:
        """Add the kernels of the layer that ends, which are no products."""
        for has_grad, num_bytes in sorted(self._bytes.items()):
            op = Kernel(name=ELEMENTWISE, flops=0, bytes_moved=num_bytes)
            self._append(op, self._place, has_grad=has_grad)
        self._bytes.clear()

    def _append(
        self, op: Op | Kernel, path: str, *, has_grad: bool, is_linear: bool = False
    ) -> None:
        compute = ComputeOp(op=op, phase=Phase.FWD, module=path, layer=None, microbatch=None)
        fields = msgspec.convert(plain_op(compute), OpFields)
        self.calls.append(TracedCall(op=fields, has_grad=has_grad, is_linear=is_linear))


# They look for padding and for packed documents in the tokens: there is neither.
_READS_TOKENS = (
    (masking_utils, "find_packed_sequence_indices"),
    (PreTrainedModel, "warn_if_padding_and_no_attention_mask"),
)


class _DirectAttention(TorchFunctionMode):
    """Passes calls of torch's attention, which transformers' interface does not see, to add."""

    def __init__(self, add: Callable[..., Tensor]) -> None:
        super().__init__()
        self._add = add

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention and args[0].dim() == 4:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> Tensor:
        mask: Mask | None = getattr(attn_mask, "mask", None)
        if attn_mask is None:
            mask = is_causal, 0
        return self._add(query, key, value, mask)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    **_: Any,
) -> Tensor:
    """Return a mask without values that knows what it masks, as an attribute."""
    mask = torch.ones((batch_size, 1, q_length, kv_length), dtype=torch.bool, device="meta")
    mask.mask = _pattern(mask_function, local_size or 0, kv_length)  # type: ignore[attr-defined]
    return mask


def _pattern(function: Callable[..., Any], window: int, num_keys: int) -> Mask | None:
    """Return what a mask's function masks, by a few of its values; None: another pattern."""

    def sees(query: int, key: int) -> bool:
        return bool(function(*(torch.tensor(index) for index in (0, 0, query, key))))

    try:
        is_causal = not sees(0, 1)
        if not 0 < window < num_keys:
            return (is_causal, 0) if sees(num_keys - 1, 0) else None
        if is_causal and sees(window, 1) and not sees(window, 0):
            return True, window
        is_chunked = is_causal and not sees(window, window - 1)
    except (RuntimeError, TypeError, IndexError):  # it depends on tensors without values
        return None
    if is_chunked:
        raise ConfigError("attention", f"chunks of {window}", "causal, or a window of keys")
    return None
