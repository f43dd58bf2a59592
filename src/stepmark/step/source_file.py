"""A file from elsewhere as bytes, lines or typed JSON; else a ConfigError with the place."""

import contextlib
import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

import msgspec

from stepmark.ground import json_text
from stepmark.ground.errors import ConfigError
from stepmark.ground.read_text import read_whole
from stepmark.step.workload import Workload

S = TypeVar("S")
T = TypeVar("T", bound=msgspec.Struct)


def decoded(path: Path, kind: type[S], what: str, allowed: str) -> S:
    """Decode a JSON file as `kind`. Raise ConfigError naming `what`."""
    data = read_whole(path, what)
    try:
        value: S = json_text.decode(data, kind)
    except ValueError as error:
        raise ConfigError(what, path, f"{allowed} ({error})") from None
    return value


def origin_of(workload: Workload, name: str, kind: type[S]) -> S:
    """Return what a format kept of its own file. Raise ConfigError if it is broken."""
    try:
        return msgspec.convert(workload.origin[name], type=kind)
    except msgspec.ValidationError as error:
        allowed = f"it does not decode: {error}"
        raise ConfigError(f"origin.{name}", "unreadable", allowed) from None


def read_lines(path: Path, what: str) -> list[str]:
    """Return lines without their "\\n" or "\\r\\n"; the last is "" if the file ends in one."""
    try:
        return read_whole(path, what).decode("utf-8").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(what, path, f"UTF-8 text (byte {error.start})") from None


def stage_files(path: Path, suffix: str) -> list[Path]:
    """Return stage0, stage1, ... of a folder; of a file itself. Raise ConfigError for a gap."""
    if not path.is_dir():
        return [path]
    names = [each.name for each in path.glob(f"stage*{suffix}")]
    files = [path / f"stage{number}{suffix}" for number in range(len(names))]
    if missing := [file.name for file in files if file.name not in names]:
        allowed = f"a folder of a file per pipeline stage: {missing[0]} is missing"
        raise ConfigError("workload", path, allowed)
    return files


@contextlib.contextmanager
def in_file(path: Path) -> Iterator[None]:
    """Put the file's name before the field of a ConfigError about its content."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.field}", error.value, error.allowed) from None


MAX_JSON_BYTES = 64 * 2**20  # the largest real file of this kind has about 100 kB
_MAX_NEIGHBOURS = 200  # unknown keys that are compared with known ones


def read_json(path: Path) -> object:
    """Return a JSON file as plain dicts and lists. Raise ConfigError for any other content."""
    return parse_json(path, read_whole(path, "file", MAX_JSON_BYTES))


def parse_json(path: Path, data: bytes) -> object:
    """Return the JSON of a file as plain dicts and lists. Raise ConfigError."""
    try:
        if b"Infinity" in data or b"NaN" in data:  # which Python writes, though it is no JSON
            data = _without_constants(data)
        return json_text.decode(data)
    except ValueError as error:
        raise ConfigError(str(path), one_line(data[:40]), f"JSON ({error})") from None


def _without_constants(data: bytes) -> bytes:
    """Return JSON with null in place of Infinity and NaN outside of strings."""
    words = rb'"(?:[^"\\]|\\.)*"|-?Infinity|NaN'
    return re.sub(words, lambda word: word[0] if word[0][:1] == b'"' else b"null", data)


def convert(raw: object, kind: type[T], where: str) -> T:
    """Return `raw` as `kind`. `where` precedes a field's name: "x.json: " or "x.json: [3].".

    A key that is no field of `kind` but resembles one that is missing is an error even
    where unknown fields are allowed: else `num_key_value_head` would silently mean MHA.
    """
    if isinstance(raw, dict):
        _check_spelling(raw, kind, where)
    try:
        return msgspec.convert(raw, type=kind, strict=True)
    except msgspec.ValidationError as error:
        raise _explain(str(error), raw, where) from None


def one_line(value: object) -> str:
    """Format a value from a file for a message: scalars as they are, others by kind."""
    if isinstance(value, bytes):
        return value.decode("ascii", "backslashreplace")
    if isinstance(value, dict | list):
        return f"an array of {len(value)}" if isinstance(value, list) else "an object"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _check_spelling(raw: dict[object, object], kind: type[T], where: str) -> None:
    closed = bool(kind.__struct_config__.forbid_unknown_fields)
    fields = msgspec.structs.fields(kind)
    missing = {f.encode_name: f.required for f in fields if f.encode_name not in raw}
    names = {f.encode_name for f in fields}
    unknown = [key for key in raw if key not in names]
    for key in map(str, unknown[:_MAX_NEIGHBOURS]):
        close = get_close_matches(key[:80], missing, n=1, cutoff=0.8 if closed else 0.85)
        hint = f", did you mean `{close[0]}`?" if close else ""
        if closed:
            hint = hint or f"; allowed: {', '.join(sorted(names))}"
        elif close and not missing[close[0]]:
            hint = hint if get_close_matches(key[:80], close, cutoff=0.9) else ""
        if hint:
            name = ascii(key[:80])[1:-1]
            raise ConfigError(
                f"{where}{name}", one_line(raw[key]), f"it is an unknown field{hint}"
            )


def _explain(message: str, raw: object, where: str) -> ConfigError:
    """Return msgspec's message as an error with the value that it is about."""
    text, _, place = message.partition(" - at `$")
    place = place.rstrip("`").removeprefix(".")
    if missing := re.match(r"Object missing required field `(\w+)`", text):
        field = f"{place}.{missing[1]}" if place else missing[1]
        return ConfigError(f"{where}{field}", "missing", "it is a required field")
    value = raw
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", place):
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and (index or name).isdigit():
            value = value[int(index or name)]
    allowed = text.removeprefix("Expected ").replace("`", "").replace(", got ", ", not ")
    return ConfigError(f"{where}{place or 'top level'}", one_line(value), allowed)
