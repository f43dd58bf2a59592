"""Real values of fake tensors, kept by their storages, so that views share them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from stepmark.capture.routing import Assumption

MAX_ELEMENTS = 2**22  # of integers; larger tensors have no values
_MAX_FLOATS = 2**12
_NAME = "_stepmark_contents"  # an attribute of a fake storage


@dataclass(slots=True)
class Contents:
    storage: torch.UntypedStorage
    assumptions: frozenset[Assumption] = frozenset()


def contents_of(tensor: Tensor) -> Contents | None:
    if not isinstance(tensor, FakeTensor):
        return None
    contents: Contents | None = getattr(tensor.untyped_storage(), _NAME, None)
    return contents


def assumptions_of(tensor: Any) -> frozenset[Assumption]:
    contents = contents_of(tensor)
    return contents.assumptions if contents is not None else frozenset()


def has_value(tensor: Tensor) -> bool:
    """Return whether a tensor is real or has contents, and is small."""
    if isinstance(tensor, FakeTensor):
        contents = getattr(tensor.untyped_storage(), _NAME, None)
        if contents is None:
            return False
        fits: bool = tensor.untyped_storage().nbytes() <= contents.storage.nbytes()
        return fits and is_small(tensor)
    return type(tensor) is Tensor and tensor.device.type == "cpu" and is_small(tensor)


def value_of(tensor: Any) -> Any:
    """Return a real tensor of a fake one's contents, None without; others as they are."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    contents = contents_of(tensor)
    if contents is None or not has_value(tensor):
        return None
    real = torch.empty(0, dtype=tensor.dtype)
    offset, size, stride = tensor.storage_offset(), tensor.size(), tensor.stride()
    return real.set_(contents.storage, offset, size, stride)


def real_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value_of(value)
    if isinstance(value, list | tuple):
        return type(value)(real_of(item) for item in value)
    if isinstance(value, dict):
        return {key: real_of(item) for key, item in value.items()}
    return value


def is_small(tensor: Tensor) -> bool:
    limit = _MAX_FLOATS if tensor.is_floating_point() else MAX_ELEMENTS
    return tensor.numel() <= limit and tensor.layout is torch.strided


def is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor covers its storage."""
    return (
        isinstance(tensor, FakeTensor)
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )


def forget(tensor: Tensor) -> None:
    """Make the values of a tensor and its views unknown."""
    if isinstance(tensor, FakeTensor):
        setattr(tensor.untyped_storage(), _NAME, None)


def prepare(tensor: Tensor) -> None:
    """Give a tensor that is about to be overwritten as a whole contents."""
    if is_small(tensor) and is_whole(tensor):
        with _disable_current_modes():
            storage = torch.UntypedStorage(tensor.untyped_storage().nbytes())
        setattr(tensor.untyped_storage(), _NAME, Contents(storage))


def store(tensor: Tensor, real: Tensor, assumptions: frozenset[Assumption]) -> None:
    """Set the contents of a fake tensor's storage, of which a real one has as much."""
    if not isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
        return
    assert not isinstance(real, FakeTensor)
    with _disable_current_modes():
        if real.is_floating_point() and bool(real.isnan().any()):
            return  # made of an UnknownFloat
        if is_whole(tensor):
            copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
            storage = copy.copy_(real.reshape(copy.shape)).untyped_storage()
        elif tensor.untyped_storage().nbytes() == real.untyped_storage().nbytes():
            storage = real.untyped_storage().clone()  # a view of a tensor that is real
        else:
            return
    setattr(tensor.untyped_storage(), _NAME, Contents(storage, assumptions))
