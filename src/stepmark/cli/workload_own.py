"""Models that are no decoder of given widths: FILE.py:function, and published ones by name."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepmark.cli import workload_flags
from stepmark.cli.options import Values
from stepmark.core.errors import ConfigError
from stepmark.workload.architecture import Architecture, Batch
from stepmark.workload.published import PUBLISHED, SEQ_LENS
from stepmark.workload.rules import RULES

_DEFAULT_SEQ_LEN = 2048
_TAKEN = ("model", "model_name", "seq_len")  # of the flags about a model


def is_own(text: str | None) -> bool:
    """Whether --model is one of these."""
    return bool(text) and (text in PUBLISHED or _file_of(str(text)).endswith(".py"))


def choose(
    values: Values, framework: str, batch: Batch
) -> tuple[Architecture, tuple[str, ...]]:
    """The architecture for a batch, and what was decided for the user. Raises ConfigError."""
    text = str(values["model"])
    able = [name for name, rule in RULES.items() if rule.has_own]
    if framework not in able:
        allowed = f"a decoder for {framework}; of other models --framework {', '.join(able)}"
        raise ConfigError("model", text, allowed)
    for flag in (*workload_flags.MODEL, *workload_flags.EXPERTS):
        if flag.name not in _TAKEN and values.get(flag.name) is not None:
            name = flag.name.replace("_", "-")
            raise ConfigError(name, values[flag.name], f"it has no effect with --model {text}")
    made = PUBLISHED[text](batch) if text in PUBLISHED else _of_file(text, batch)
    notes = [f"model of {made.source}"] if made.source else []
    if not values.get("seq_len") and text not in SEQ_LENS:
        notes.append(f"seq-len {batch.seq_len}, as none was given")
    return made, tuple(notes)


def seq_len(values: Values) -> int:
    """Asked for, or the published model's, or a default."""
    given: int | None = values.get("seq_len")
    if given is not None and not 1 <= given <= 2**30:
        raise ConfigError("seq-len", given, "a whole number from 1 to 1073741824")
    return given or SEQ_LENS.get(str(values["model"]), _DEFAULT_SEQ_LEN)


def _file_of(text: str) -> str:
    file, colon, _ = text.rpartition(":")
    return file if colon else text


def _of_file(text: str, batch: Batch) -> Architecture:
    """What the user's function makes of a batch."""
    from stepmark.bench.capture.file import load, reported  # noqa: PLC0415

    path = Path(_file_of(text)).resolve()
    with (
        _with_place(path),
        load(text, arguments=1) as (function, file),
        reported(Path(text).name, file),
    ):
        made: object = function(batch)
    if not isinstance(made, Architecture):
        allowed = "a function of a Batch that returns an Architecture"
        raise ConfigError(Path(text).name, type(made).__name__, allowed)
    return made


@contextmanager
def _with_place(path: Path) -> Iterator[None]:
    """Where in the user's file the API refused what it was given."""
    try:
        yield
    except ConfigError as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename == str(path)]
        if not own or error.__cause__:
            raise
        place = f"{path.name}:{own[-1].lineno}: {error.field}"
        raise ConfigError(place, error.shown, error.allowed) from error
