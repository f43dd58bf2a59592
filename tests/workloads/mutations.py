"""Broken files: a valid one, damaged by a seeded random."""

import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from stepmark.ground.errors import ConfigError

JUNK: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1.5,
        2**31,
        2**63,
        2**64,
        10**30,
        1e308,
        "",
        "x",
        "128",
        "\x00",
    ),
    *([], {}, [[]], [1], {"a": 1}, ["__range__", 1, 4, 1], ["__range__", 1, 2**62, 1]),
    *(["__range__", 0, 0, 0], "bf16", "float32", "nt", "\u2028\n\r", "é" * 300),
]


def mutated(content: Any, count: int, seed: int) -> Iterator[bytes]:
    """`count` files: values replaced, dropped, doubled, renamed; bytes cut or changed."""
    rng = random.Random(seed)
    whole = json.dumps(content).encode()
    for _ in range(count):
        if rng.random() < 0.6:
            changed = deepcopy(content)
            for _ in range(rng.randint(1, 3)):
                changed = _damage(changed, rng)
            yield json.dumps(changed).encode()
            continue
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    del data[place:]
                case 1:
                    data[place] = rng.randrange(256)
                case 2:
                    data[place:place] = rng.choice([b"[" * 5000, b"{", b"\xff\xfe", b"9" * 400])
                case _:
                    del data[place : place + rng.randint(1, 20)]
            data = data or bytearray(b" ")
        yield bytes(data)


def _damage(value: Any, rng: random.Random) -> Any:
    """Somewhere inside `value`, or `value` itself."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        return deepcopy(rng.choice(JUNK))
    key: Any = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    if rng.random() < 0.75:
        value[key] = _damage(value[key], rng)
    elif isinstance(value, dict):
        item = value.pop(key)
        if rng.random() < 0.7:
            value[key[:-1] + rng.choice(["", "x", "\n"])] = item
    elif rng.random() < 0.5:
        del value[key]
    else:
        value.insert(key, deepcopy(value[key]))
    return value


def only_config_errors(
    read: Callable[[Path], object], files: Iterator[bytes], path: Path
) -> tuple[int, int]:
    """How many were read, how many refused; anything but a one-line ConfigError is raised."""
    good = bad = 0
    for data in files:
        path.write_bytes(data)
        try:
            read(path)
            good += 1
        except ConfigError as error:
            bad += 1
            text = str(error)
            assert len(text.splitlines()) == 1, text
            assert len(text) < 1000, text
        except Exception as error:
            error.add_note(f"file: {data[:500]!r}")
            raise
    return good, bad
