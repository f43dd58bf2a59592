"""Which ranks `stepmark train` starts, and how they are divided over a case's axes."""

import math

from stepmark.cli.options import Values, words
from stepmark.core.errors import ConfigError
from stepmark.core.parallel import ParallelConfig

STRATEGIES = ("single", "ddp", "fsdp", "tp", "pp", "cp")
_DATA = ("ddp", "fsdp")
_NAMED = ("tp", "pp", "cp")


def default_nproc(values: Values, device: str) -> str:
    """All accelerators but for `single`; on a CPU as few as show the strategy."""
    if values.get("nproc"):
        return str(values["nproc"])
    strategies = strategies_of(values)
    if strategies == ["single"]:
        return "1"
    if device == "cuda":
        return "all"
    return str(max(_fewest(values, strategy) for strategy in strategies))


def strategies_of(values: Values) -> list[str]:
    """Those of --strategy; "" where that is not given."""
    return words(values.get("strategy")) or [""]


def _fewest(values: Values, strategy: str) -> int:
    """Ranks with which each axis that is named has its degree, or 2."""
    named = {axis: max(1, values.get(axis) or 1) for axis in _NAMED}
    if strategy in named:
        named[strategy] = max(2, named[strategy])
    data_ranks = 1
    if strategy in _DATA:
        copies, ep = (max(1, values.get(axis) or 1) for axis in ("dp_replicate", "ep"))
        shards = max(2, ep) if strategy == "fsdp" else 1
        data_ranks = max(2, copies * shards)
    return data_ranks * math.prod(named.values())


def spread(values: Values, world_size: int) -> tuple[str, ParallelConfig]:
    """The strategy's word and how many ranks each axis has. Raises ConfigError."""
    given = {axis: _degree(values, axis) for axis in (*_NAMED, "ep", "dp_replicate")}
    named = {axis: given[axis] or 1 for axis in _NAMED}
    strategy = values.get("strategy") or _default_strategy(named, world_size)
    if strategy not in STRATEGIES:
        raise ConfigError("strategy", strategy, f"one of {', '.join(STRATEGIES)}")
    others = math.prod(size for axis, size in named.items() if axis != strategy)
    if world_size % others:
        raise ConfigError("nproc", world_size, f"a multiple of {_product(named)}")
    if strategy in named:
        degree = world_size // others
        if given[strategy] not in (None, degree):
            allowed = f"{degree}, which is what {world_size} ranks leave for it"
            raise ConfigError(strategy, given[strategy], allowed)
        named[strategy] = degree
    data_ranks = world_size // math.prod(named.values())
    _check_ranks(strategy, named, data_ranks, world_size)
    axes = _data_axes(strategy, data_ranks, named["cp"], given)
    # Weights are held whole and gradients reduced: what DDP does.
    word = "ddp" if strategy == "cp" else strategy
    return word, ParallelConfig(**named, **axes)


def _degree(values: Values, axis: str) -> int | None:
    value: int | None = values.get(axis)
    if value is not None and not 1 <= value <= 2**20:
        raise ConfigError(axis.replace("_", "-"), value, "a whole number from 1 to 1048576")
    return value


def _default_strategy(named: dict[str, int], world_size: int) -> str:
    if world_size == 1:
        return "single"
    if math.prod(named.values()) == world_size:
        if 1 < named["cp"] < world_size:
            return "fsdp"  # tp and pp alone reduce no gradients
        return next(axis for axis in ("pp", "tp", "cp") if named[axis] > 1)
    return "fsdp"


def _product(named: dict[str, int]) -> str:
    """Return e.g. "--tp (2)" or "--tp x --pp (2 x 4 = 8)"."""
    degrees = {axis: size for axis, size in named.items() if size > 1}
    sizes = " x ".join(map(str, degrees.values()))
    total = f" = {math.prod(degrees.values())}" if len(degrees) > 1 else ""
    return f"{' x '.join(f'--{axis}' for axis in degrees)} ({sizes}{total})"


def _check_ranks(
    strategy: str, named: dict[str, int], data_ranks: int, world_size: int
) -> None:
    if strategy == "single" and world_size > 1:
        raise ConfigError("nproc", world_size, "1 with --strategy single")
    if strategy in named and named[strategy] == 1:
        allowed = f"one that divides {world_size} ranks: {strategy} has 1 of them"
        raise ConfigError("strategy", strategy, allowed)
    if strategy in _DATA and data_ranks * named["cp"] == 1:
        axes = f" next to {_product(named)}" if max(named.values()) > 1 else ""
        allowed = f"it needs at least 2 data ranks{axes}, and has 1"
        raise ConfigError("strategy", strategy, allowed)


def _data_axes(
    strategy: str, data_ranks: int, cp: int, given: dict[str, int | None]
) -> dict[str, int]:
    copies, ep = given["dp_replicate"], given["ep"] or 1
    if strategy != "fsdp":
        if copies not in (None, data_ranks):
            raise ConfigError("dp-replicate", copies, f"{data_ranks} with {strategy}")
        if ep > 1:
            raise ConfigError("ep", ep, "1, or --strategy fsdp, whose ranks it lies in")
        return {"dp_replicate": data_ranks}
    copies = copies or 1
    if data_ranks % copies or copies == data_ranks * cp:
        allowed = f"a divisor of {data_ranks} data ranks that leaves 2 or more to shard over"
        raise ConfigError("dp-replicate", copies, allowed)
    shards = data_ranks // copies
    if shards * cp % ep:
        raise ConfigError("ep", ep, f"a divisor of {shards * cp} FSDP ranks")
    return {"dp_replicate": copies, "dp_shard": shards, "ep": ep}
