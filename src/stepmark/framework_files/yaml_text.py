"""YAML of a framework's file, by PyYAML where it is installed."""

from pathlib import Path
from typing import Any

from stepmark.ground.errors import ConfigError
from stepmark.ground.packages import install_command

_MOST = 2**18  # which take PyYAML seconds
_MAX_DEPTH = 50  # files of real jobs nest less than 10


def read_yaml(text: str, path: Path) -> object:
    """Return what a YAML file holds. Raises ConfigError; ValueError for other text."""
    if len(text) > _MOST:
        raise ValueError(f"it has more than {_MOST} characters")
    try:
        import yaml  # noqa: PLC0415 - optional
    except ImportError:
        allowed = f"it needs PyYAML, which is not installed: {install_command('yaml')}"
        raise ConfigError("config", path, allowed) from None
    loader = yaml.SafeLoader(text)
    try:
        depth = 0
        while loader.check_event():
            event: Any = loader.get_event()
            if isinstance(event, yaml.AliasEvent):  # a few of them unpack to terabytes
                raise ValueError("it has an alias (*), which is not read")
            is_start = isinstance(event, yaml.CollectionStartEvent)
            depth += is_start - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise ValueError(f"it nests deeper than {_MAX_DEPTH} levels")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    finally:
        loader.dispose()
