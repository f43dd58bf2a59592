"""The flags of `stepmark comm`, one function each: what they say, or a ConfigError."""

import dataclasses
import math
from pathlib import Path
from typing import Any, TypeVar

from stepmark.cli.options import Values, words
from stepmark.core.collectives import (
    Api,
    Collective,
    Matrix,
    Mode,
    RedOp,
    groups,
    parse_split,
    placements,
)
from stepmark.core.comm_case import CommCase
from stepmark.core.dtypes import MESSAGE_DTYPES, DType, parse_dtype
from stepmark.core.errors import ConfigError
from stepmark.core.ops.shorthand import from_shorthand
from stepmark.core.units import parse_duration

E = TypeVar("E", Api, Mode)

MATRIX_OF_PAIRS = "p2p_matrix"
_ALIASES = {
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all_v",
    "all_to_allv": "all_to_all_v",
    "all_to_all_single": "all_to_all",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather_base": "all_gather",
    "reducescatter": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "send_recv": "sendrecv",
    "pingpong": "ping_pong",
}
# What no other collective heeds. nccl-tests' own flags, as -r and -o, may be given to any.
_ONLY_OF: dict[str, tuple[str, ...]] = {
    "pair": (Collective.P2P, Collective.P2P_BOTH, Collective.PING_PONG),
    "bidirectional": (Collective.P2P, Collective.P2P_BOTH, MATRIX_OF_PAIRS),
    "spread": (Collective.ALL_TO_ALL_V,),
    "matrix": (Collective.ALL_TO_ALL_V,),
}
_MOST_SKEW_S = 1.0


def collective_name(text: str) -> str:
    """Ours of nccl-tests', PARAM's and torch's spellings."""
    name = text.strip().lower().replace("-", "_").removesuffix("_perf")
    name = _ALIASES.get(name, name)
    if name not in set(Collective) and name != MATRIX_OF_PAIRS:
        known = ", ".join((*Collective, "p2p-matrix"))
        raise ConfigError("collective", text, f"one of {known}")
    return name


def check_meant_for(names: list[str], values: Values) -> None:
    """A flag that none of these collectives heeds would be silently ignored."""
    for flag, collectives in _ONLY_OF.items():
        if values.get(flag) and not set(names) & set(collectives):
            shown = "given" if values[flag] is True else values[flag]
            raise ConfigError(_flag(flag), shown, f"only with {', '.join(collectives)}")


def listed(values: Values, name: str) -> list[str]:
    """The words of a list flag; none where it was not given."""
    found = words(values.get(name))
    if values.get(name) is not None and not found:
        raise ConfigError(_flag(name), values[name], "at least one word")
    return found


def ranks(values: Values, world_size: int) -> list[int]:
    """--ranks: sizes of communicators over the first ranks of the world."""
    asked = listed(values, "ranks")
    if asked and values.get("group_split"):
        raise ConfigError("ranks", values["ranks"], "it cannot be combined with --group-split")
    for word in asked:
        if not word.isdecimal() or not 2 <= int(word) <= world_size:
            allowed = f"from 2 to {world_size}" if world_size > 2 else "2, as there are no more"
            raise ConfigError("ranks", word, allowed)
    return [int(word) for word in asked] or [world_size]


def split(values: Values, n: int, world_size: int) -> tuple[str, int]:
    """--group-split, and how many ranks each communicator then has; else n."""
    asked = (values.get("group_split") or "").strip().lower()
    if not asked:
        return "", n
    sides = {len(one) for one in groups(world_size, asked)}
    if len(sides) > 1 or sides == {1}:
        allowed = f"groups of {world_size} ranks that are of equal size, 2 ranks or more"
        raise ConfigError("group-split", asked, allowed)
    return " ".join(map(str, parse_split(asked))), sides.pop()


def mode(values: Values, device: str) -> tuple[Mode, bool]:
    """--mode, or -z and -G as nccl-tests has them; and whether ranks start calls together."""
    blocking, graph = (values.get(name) or 0 for name in ("blocking", "cudagraph"))
    if blocking not in (0, 1, 2, 3):
        raise ConfigError("-z", blocking, "0, 1, 2 or 3")
    if graph < 0:
        raise ConfigError("-G", graph, "from 0")
    asked = [f"-z {blocking}"] if blocking else []
    asked += [f"-G {graph}"] if graph else []
    asked += [f"--mode {values['mode']}"] if values.get("mode") else []
    if len(asked) > 1:
        raise ConfigError("mode", " ".join(asked), "one of --mode, -z and -G")
    found = _member(Mode, values.get("mode") or "queued", "mode")
    if blocking:
        found = Mode.BLOCKING
    if graph:
        found = Mode.GRAPH
    if found is Mode.GRAPH and device != "cuda":
        flag, value = ("-G", graph) if graph else ("mode", "graph")
        raise ConfigError(flag, value, "queued or blocking calls on a CPU, which has no graphs")
    free = blocking == 2 or (values.get("no_align") and found is Mode.BLOCKING)
    return found, not free


def api(values: Values, device: str) -> Api:
    found = _member(Api, values.get("api") or "torch", "api")
    if found is Api.NCCL and device != "cuda":
        raise ConfigError("api", found, "it needs a GPU; on a CPU use --api torch")
    return found


def backend(values: Values, device: str) -> str:
    """Of torch.distributed: nccl or gloo."""
    known = ("nccl", "gloo") if device == "cuda" else ("gloo",)
    found = (values.get("backend") or known[0]).lower()
    if found not in known:
        raise ConfigError("backend", found, f"{' or '.join(known)} with --device {device}")
    return str(found)


