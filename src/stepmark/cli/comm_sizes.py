"""Which sizes a collective is measured at: a sweep, or the messages of a model."""

import math

from stepmark.app.models import read_models
from stepmark.cli.options import Values, whole_numbers, words
from stepmark.core.case import Label
from stepmark.core.collectives import sizes
from stepmark.core.comm_case import CommCase
from stepmark.core.errors import ConfigError
from stepmark.core.units import GIB, KIB, MIB, format_bytes, parse_bytes

Sized = tuple[Label | None, int]
_SWEEP = ("begin", "end", "step", "factor")


def sizes_of(case: CommCase, values: Values) -> list[Sized]:
    """Bytes, and what they stand for where a model gave them. Raises ConfigError."""
    if not values.get("model"):
        for name in ("message", "seq_len"):
            if values.get(name) is not None:
                raise ConfigError(name.replace("_", "-"), values[name], "a --model beside it")
        return [(None, size) for size in sweep(values, case.device)]
    if given := [name for name in _SWEEP if values.get(name) is not None]:
        raise ConfigError(
            given[0], values[given[0]], "it cannot be combined with --model, which has sizes"
        )
    return _messages(case, values)


def sweep(values: Values, device: str) -> list[int]:
    """-b to -e by -f or -i."""
    lowest, highest = (KIB, GIB) if device == "cuda" else (KIB, 4 * MIB)
    begin, end = values.get("begin"), values.get("end")
    first = parse_bytes(begin, "begin") if begin else None
    last = parse_bytes(end, "end") if end else None
    low = first if first is not None else min(lowest, last or lowest)
    high = last if last is not None else max(highest, low)
    if low > high:
        raise ConfigError("begin", begin, f"at most the end, {format_bytes(high)}")
    if low == 0:
        raise ConfigError("begin", begin, "at least 1 byte")
    step = parse_bytes(values["step"], "step") if values.get("step") else 0
    factor = values.get("factor")
    if factor is not None and not math.isfinite(factor):
        raise ConfigError("factor", factor, "a number above 1, such as 2")
    if values.get("step") and not step and not factor:
        raise ConfigError("step", values["step"], "at least 1 byte")
    if not step and not factor:
        factor = 4.0
    return sizes(low, high, factor=float(factor or 0.0), step=step)


def _messages(case: CommCase, values: Values) -> list[Sized]:
    """--model: what training it sends by this collective, per micro-batch."""
    from stepmark.workload.messages import ROLES, messages  # noqa: PLC0415

    wanted = words(values.get("message"))
    for role in wanted:
        if role not in ROLES:
            raise ConfigError("message", role, f"one of {', '.join(ROLES)}")
    found: list[Sized] = []
    for model in read_models(values.get("model"), values.get("scale")):
        seq_len = values.get("seq_len") or model.seq_len
        if not 1 <= seq_len <= 2**30:
            raise ConfigError("seq-len", seq_len, "from 1 to 1073741824")
        for mbs in whole_numbers(values.get("mbs") or "1", "mbs"):
            sent = messages(
                model,
                case.collective,
                mbs=mbs,
                seq_len=seq_len,
                itemsize=case.dtype.itemsize,
                num_ranks=case.num_ranks,
            )
            for role, num_bytes in sent.items():
                if not wanted or role in wanted:
                    depends = "layer" not in role
                    label = Label(model=model.name, role=role, mbs=mbs if depends else None)
                    found.append((label, num_bytes))
    if not found:
        allowed = f"a message that {case.collective} carries in this model"
        raise ConfigError("message", values.get("message"), allowed)
    return list(dict.fromkeys(found))
