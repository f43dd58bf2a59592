"""A user's own operator: load its function, learn its work, check its result."""

import dataclasses
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

from stepmark.cases.case import OpCase
from stepmark.cases.record import Check
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.measuring.ranks import Ranks
from stepmark.measuring.verify import (
    TORCH_DTYPE,
    UNIT_ROUNDOFF,
    Tolerance,
    compare,
    merge,
    poison,
    tensors_of,
    tolerance,
)
from stepmark.model.ops import Custom
from stepmark.model.ops.custom import digest_of
from stepmark.operators.bench.call import Call, Impl, set_matmul_precision
from stepmark.operators.custom_op import CustomOp
from stepmark.workloads.user_function import find_function, load_module, reported

_NO_HINTS: Mapping[str, str] = MappingProxyType({})
_CHUNK = 2**24  # elements of a result that are compared at a time
_ROUNDOFF_8_BITS = {TORCH_DTYPE[dtype]: UNIT_ROUNDOFF[dtype] for dtype in DType if dtype.is_fp8}


def completed(case: OpCase, op: Custom, ranks: Ranks) -> OpCase:
    """Return the case with its FLOPs, bytes and size of operands, which the function returns.

    Every rank calls it. Raises ConfigError on all of them together.
    """
    problem: ConfigError | None = None
    try:
        _check_unedited(op)
        op = _with_work(op, case.backend, ranks.device)
    except ConfigError as error:
        # Without memory the case fails alone, when it is measured.
        problem = None if isinstance(error.__cause__, torch.OutOfMemoryError) else error
    for other in ranks.gather(problem):
        if other is not None:
            raise other
    return dataclasses.replace(case, op=op)


def planned(case: OpCase, op: Custom) -> OpCase:
    """Return the case as `completed` does, by operands without data. Raises ConfigError."""
    return dataclasses.replace(case, op=_with_work(op, case.backend, torch.device("meta")))


def _with_work(op: Custom, backend: str, device: torch.device) -> Custom:
    built = _build(op, backend, device)
    storages = (tensor.untyped_storage() for tensor in _tensors(built.operands))
    sizes = {storage._cdata: storage.nbytes() for storage in storages}  # a view has its base's
    return dataclasses.replace(
        op,
        defaults=_defaults(op, backend),
        flops=built.flops,
        bytes_moved=built.bytes_moved,
        memory_bytes=sum(sizes.values()),
    )


def _defaults(op: Custom, backend: str) -> str:
    """Return the defaults of arguments that are not given, where they are plain values."""
    path = Path(op.file).resolve()
    function = find_function(_module(path), path, backend, 2, op.keywords)
    _, _, *others = inspect.signature(function).parameters.values()
    return " ".join(
        f"{each.name}={each.default}".replace(" ", "_")
        for each in others
        if each.name not in op.keywords and isinstance(each.default, str | int | float)
    )


def _check_unedited(op: Custom) -> None:
    """Refuse a file that was edited after the plan was made, e.g. before `resume`."""
    path = Path(op.file)
    digest = digest_of(path) if path.is_file() else None
    if digest != op.digest:
        allowed = f"the planned file, whose digest is {op.digest}: plan an edited one anew"
        raise ConfigError(op.file, digest, allowed)


def impl(backend: str) -> Impl:
    """Return the implementation whose operands and call a function makes. backend: its name."""
    return Impl(make=functools.partial(_make, backend))


def _make(backend: str, op: Custom, device: torch.device) -> Call:
    built = _build(op, backend, device)
    operands = tuple(built.operands)

    def run() -> object:
        return built.call(*operands)

    name = f"{Path(op.file).name}:{backend}"
    return Call(
        run=run,
        verify=lambda: _check(name, op, built),
        verify_again=lambda: _check_again(name, op, built, backend),
        backend_run=name,
    )


@functools.cache
def _module(path: Path) -> ModuleType:
    """Run the user's file once; its folder stays importable, for what a call imports."""
    sys.path.insert(0, str(path.parent))
    return load_module(path, path.name, _NO_HINTS)


