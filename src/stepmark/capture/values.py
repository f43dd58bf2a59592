"""Real values of small fake tensors that follow from constants or from routing.

What is made of constants (position ids, meshes, masks, counts) is computed for real beside the
fake tensors. Contents belong to a fake tensor's storage, so views and updates in place share
them. Results of random numbers, weights, inputs and other ranks are unknown, with these
exceptions, which `Assumption`s tell: indices of topk, argmax and the like, and random integers,
are evenly spread; ranks route alike; numbers are finite, all() is true and any() false.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from stepmark.capture.operand_errors import DtypeErrors, check_buffers
from stepmark.capture.routing import Assumption, Router, from_peers
from stepmark.capture.unknown import ReadPolicy, TensorReads
from stepmark.training.messages import BATCH_P2P, NAMESPACES, group_of, tensors

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_DEPENDS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_UNWRITTEN = ("empty", "new_empty")
_OVERWRITES = frozenset({"copy_", "fill_", "zero_"})
_FINITE = {"isnan": False, "isinf": False}
_SCALED = "_amp_foreach_non_finite_check_and_unscale_"
_GROUPED = "_grouped_mm"  # torch's rule for fake tensors has bf16 only, its kernel others
_ITEM = "_local_scalar_dense"
_CHECKED = frozenset({Assumption("", is_check=True)})
Arguments = Mapping[str, Any]
_MAX_ELEMENTS = 2**22  # of integers; larger tensors have no values
_MAX_FLOATS = 2**12
_NAME = "_stepmark_contents"  # an attribute of a fake storage


class Values:
    """Runs operators on fake tensors, and on their contents where these are known.

    are_alike: whether all ranks send what this rank sends in the collective that is running.
    """

    def __init__(
        self, policy: ReadPolicy, router: Router, are_alike: Callable[[], bool]
    ) -> None:
        self.reads = TensorReads(policy)
        self._are_alike = are_alike
        self._policy = policy
        self._router = router
        self._votes = False
        self._dtypes = DtypeErrors()

    def voting(self, *_: Any) -> AbstractContextManager[Any]:
        """Let stages of a pipeline, which vote on whether all know their shapes, receive a yes.

        A stage that does not know its shapes multiplies it by its no.
        """
        return mock.patch.object(self, "_votes", True)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operator of fake tensors."""
        if vars(torch._C)["_get_dispatch_mode"](_FAKE) is None:
            return func(*args, **kwargs)  # as a mesh does
        operator = _operator(func)
        if operator.sends:
            return self._exchange(operator.name, func, args, kwargs)
        if operator.name == _ITEM:
            return self._read(args[0])
        known = self._known(operator, args, kwargs)
        if operator.name in ("equal", "allclose") and (
            known is None or self._is_checked(known)
        ):
            return self._policy.branch(True)
        if operator.depends:
            # What is merely checked does not give a size.
            if known is not None and not self._is_checked(known):
                self._router.use(known)
                return self._made(self._run_for_real(func, args, kwargs), known)
            known = None
            if operator.name == "index":
                args = (args[0], [at for mask in args[1] for at in self._positions(mask)])
        self._dtypes.check(func, args, kwargs)
        product = operator.name == _GROUPED and args[0].dtype is not torch.bfloat16
        result = _grouped(*args, **kwargs) if product else func(*args, **kwargs)
        if known is None or not self._follow(operator, func, args, kwargs, result, known):
            self._forget(operator, args, kwargs)
            self._assume(operator.name, args, kwargs, result)
        return result

    def value(self, tensor: Tensor) -> Tensor:
        """Return a tensor's real value. Refuses where it is unknown."""
        with _disable_current_modes():
            value: Tensor | None = value_of(tensor)
        if value is None or self._is_checked(assumptions_of(tensor)):
            self._policy.refuse("becomes a list of ranks")
        self._router.use(assumptions_of(tensor))
        return value

    def _known(
        self, operator: "_Operator", args: Sequence[Any], kwargs: Arguments
    ) -> frozenset[Assumption] | None:
        """Return what the operands' values assume; None if one is unknown."""
        if operator.is_random and kwargs.get("generator") is None:
            return None  # a generator has a state, which is real
        assumptions: frozenset[Assumption] = frozenset()
        for position, tensor in operator.operands(args, kwargs):
            if position in operator.overwritten and contents_of(tensor) is None:
                prepare(tensor)
            if not has_value(tensor):
                return None
            assumptions |= assumptions_of(tensor)
        if any(isinstance(value, float) and math.isnan(value) for value in args):
            return None  # an UnknownFloat
        return assumptions

    def _run_for_real(self, func: Any, args: Sequence[Any], kwargs: Arguments) -> Any:
        with _disable_current_modes():
            kwargs = {**kwargs, "pin_memory": False} if "pin_memory" in kwargs else kwargs
            return func(*real_of(tuple(args)), **real_of(dict(kwargs)))

    def _follow(
        self,
        operator: "_Operator",
        func: Any,
        args: Sequence[Any],
        kwargs: Arguments,
        result: Any,
        assumptions: frozenset[Assumption],
    ) -> bool:
        """Compute contents of the results; return whether they are known."""
        results = list(tensors(result))
        if not results or not all(is_small(tensor) for tensor in results):
            return False
        try:
            reals = list(tensors(self._run_for_real(func, args, kwargs)))
            if operator.name.startswith(_UNWRITTEN):
                with _disable_current_modes():  # the same in every capture
                    reals = [real.zero_() for real in reals]
        except (RuntimeError, IndexError, NotImplementedError):
            return False  # as an operator without a kernel for this device
        for tensor, real in zip(results, reals, strict=True):
            contents = contents_of(tensor)
            if contents is None:
                store(tensor, real, assumptions)
            elif assumptions:
                contents.assumptions |= assumptions
        return True

    def _forget(self, operator: "_Operator", args: Sequence[Any], kwargs: Arguments) -> None:
        for tensor in operator.mutated(args, kwargs):
            contents = contents_of(tensor)
            if contents is not None and operator.name == _SCALED and tensor.numel() == 1:
                contents.assumptions |= _CHECKED  # found_inf stays as it is
            elif contents is not None:
                forget(tensor)
            elif type(tensor) is Tensor and tensor.numel():
                self._policy.refuse("is written to a tensor that was made outside of the job")

    def _assume(self, name: str, args: Sequence[Any], kwargs: Arguments, result: Any) -> None:
        """Store what is assumed of a result that is unknown."""
        value = _checked(name, args)
        if value is not None and is_small(result):
            with _disable_current_modes():
                real = torch.full(result.shape, value, dtype=result.dtype)
            store(result, real, _CHECKED)
            return
        indices = self._router.indices(name, args, kwargs, result, self._policy.place)
        if indices is not None:
            tensor, real, assumption = indices
            if is_small(tensor):
                store(tensor, real, frozenset({assumption}))

    def _read(self, tensor: Tensor) -> Any:
        assumptions = assumptions_of(tensor)
        with _disable_current_modes():
            real = value_of(tensor)
            value = None if real is None else real.item()
        if value is None:
            return self.reads.read(tensor.dtype)
        if self._is_checked(assumptions):
            return self.reads.read(tensor.dtype, bool(value))
        self._router.use(assumptions)
        return value

    def _is_checked(self, assumptions: Iterable[Assumption]) -> bool:
        return any(assumption.is_check for assumption in assumptions)

    def _positions(self, mask: Any) -> Sequence[Any]:
        """Return the indices of a mask's elements that are true, if known."""
        is_mask = isinstance(mask, Tensor) and mask.dtype in (torch.bool, torch.uint8)
        assumptions = assumptions_of(mask) if is_mask else frozenset()
        if not is_mask or not has_value(mask) or self._is_checked(assumptions):
            return [mask]
        self._router.use(assumptions)
        with _disable_current_modes():
            positions = value_of(mask).nonzero().unbind(1)
        return [self._made(position, assumptions) for position in positions]

    def _made(self, real: Any, assumptions: frozenset[Assumption]) -> Any:
        """Return fake tensors with the shapes and contents of real ones."""
        if isinstance(real, Tensor):
            tensor = torch.empty(real.shape, dtype=real.dtype)
            store(tensor, real, assumptions)
            return tensor
        if isinstance(real, list | tuple):
            return type(real)(self._made(one, assumptions) for one in real)
        return real

    def _exchange(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run communication. What peers send is as this rank's if it stems from routing."""
        group = next(filter(None, map(group_of, (*args, *kwargs.values()))), None)
        in_place = func.namespace == "c10d"
        if in_place and group is not None:
            check_buffers(name, args, group.size())
        result = func(*args, **kwargs)
        if name in ("send", "isend", "barrier"):
            return result
        outputs = list(tensors(args[0] if in_place else result))
        if name == BATCH_P2P:
            outputs = list(tensors(args[3]))
        inputs = list(tensors(args[1])) if in_place and len(args) > 1 else []
        inputs = inputs or list(tensors(args[0]))
        assumptions = frozenset().union(*map(assumptions_of, inputs))
        reals: Sequence[Tensor] | None = None
        if self._votes and name == "recv_":
            with _disable_current_modes():
                reals = [torch.ones(tensor.shape, dtype=tensor.dtype) for tensor in outputs]
        elif inputs and all(map(has_value, inputs)):
            if name == "wait_tensor":
                with _disable_current_modes():
                    reals = [value_of(inputs[0]).clone()]
            elif group is not None and (
                group.size() == 1
                or (assumptions and not self._is_checked(assumptions))
                or self._are_alike()
            ):
                with _disable_current_modes():
                    own = [value_of(tensor) for tensor in inputs]
                    shapes = [tensor.shape for tensor in outputs]
                    reals = from_peers(name, (*args, *kwargs.values()), own, shapes, group)
        for at, tensor in enumerate(outputs):
            if reals is not None:
                self._write(tensor, reals[at], assumptions)
            elif contents_of(tensor) is not None and name != "wait_tensor":
                forget(tensor)
        return result

    def _write(self, tensor: Tensor, real: Tensor, assumptions: frozenset[Assumption]) -> None:
        contents = contents_of(tensor)
        if contents is None:
            store(tensor, real, assumptions)
            return
        with _disable_current_modes():
            target = value_of(tensor)
            assert target is not None
            target.copy_(real.reshape(target.shape))
        contents.assumptions |= assumptions


@dataclass(frozen=True, slots=True)
class _Operator:
    """What an operator's schema says."""

    name: str
    sends: bool
    is_random: bool
    depends: bool  # whether its result, or the shape of it, depends on values
    names: tuple[str, ...]
    written: frozenset[str]
    overwritten: frozenset[str]  # without being read

    def operands(self, args: Sequence[Any], kwargs: Arguments) -> Iterator[tuple[str, Tensor]]:
        for name, value in (*zip(self.names, args, strict=False), *kwargs.items()):
            for tensor in tensors(value):
                yield name, tensor

    def mutated(self, args: Sequence[Any], kwargs: Arguments) -> Iterator[Tensor]:
        for name, tensor in self.operands(args, kwargs) if self.written else ():
            if name in self.written:
                yield tensor


@functools.cache
def _operator(func: Any) -> _Operator:
    schema = func._schema
    name = schema.name.partition("::")[2]
    written = [
        a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    return _Operator(
        name=name,
        sends=func.namespace in NAMESPACES,
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        depends=bool(_DEPENDS & set(func.tags)),
        names=tuple(argument.name for argument in schema.arguments),
        written=frozenset(argument.name for argument in written),
        overwritten=frozenset(
            argument.name for argument in written if argument.kwarg_only or name in _OVERWRITES
        ),
    )


def _checked(name: str, args: Sequence[Any]) -> bool | None:
    """Return what an operator on unknown numbers gives if these are finite and valid."""
    if name in ("all", "any"):
        return name == "all"
    if name in ("eq", "ne"):
        if args[0] is args[1]:
            return name == "eq"
        if isinstance(args[1], float) and math.isinf(args[1]):
            return name == "ne"
    return _FINITE.get(name)


def _grouped(a: Tensor, b: Tensor, offs: Any = None, *_: Any, **__: Any) -> Tensor:
    """Return an empty result of a grouped product. offs: ends of the groups."""
    if a.dim() == 3 and b.dim() == 3:
        shape = [a.size(0), a.size(1), b.size(2)]
    elif a.dim() == b.dim() == 2:
        shape = [offs.size(0), a.size(0), b.size(1)]
    else:
        shape = [a.size(-2), b.size(-1)]
    return a.new_empty(shape)


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
        contents = contents_of(tensor)
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
    offset = tensor.storage_offset()
    size = tensor.size()
    stride = tensor.stride()
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
    limit = _MAX_FLOATS if tensor.is_floating_point() else _MAX_ELEMENTS
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
