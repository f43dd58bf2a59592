"""Real outputs of AICB, a Megatron job to write in its formats, and broken text."""

import gzip
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepmark.model.model_tables import find_model
from stepmark.model.parallel import ParallelConfig
from stepmark.step.workload import ComputeOp, Workload
from stepmark.workloads.job import Job, with_seq_len
from stepmark.workloads.rules.megatron.rule import Megatron, workload

DATA = Path(__file__).parents[2] / "data" / "aicb"
SIMAI = sorted(DATA.glob("*/simai*"))
MOCKED = sorted(DATA.glob("*/mocked*"))


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def content(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def megatron(
    model: str = "gpt-13b",
    *,
    gbs: int,
    seq_len: int = 2048,
    time_s: float | None = 1e-6,
    settings: dict[str, Any] | None = None,
    **parallel: int,
) -> Workload:
    """All computation takes time_s."""
    shape = with_seq_len(find_model(model), seq_len)
    shape = replace(shape, vocab_size=51200 if model.startswith("gpt") else shape.vocab_size)
    job = Job(model=shape, parallel=ParallelConfig(**parallel), gbs=gbs)
    made = workload(job, Megatron(**(settings or {})))
    blocks = {
        name: tuple(
            replace(item, time_s=time_s) if isinstance(item, ComputeOp) else item
            for item in block
        )
        for name, block in made.blocks.items()
    }
    return replace(made, blocks=blocks)


def broken(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Bytes and lines changed, dropped, doubled."""
    rng = random.Random(seed)
    for _ in range(count):
        lines = data.split(b"\n")
        place = rng.randrange(min(len(lines), 40))
        line = bytearray(lines[place] or b" ")
        spot = rng.randrange(len(line))
        match rng.randrange(6):
            case 0:
                del lines[place]
            case 1:
                lines.insert(place, bytes(line))
            case 2:
                line[spot] = rng.randrange(256)
            case 3:
                del line[spot : spot + rng.randint(1, 9)]
            case 4:
                line[spot:spot] = rng.choice([b"9" * 30, b"\t", b",", b"None", b"-", b"\xff"])
            case _:
                lines = lines[: place + 1]
                line = line[: spot + 1]
        if place < len(lines):
            lines[place] = bytes(line)
        yield b"\n".join(lines)
