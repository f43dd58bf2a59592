"""The keys of a framework's file, and what each is to us: one table reads and writes it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from stepmark.ground.errors import ConfigError, nearest

Keys = dict[str, str]  # of a framework's file, with the text of each value
Options = dict[str, str]  # ours by the names of their fields, with the text of each value
TRUE = "True"
FALSE = "False"
ON = {"true": TRUE, "false": FALSE}
OFF = {"true": FALSE, "false": TRUE}
_SWITCHED_OFF = ("", "0", "0.0", "false", "none", "null", "[]", "disabled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key: an option of ours, or why it is none.

    values: from the framework's words to ours; other values are refused. default: ours where
    the file lacks the key, if the framework has another default than we have. no_effect: why
    time and memory do not depend on it. unmodelled: what a step lacks, unless the value
    switches it off. refused: what the value must be.
    """

    option: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None
    no_effect: str = ""
    unmodelled: str = ""
    refused: str = ""
    off: tuple[str, ...] = ()  # more values that switch it off
    asks: bool = False  # a flag must give it where the file leaves it open
    needs: str = ""  # an option that a flag must give, as the file does not say it


def same(*names: str) -> dict[str, Entry]:
    """Return entries of keys that are options of ours under the same name."""
    return {name: Entry(option=name.replace("-", "_")) for name in names}


def switches(*names: str) -> dict[str, Entry]:
    """Return entries of switches that are options of ours under the same name."""
    return {name: Entry(option=name.replace("-", "_"), values=ON) for name in names}


def without_effect(reason: str, names: str) -> dict[str, Entry]:
    """Return entries of keys on which time and memory of a step do not depend."""
    return {name: Entry(no_effect=reason) for name in names.split()}


def unmodelled(text: str, names: str, *off: str) -> dict[str, Entry]:
    """Return entries of keys with an effect that a step of ours lacks."""
    return {name: Entry(unmodelled=text, off=off) for name in names.split()}


