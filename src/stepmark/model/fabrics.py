"""Presets of environment variables for a kind of network, from data/fabrics.toml."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from stepmark.ground.package_data import data_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """An environment variable. why: a sentence; source: URL of the page that recommends it.

    value: None for the one that it has where the job is started, which no script holds.
    """

    name: str
    value: str | None
    why: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """A preset."""

    name: str
    about: str
    settings: tuple[Setting, ...]


@cache
def load_fabrics() -> Mapping[str, Fabric]:
    """Return all presets by name."""
    return {
        name: Fabric(
            name=name,
            about=table.pop("about"),
            settings=tuple(Setting(name=key, **values) for key, values in table.items()),
        )
        for name, table in tomllib.loads(data_text("fabrics.toml")).items()
    }