def skew_s(values: Values) -> float:
    text = values.get("skew")
    found = parse_duration(text, "skew") if text else 0.0
    if found > _MOST_SKEW_S:
        raise ConfigError("skew", text, f"at most {_MOST_SKEW_S:g}s")
    return found


def spread(values: Values) -> float:
    text = values.get("spread")
    try:
        found = 1.0 if text is None else float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found <= 1:
        raise ConfigError("spread", text, "from 0 (even) to 1 (by distance)")
    return found


def with_matrix(case: CommCase, file: str) -> CommCase:
    """The first ranks of nccl-tests' matrix file: bytes from row to column, 16-byte parts."""
    n, itemsize = case.num_ranks, case.dtype.itemsize
    try:
        lines = Path(file).read_text(encoding="utf-8").split("\n")
        table = [[float(word) for word in line.split()] for line in lines if line.split()]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError("matrix", file, f"a file of numbers ({reason})") from None
    if len({len(row) for row in table} | {len(table)}) != 1 or len(table) < n:
        raise ConfigError("matrix", file, f"a square of numbers, {n} rows or more")
    if not all(0 <= value <= 2**50 for row in table for value in row):
        raise ConfigError("matrix", file, "bytes from 0 to 2^50")
    matrix: Matrix = tuple(
        tuple(int(value) // 16 * 16 // itemsize for value in row[:n]) for row in table[:n]
    )
    made = dataclasses.replace(case, matrix=matrix, matrix_file=str(file))
    if not made.message_bytes:
        raise ConfigError("matrix", file, "at least one part of 16 bytes")
    return made


def pair(values: Values, world_size: int) -> tuple[int, int]:
    asked = words(values.get("pair") or "0,1")
    if len(asked) != 2 or not all(w.isdecimal() and int(w) < world_size for w in asked):
        raise ConfigError("pair", values.get("pair"), f"two ranks under {world_size}: 0,1")
    if int(asked[0]) == int(asked[1]):
        raise ConfigError("pair", values.get("pair"), "two different ranks")
    return int(asked[0]), int(asked[1])


def dtypes(values: Values) -> list[DType]:
    """-d; fp32 as nccl-tests."""
    asked = listed(values, "dtype") or ["fp32"]
    if asked == ["all"]:
        return list(MESSAGE_DTYPES)
    return [parse_dtype(word, "dtype", MESSAGE_DTYPES) for word in asked]


def redops(values: Values) -> list[RedOp]:
    known: list[RedOp] = [redop for redop in RedOp if redop is not RedOp.NONE]
    asked = listed(values, "redop") or ["sum"]
    if asked == ["all"]:
        return known
    for word in asked:
        if word.lower() not in known:
            raise ConfigError("redop", word, f"all or one of {', '.join(known)}")
    return [RedOp(word.lower()) for word in asked]


def roots(values: Values, n: int) -> list[int]:
    """-r; -1 and all: every rank in turn."""
    text = str(values.get("root") or "0").strip().lower()
    if text in ("-1", "all"):
        return list(range(n))
    if not text.isdecimal() or int(text) >= n:
        raise ConfigError("root", text, f"a rank from 0 to {n - 1}, or -1 for all in turn")
    return [int(text)]


def placement(collective: Collective, values: Values, interface: Api) -> list[bool]:
    asked = values.get("placement") or "both"
    if asked not in ("both", "in", "out"):
        raise ConfigError("placement", asked, "both, in or out")
    offered = placements(collective, interface)
    wanted = [one for one in offered if asked == "both" or one is (asked == "in")]
    if not wanted:
        only = "in" if offered == (True,) else "out"
        raise ConfigError("placement", asked, f"{only} for {collective} with --api {interface}")
    return wanted


def guests(values: Values, device: str) -> list[str]:
    """--with: compute beside, spelled as the case keeps it."""
    asked = [word.lower() for word in listed({**values, "with": values.get("beside")}, "with")]
    for word in asked:
        from_shorthand(word, DType.BF16 if device == "cuda" else DType.FP32)
    return asked


def max_ctas(values: Values, interface: Api, carrier: str) -> list[int | None]:
    """--max-ctas; [None] where NCCL may choose."""
    asked = listed(values, "max_ctas")
    for word in asked:
        if not word.isdecimal() or not 1 <= int(word) <= 64:
            raise ConfigError("max-ctas", word, "thread blocks from 1 to 64")
    if asked and interface is Api.TORCH and carrier != "nccl":
        raise ConfigError("max-ctas", values["max_ctas"], f"only with nccl, not with {carrier}")
    return [int(word) for word in asked] or [None]


def check_calls(values: Values) -> None:
    """-n, -w, -c, --launches, --timeout, --budget: refused before ranks are started."""
    limits = {
        "iters": (1, 10**6),
        "warmup_iters": (0, 10**4),
        "check": (0, 1000),
        "launches": (1, 100),
    }
    for name, (low, high) in limits.items():
        value = values.get(name)
        if value is not None and not low <= value <= high:
            raise ConfigError(_flag(name), value, f"from {low} to {high}")
    for name in ("timeout", "budget"):
        if values.get(name):
            parse_duration(values[name], name)


def calls_per_group(values: Values) -> int:
    """-m."""
    found = values.get("agg_iters")
    if found is not None and not 1 <= found <= 1024:
        raise ConfigError("agg-iters", found, "from 1 to 1024")
    return 1 if found is None else int(found)


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _member(kind: type[E], text: str, field: str) -> E:
    try:
        return kind(text.lower())
    except ValueError:
        raise ConfigError(field, text, f"one of {', '.join(kind)}") from None


def asked_by_name(values: Values) -> bool:
    """Whether types and reductions were asked for by name and not by 'all'."""
    found: list[Any] = words(values.get("dtype")) + words(values.get("redop"))
    return "all" not in found