def refused(text: str, names: str, *off: str) -> dict[str, Entry]:
    """Return entries of keys that are refused unless their value switches them off."""
    return {name: Entry(refused=text, off=off) for name in names.split()}


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A file as options of ours. origin: the key and value that each is from.

    defaults: options that are the framework's default, not the file's. notes: keys without
    effect, and what the step lacks. requested: options that the file leaves to a flag, with the
    key and value that do. needed: options without a key that a flag must give, with the key
    and value that need them. fixed: options on which option freed_by of the file depends.
    """

    framework: str
    options: Options
    origin: Mapping[str, tuple[str, str]]
    defaults: Options = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    requested: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    needed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    fixed: Options = field(default_factory=dict)
    freed_by: str = ""


def _as_is(keys: Keys) -> Keys:
    return keys


@dataclass(frozen=True, kw_only=True)
class Table:
    """All keys of a framework's file.

    prepare: joins keys that mean one option together, before they are looked up; complete:
    its inverse, after options are written. implied: options that others of a file imply.
    has_flags: a switch is on where it is given, and has no value. open: a value that leaves
    an option open, and why. fixed: options, with the framework's defaults, that a flag cannot
    change alone, as option freed_by depends on them in a file that has the key fixed_with.
    """

    framework: str
    title: str
    entries: Mapping[str, Entry]
    prepare: Callable[[Keys], Keys] = _as_is
    complete: Callable[[Keys], Keys] = _as_is
    implied: tuple[str, ...] = ()
    has_flags: bool = False
    open: tuple[str, str] = ("", "")
    fixed: Mapping[str, str] = field(default_factory=dict)
    freed_by: str = ""
    fixed_with: str = ""

    def read(self, keys: Keys, where: str) -> Translation:
        """Return the keys as options. where: the file. Raises ConfigError."""
        options: Options = {}
        origin: dict[str, tuple[str, str]] = {}
        idle: dict[str, list[str]] = {}
        lacks: dict[str, list[str]] = {}
        requested: dict[str, tuple[str, str]] = {}
        needed: dict[str, tuple[str, str]] = {}
        prepared = self.prepare(dict(keys))
        # A refusal says more than a key that is unknown because of what is refused.
        for key, value in prepared.items():
            refusal = self.entries.get(key, Entry())
            if refusal.refused and not _is_off(refusal, value):
                raise ConfigError(f"{where}: {key}", value, refusal.refused)
        for key, value in prepared.items():
            entry = self._entry(key, value, where)
            if entry.option and value and value == self.open[0]:
                if entry.asks:
                    requested[entry.option] = key, value
                else:
                    lacks.setdefault(self.open[1], []).append(key)
            elif entry.option:
                options[entry.option] = _ours(entry, f"{where}: {key}", value)
                origin[entry.option] = key, value
            elif entry.needs and not _is_off(entry, value):
                needed[entry.needs] = key, value
            elif entry.no_effect:
                idle.setdefault(entry.no_effect, []).append(key)
            elif _is_off(entry, value):
                idle.setdefault("as modelled", []).append(key)
            else:
                lacks.setdefault(entry.unmodelled, []).append(key)
        is_fixed = not self.fixed_with or self.fixed_with in keys
        defaults = {
            entry.option: entry.default
            for entry in self.entries.values()
            if entry.default is not None and entry.option not in options
        }
        notes = [f"not modelled: {', '.join(keys)}: {text}" for text, keys in lacks.items()]
        notes += [
            f"no effect on time and memory ({reason}): {', '.join(names)}"
            for reason, names in idle.items()
        ]
        return Translation(
            framework=self.framework,
            options=options,
            origin=origin,
            defaults=defaults,
            notes=tuple(notes),
            requested=requested,
            needed=needed,
            fixed={name: options.get(name, text) for name, text in self.fixed.items()}
            if is_fixed
            else {},
            freed_by=self.freed_by,
        )

    def value_of(self, key: str, value: str) -> str:
        """Return the value of a key as its option has it. Raises ConfigError."""
        return _ours(self.entries[key], f"--{key}", value)

    def write(self, options: Options, defaults: Options) -> Keys:
        """Return the keys of these options, in the order of the table. Raises ConfigError.

        defaults: of ours; they are written where the framework has another default.
        """
        first: dict[str, tuple[str, Entry]] = {}
        for key, entry in self.entries.items():
            if entry.option:
                first.setdefault(entry.option, (key, entry))
        for name, value in options.items():
            is_implied = name in self.implied or value == defaults.get(name)
            if name not in first and not is_implied:
                allowed = f"left out: {self.title}'s file has no such key"
                raise ConfigError(name.replace("_", "-"), value, allowed)
        keys: Keys = {}
        for name, (key, entry) in first.items():
            default = defaults.get(name) if entry.default is None else entry.default
            if name in options and options[name] != default:
                text = _spelled(entry, options[name], self.title)
                if text != "false" or not self.has_flags:
                    keys[key] = text
                elif name in defaults:
                    allowed = f"left out: {self.title} has no argument for it"
                    raise ConfigError(name.replace("_", "-"), options[name], allowed)
        return self.complete(keys)

    def _entry(self, key: str, value: str, where: str) -> Entry:
        entry = self.entries.get(key)
        if entry is None:
            near = nearest(key, self.entries)
            hint = f"did you mean {near[0]}?" if near else f"a key of {self.title} that we know"
            raise ConfigError(f"{where}: {key[:80]}", value, hint)
        return entry


def _is_off(entry: Entry, value: str) -> bool:
    return value.lower() in (*_SWITCHED_OFF, *entry.off)


def _ours(entry: Entry, field: str, value: str) -> str:
    if not entry.values:
        return value
    by_word = {word.lower(): ours for word, ours in entry.values.items()}
    ours = by_word.get(value.lower())
    if ours is None:
        raise ConfigError(field, value, f"one of {', '.join(entry.values)}")
    return ours


def _spelled(entry: Entry, value: str, title: str) -> str:
    if not entry.values:
        return value
    for word, ours in entry.values.items():
        if ours == value:
            return word
    allowed = f"one of {', '.join(entry.values.values())} in {title}"
    raise ConfigError(entry.option.replace("_", "-"), value, allowed)


def flat(tree: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of nested mappings by their path with dots, as text."""
    if isinstance(tree, dict) and (tree or not prefix):
        for name, value in tree.items():
            yield from flat(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, text_of(tree)


def text_of(value: object) -> str:
    """Return a value of a file as text: true, null, 1.5, and lists with commas."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return ",".join(map(text_of, value)) if value else "[]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value)
