"""Files of a Chakra execution trace: one per rank, and the groups that they name."""

import re
from pathlib import Path

import msgspec

from stepmark.core.errors import ConfigError
from stepmark.workload.formats.chakra_graph import WHAT
from stepmark.workload.formats.source_file import read_bytes

GROUPS_FILE = "comm_groups.json"


def rank_files(path: Path) -> list[Path]:
    """PREFIX.0.et, PREFIX.1.et, ... of the folder, or of the one that is named."""
    if path.is_dir():
        first = sorted(path.glob("*.0.et"))
        if len(first) != 1:
            raise ConfigError(WHAT, path, f"a folder with one PREFIX.0.et: it has {len(first)}")
        path = first[0]
    if not (named := re.fullmatch(r"(.+)\.\d+\.et", path.name)):
        raise ConfigError(WHAT, path, "a file PREFIX.RANK.et")
    found: list[Path] = []
    while (one := path.with_name(f"{named[1]}.{len(found)}.et")).is_file():
        found.append(one)
    if path not in found:
        raise ConfigError(WHAT, path, f"a readable file, and those of all ranks from 0 ({one})")
    return found


def groups(folder: Path) -> dict[str, list[int]]:
    """The ranks that each pg_name means; none where the file is not there."""
    file = folder / GROUPS_FILE
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(read_bytes(file, WHAT), type=dict[str, list[int]])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError(WHAT, file, f'{{"1": [0, 1], ...}} ({error})') from None
