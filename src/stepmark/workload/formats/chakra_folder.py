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
    ranks = _ranks(path.parent, named[1])
    found = [path.with_name(f"{named[1]}.{rank}.et") for rank in range(len(ranks))]
    absent = [one.name for one in found if not one.is_file()]
    if absent or path not in found:
        lacks = absent[0] if absent else path.name
        raise ConfigError(
            WHAT, path, f"it must have the files of all ranks: there is no {lacks}"
        )
    return found


def _ranks(folder: Path, prefix: str) -> list[int]:
    """Those that have a file."""
    matches = (re.fullmatch(r"(.+)\.(\d+)\.et", one.name) for one in folder.glob("*.et"))
    return [int(one[2]) for one in matches if one and one[1] == prefix]


def groups(folder: Path) -> dict[str, list[int]]:
    """The ranks that each pg_name means; none where the file is not there."""
    file = folder / GROUPS_FILE
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(read_bytes(file, WHAT), type=dict[str, list[int]])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError(WHAT, file, f'{{"1": [0, 1], ...}} ({error})') from None