def _build(op: Custom, backend: str, device: torch.device) -> CustomOp:
    """Call the function for one operand set. Raises ConfigError."""
    path = Path(op.file).resolve()
    function = find_function(_module(path), path, backend, 2, op.keywords)
    name = f"{path.name}:{backend}"
    set_matmul_precision(op.dtype)
    with reported(name, str(path), _NO_HINTS):
        try:
            built = function(device, TORCH_DTYPE[op.dtype], **op.keywords)
        except ConfigError as error:  # of CustomOp
            raise ConfigError(f"{name}: {error.field}", error.value, error.allowed) from None
    if not isinstance(built, CustomOp):
        allowed = "a function that returns a stepmark.CustomOp"
        raise ConfigError(name, type(built).__name__, allowed)
    if all(tensor.device != device for tensor in _tensors(built.operands)):
        allowed = f"a tuple with a tensor on {device}, the device that the function is given"
        raise ConfigError(f"{name}: operands", built.operands, allowed)
    return built


def _check(name: str, op: Custom, built: CustomOp) -> Check:
    """Compare a result with the reference, and the operands with what they were.

    A first result is poisoned, so that a call that writes nothing cannot return it. Where it
    lies in operands, and the call reads them, only a call on restored ones can be right. The
    reference gets copies.
    """
    operands = _tensors(built.operands)
    before = [tensor.detach().clone() for tensor in operands]
    expected = _results(name, "reference", built.reference(*map(_wide, built.operands)))
    remarks = ["reference is the call itself"] if built.call is built.reference else []
    returned = _poison_result(name, built, operands, before)
    results, check = _called(name, op, built, expected)
    reads_result = bool(returned and check.num_wrong)
    if reads_result:
        _restore(operands, before)
        results, check = _called(name, op, built, expected)
    changed = [
        n for n, pair in enumerate(zip(operands, before, strict=True)) if not _is_equal(*pair)
    ]
    stated = [n for n in changed if _storage(operands[n]) in returned]
    unstated = [n for n in changed if n not in stated]
    remarks += [f"call updates tensor {n + 1} of operands" for n in stated if reads_result]
    remarks += [f"call changes tensor {n + 1} of operands" for n in unstated]
    remarks += [f"result is {dtype}" for dtype in _other_dtypes(op, results)]
    remarks += filter(None, map(_not_finite, results))
    _restore(operands, before)
    num_wrong = check.num_wrong + sum(operands[n].numel() for n in unstated)
    return dataclasses.replace(check, num_wrong=num_wrong, remarks=tuple(remarks))


def _check_again(name: str, op: Custom, built: CustomOp, backend: str) -> Check:
    """Compare after the timed calls, with new values in the storage that was timed.

    A cached result is wrong then, and so is one that changes after some calls. A graph of
    autograd keeps the values that it saved. A reference that reads more than its operands
    has no result for new ones, so a new set is compared as it is.
    """
    operands = _tensors(built.operands)
    fresh = _build(op, backend, operands[0].device)
    values = _tensors(fresh.operands)
    is_alike = [tensor.shape for tensor in operands] == [value.shape for value in values]
    if not is_alike or any(tensor.requires_grad for tensor in operands):
        return _check(name, op, built)
    _restore(operands, values)
    check = _check(name, op, built)
    if check.num_wrong:
        both = (each.reference(*map(_wide, fresh.operands)) for each in (built, fresh))
        if not all(map(torch.allclose, *map(tensors_of, both))):
            return _check(name, op, fresh)
        check = dataclasses.replace(
            check, remarks=("wrong only after the samples", *check.remarks)
        )
    return check


