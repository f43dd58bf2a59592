"""Results of node checks: one file per host in a folder that all hosts share."""

from pathlib import Path

import msgspec

from stepmark.ground.errors import ConfigError
from stepmark.ground.files import open_bytes, written
from stepmark.nodes.node_check import NODE_CHECK_SCHEMA, NodeCheck
from stepmark.store.codec import json_object, to_plain

FOLDER = "nodes"


def write(check: NodeCheck, file: Path) -> None:
    """Write a check; the file appears whole or not at all."""
    text = msgspec.json.encode(to_plain(check))
    with written(file, "out") as stream:
        stream.write(msgspec.json.format(text, indent=2) + b"\n")


def read(file: Path, field: str = "from") -> NodeCheck:
    """Read a check. Raises ConfigError."""
    name = f"{field} {file}"
    plain = json_object(open_bytes(file), name)
    if plain.get("schema") != NODE_CHECK_SCHEMA:
        schema = plain.get("schema", "no schema")
        raise ConfigError(name, schema, f"a node check of schema {NODE_CHECK_SCHEMA}")
    try:
        return msgspec.convert(plain, NodeCheck, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(
            name, plain.get("host", "no host"), f"a node check ({error})"
        ) from None


def read_all(folder: Path) -> list[NodeCheck]:
    """Read the checks of all hosts in a folder, by name. Raises ConfigError."""
    files = sorted((folder / FOLDER).glob("*.json"))
    if not files:
        raise ConfigError("from", folder, f"a folder with {FOLDER}/HOST.json of some host")
    return [read(file) for file in files]
