"""Made-up dumps: what torch writes, in the form of any version."""

import json
import pickle
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
SAMPLE = Path(__file__).parents[1] / "data" / "flight-recorder"


def entry(
    number: int,
    name: str = "all_reduce",
    inputs: Any = ((1024,),),
    outputs: Any = None,
    **more: Any,
) -> Entry:
    """One collective of the default group, completed."""
    sent = [list(dims) for dims in inputs]
    received = sent if outputs is None else [list(dims) for dims in outputs]
    return {
        "record_id": number - 1,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": 10**18 + number,
        "input_sizes": sent,
        "input_dtypes": ["Float"] * len(sent),
        "output_sizes": received,
        "output_dtypes": ["Float"] * len(received),
        "state": "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": 10**18 + number + 1,
        "retired": True,
        "timeout_ms": 600000,
        "is_p2p": name.startswith(("send", "recv")),
        "frames": [{"name": "step", "filename": "train.py", "line": 7}],
        **more,
    }


def transfer(number: int, name: str, elements: int = 1024, **more: Any) -> Entry:
    """One send or receive: "send 0->1", "recv 1<-0"."""
    shape = [[elements]]
    sides = (shape, []) if name.startswith("send") else ([], shape)
    made = entry(number, name, inputs=sides[0], outputs=sides[1])
    return made | {"collective_seq_id": 0, "p2p_seq_id": number} | more


def dump(entries: list[Entry], ranks: int = 2, **more: Any) -> dict[str, Any]:
    """A whole dump of version 2.10."""
    names = str(list(range(ranks)))
    return {
        "version": "2.10",
        "comm_lib_version": "2.28.9",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": names}},
        "pg_status": {},
        "entries": entries,
        **more,
    }


def as_json(held: dict[str, Any]) -> dict[str, Any]:
    """The same as torch's JSON has it: numbers as text, 0 for unknown, no frames."""
    made = json.loads(json.dumps(held))
    for one in made["entries"]:
        one.pop("frames", None)
        for key in ("time_discovered_started_ns", "time_discovered_completed_ns"):
            one[key] = one[key] or 0
    for status in made["pg_status"].values():
        status.update({key: str(value) for key, value in status.items()})
    return made  # type: ignore[no-any-return]


def as_old(held: dict[str, Any]) -> dict[str, Any]:
    """The same as an old version has it: seq_id, groups as lists, no is_p2p."""
    made = pickle.loads(pickle.dumps(held))
    made["version"] = "1.1"
    made["pg_config"] = {
        name: json.loads(group["ranks"]) for name, group in held["pg_config"].items()
    }
    for key in ("comm_lib_version", "pg_status"):
        del made[key]
    for one in made["entries"]:
        one["seq_id"] = one["p2p_seq_id"] or one["collective_seq_id"]
        for key in ("collective_seq_id", "p2p_seq_id", "is_p2p"):
            del one[key]
        one["process_group"] = one["process_group"][0]
    return made  # type: ignore[no-any-return]


def write(folder: Path, dumps: dict[int, dict[str, Any]]) -> list[Path]:
    """One pickle per rank, named as torch names them."""
    paths = []
    for rank, held in dumps.items():
        path = folder / f"nccl_trace_rank_{rank}"
        path.write_bytes(pickle.dumps(held))
        paths.append(path)
    return paths
