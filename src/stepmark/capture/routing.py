"""Routing of tokens to experts, whose choices depend on values: an even share, or as given.

Indices that topk and the like return for unknown scores, and random integers, as many as their
range has or more, have values that spread evenly over it. Counts, permutations and splits are
computed from these.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from stepmark.capture.messages import redop
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective, RedOp

_IDEMPOTENT = (RedOp.AVG, RedOp.MIN, RedOp.MAX)
FLAG = "tokens-per-expert"


@dataclass(frozen=True, slots=True)
class Assumption:
    """What a value depends on. refusal: why it must not be used."""

    text: str
    is_check: bool = False  # that numbers are finite, or that all() is true: no size of it
    refusal: str = ""


class Router:
    """Chooses experts: evenly, or tokens_per_expert of them in each routing of a rank."""

    def __init__(self, tokens_per_expert: Sequence[int] = ()) -> None:
        self._counts = tuple(tokens_per_expert)
        self.used: dict[str, None] = {}  # texts of assumptions that sizes depend on
        self._applied = False

    def indices(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        place: Callable[[], str],
    ) -> tuple[Tensor, Tensor, Assumption] | None:
        """Return the tensor of indices in a result, its values, and what they assume."""
        drawn = _drawn(name, args, result)
        if drawn is not None:
            values, text = drawn
            return result, values, Assumption(f"random integers at {place()} are {text}")
        chosen = _chosen(name, args, kwargs, result)
        if chosen is None:
            return None
        indices, size, dim = chosen
        slots = indices.numel()
        share = slots / size
        text = f"{slots} choices at {place()} are an even share of {share:g} for each of {size}"
        if not self._counts:
            return indices, _even(indices, size, dim), Assumption(text)
        counts = self._counts * size if len(self._counts) == 1 else self._counts
        if (len(counts), sum(counts)) == (size, slots):
            given = ", ".join(map(str, counts[:8])) + (", ..." if size > 8 else "")
            text = f"{slots} choices at {place()} are {given} by --{FLAG}"
            return indices, _by_counts(indices, counts, dim), Assumption(text)
        refusal = (
            f"{size} numbers that sum to {slots}, the tokens that a rank routes at {place()}"
        )
        return indices, _even(indices, size, dim), Assumption(text, refusal=refusal)

    def use(self, assumptions: Sequence[Assumption] | frozenset[Assumption]) -> None:
        """Record that sizes or numbers of Python depend on these."""
        for assumption in assumptions:
            if assumption.refusal:
                given = ",".join(map(str, self._counts))
                raise ConfigError(FLAG, given, assumption.refusal)
            self._applied |= FLAG in assumption.text
            self.used[assumption.text] = None

    def check(self) -> None:
        """Raise ConfigError if the counts that are given change nothing."""
        if self._counts and not self._applied:
            allowed = "left out: no size depends on the routing of tokens"
            raise ConfigError(FLAG, ",".join(map(str, self._counts)), allowed)


def _drawn(name: str, args: Sequence[Any], result: Any) -> tuple[Tensor, str] | None:
    """Return the values of random integers, and what they are."""
    if name == "randperm":
        return _even(result, max(1, result.numel())), "in order"
    if name not in ("randint", "random_", "randint_like") or result.is_floating_point():
        return None
    bounds = [value for value in args if isinstance(value, int)]
    if not bounds:  # as the seed of a sampler
        return _even(result, 1), "0, as they have no bounds"
    low, high = (0, *bounds)[-2:]
    if not low < high <= low + result.numel():
        return None  # fewer than the range has numbers: not spread over it
    return _even(result, high - low, low=low), f"evenly spread from {low} to {high - 1}"


def _chosen(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> tuple[Tensor, int, int] | None:
    """Return the indices that an operator chooses, the size of their range, and the dim."""
    if name == "topk":
        indices = result[1]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    elif name in ("max", "min") and isinstance(result, tuple | list) and len(result) == 2:
        indices = result[1]
        dim = args[1]
    elif name in ("argmax", "argmin"):
        indices = result
        dim = args[1] if len(args) > 1 else None
    elif name == "multinomial":
        indices = result
        dim = -1
    else:
        return None
    scores = args[0]
    if dim is None or not scores.dim() or not scores.is_floating_point():
        return None
    size = int(scores.size(dim))
    is_routing = indices.numel() >= (1 if name == "topk" else size)
    return (indices, size, int(dim)) if is_routing else None


def _even(tensor: Tensor, size: int, dim: int = -1, *, low: int = 0) -> Tensor:
    """Return low, ..., low + size - 1, low, ... in a tensor's shape, fastest along dim."""
    with _disable_current_modes():
        return _along(low + torch.arange(tensor.numel()) % size, tensor, dim)


def _by_counts(tensor: Tensor, counts: Sequence[int], dim: int) -> Tensor:
    """Return as many of each expert as given; those of one token differ if they can."""
    with _disable_current_modes():
        experts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        choices = tensor.size(dim) if tensor.numel() > 1 and tensor.dim() else 1
        return _along(experts.view(choices, -1).T.reshape(-1), tensor, dim)


def _along(values: Tensor, tensor: Tensor, dim: int) -> Tensor:
    if tensor.dim() < 2:
        return values.reshape(tensor.shape)
    shape = [*tensor.shape]
    width = shape.pop(dim)
    return values.reshape([*shape, width]).movedim(-1, dim)


def from_peers(
    name: str,
    values: Sequence[Any],
    own: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    group: Any,
) -> list[Tensor] | None:
    """Return what a rank receives if all send what this rank sends; None if that is unknown."""
    num_ranks = group.size()
    rank = group.rank()
    gathered = None
    if "all_gather" in name or name.startswith(("allgather", "_allgather")):
        gathered = torch.cat([tensor.reshape(-1) for tensor in own] * num_ranks)
    elif name in ("alltoall_base_", "all_to_all_single"):
        splits = [list(value) for value in values if isinstance(value, list | tuple)]
        inputs = splits[1] if len(splits) > 1 and splits[1] else None
        parts = own[0].split(inputs) if inputs else own[0].chunk(num_ranks)
        gathered = torch.cat([parts[rank].reshape(-1)] * num_ranks)
    elif name == "alltoall_":
        gathered = torch.cat([own[rank].reshape(-1)] * num_ranks)
    elif name.startswith(("allreduce_", "all_reduce")):
        if redop(Collective.ALL_REDUCE, values) is RedOp.SUM:
            return [tensor * num_ranks for tensor in own]
        return list(own) if redop(Collective.ALL_REDUCE, values) in _IDEMPOTENT else None
    elif name.startswith("broadcast"):
        return list(own)
    sizes = [math.prod(shape) for shape in shapes]
    if gathered is None or sum(sizes) != gathered.numel():
        return None
    parts = gathered.split(sizes)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