def _called(
    name: str, op: Custom, built: CustomOp, expected: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], Check]:
    """Return what the call returns, and how it compares with the reference's."""
    results = _results(name, "call", built.call(*built.operands))
    if (shapes := _shapes(results)) != (allowed := _shapes(expected)):
        raise ConfigError(f"{name}: result of call", shapes, f"{allowed}, as the reference's")
    tensors = (*_tensors(built.operands), *results)
    longest = max(itertools.chain((1,), *(tensor.shape for tensor in tensors)))
    own = tolerance(op.dtype, length=longest, roundings=4)
    # A result in 8 bits has the rounding to them, too.
    stored = max(_ROUNDOFF_8_BITS.get(result.dtype, 0.0) for result in results)
    by_type = Tolerance(own.max_rel_err + stored, own.rms_err)
    limit = by_type if built.tolerance is None else Tolerance(built.tolerance)
    return results, merge(map(functools.partial(_compared, limit=limit), results, expected))


def _other_dtypes(op: Custom, results: Iterable[Tensor]) -> list[str]:
    """Return the types of results that are wider or narrower than the case's."""
    floats = {t.dtype for t in results if t.is_floating_point()} - {TORCH_DTYPE[op.dtype]}
    names = (str(dtype).removeprefix("torch.") for dtype in floats)
    return [] if op.dtype.is_narrow else sorted(names)


def _not_finite(result: Tensor) -> str:
    """Return where a result is first not finite; "" where all of it is finite."""
    is_bad = ~(result.float() if result.element_size() == 1 else result).isfinite()
    if not is_bad.any():
        return ""
    place = torch.unravel_index(is_bad.flatten().byte().argmax().cpu(), result.shape)
    index = tuple(map(int, place))
    return f"{float(result[index])} at index {','.join(map(str, index))}".replace("nan", "NaN")


def _poison_result(
    name: str, built: CustomOp, operands: Sequence[Tensor], before: Sequence[Tensor]
) -> set[int]:
    """Call once, restore operands, poison the result and free it for the next call.

    Returns storages that are operands' and the result's. Integers there may be indices.
    """
    results = _results(name, "call", built.call(*built.operands))
    _restore(operands, before)
    returned = {_storage(tensor) for tensor in operands} & set(map(_storage, results))
    for result in results:
        if result.is_floating_point() or _storage(result) not in returned:
            poison(result.data)
    return returned


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_equal(tensor: Tensor, value: Tensor) -> bool:
    """Return whether all bits are equal; NaN differs from itself as a number."""
    both = (each.detach().flatten().view(torch.uint8).split(_CHUNK) for each in (tensor, value))
    return all(map(torch.equal, *both))


def _compared(out: Tensor, ref: Tensor, limit: Tolerance) -> Check:
    """Compare all elements, some at a time, with the error scale of the whole result."""
    reference = f"{str(ref.dtype).removeprefix('torch.')}, all elements"
    parts = ref.detach().to(out.device).flatten().split(_CHUNK)
    squares = sum(float(part.double().square().sum()) for part in parts)
    scale = math.sqrt(squares / max(ref.numel(), 1))
    pairs = zip(out.detach().flatten().split(_CHUNK), parts, strict=True)
    return merge(compare(a, b, limit, reference, least_scale=scale) for a, b in pairs)


def _restore(operands: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Copy values into operands; their version stays, by which a call could notice."""
    for tensor, value in zip(operands, values, strict=True):
        if 0 not in tensor.stride():  # of an expanded one, which no call writes into
            tensor.data.copy_(value)


def _wide(operand: Any) -> Any:
    """Return a copy of an operand in fp64; integers and what is no tensor as they are."""
    if not isinstance(operand, Tensor):
        return operand
    copy = operand.detach().clone()
    if not copy.is_floating_point():
        return copy
    # fp8 has no direct conversion to fp64 everywhere.
    return (copy.float() if copy.element_size() == 1 else copy).double()


def _tensors(values: Iterable[object]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def _results(name: str, field: str, value: object) -> tuple[Tensor, ...]:
    """Return the tensors of a result. Raises ConfigError where there is none."""
    tensors = tensors_of(value)
    if not tensors:
        kind = value if value is None else type(value).__name__
        raise ConfigError(f"{name}: result of {field}", kind, "a tensor, or a tuple of tensors")
    return tensors


def _shapes(tensors: Iterable[Tensor]) -> str:
    return ", ".join("x".join(map(str, tensor.shape)) or "a number" for tensor in tensors)
