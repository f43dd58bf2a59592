"""Typed access to the keys of one `config.json`, which remembers the keys that were read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from stepmark.ground.errors import ConfigError
from stepmark.step.source_file import one_line

# Far above any model, and low enough that 4 x a width is still one ModelConfig accepts.
_LARGEST = 2**24
_MAX_NEIGHBOURS = 200  # unknown keys that are compared with known ones
REQUIRED: Any = object()


@dataclass(slots=True)
class Keys:
    """The keys of a config. where: precedes a key in messages.

    A default is that of the family in transformers, which a file may leave out.
    """

    raw: Mapping[str, object]
    where: str
    read: set[str] = field(default_factory=set)
    absent: dict[str, object] = field(default_factory=dict)  # missing keys and defaults

    def error(self, name: str, allowed: str) -> ConfigError:
        """Return the error of a value that is not modelled."""
        return ConfigError(f"{self.where}{name}", one_line(self.raw.get(name)), allowed)

    def size(self, *names: str, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """Return a width or count from 1, under the first of these names that is there.

        default: of a missing key. null: what null means; if it is not given, null is as
        missing where the default is None, else refused.
        """
        return self._whole(names, default, null, 1)

    def count(self, *names: str, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """Return a whole number from 0; default and null as of size."""
        return self._whole(names, default, null, 0)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._value((name,), default)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self._of_type(name, "bool", value)
        return value

    def number(self, *names: str, default: float) -> float:
        value = self._value(names, default)
        name = self.name_of(names)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._of_type(name, "a number", value)
        if not abs(value) < 1e30:
            raise self.error(name, "a finite number")
        return float(value)

    def text(self, *names: str, default: str) -> str:
        value = self._value(names, default)
        if not isinstance(value, str):
            raise self._of_type(self.name_of(names), "str", value)
        return value

    def items(self, *names: str, rule: str | None = None) -> list[Any] | None:
        """Return a list; None where it is missing or null.

        rule: of the family for a missing list, in words.
        """
        value = self._value(names, rule)
        if value is rule:
            return None
        if value is not None and not isinstance(value, list):
            raise self._of_type(self.name_of(names), "an array", value)
        return value

    def entries(
        self, *names: str, count: int, allowed: tuple[Any, ...] = (), rule: str | None = None
    ) -> list[Any] | None:
        """Return a list of one entry per layer; None and rule as of items."""
        values = self.items(*names, rule=rule)
        if values is None:
            return None
        name = self.name_of(names)
        if len(values) != count:
            raise self.error(
                name, f"an array of {count}, one entry per layer (num_hidden_layers)"
            )
        for index, value in enumerate(values):
            if allowed and (value not in allowed or isinstance(value, bool)):
                words = ", ".join(map(str, allowed))
                raise ConfigError(
                    f"{self.where}{name}[{index}]", one_line(value), f"one of {words}"
                )
        return values

    def any_value(self, name: str, default: object = None) -> Any:
        """Return a value of any type."""
        return self._value((name,), default)

    def part(self, name: str) -> "Keys | None":
        """Return the keys of an object within the config; None where there is none."""
        value = self._value((name,), None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._of_type(name, "an object", value)
        return Keys(value, f"{self.where}{name}.")

    def name_of(self, names: tuple[str, ...]) -> str:
        """Return the first of these names that the file has, else the first."""
        return next((name for name in names if name in self.raw), names[0])

    def _value(self, names: tuple[str, ...], default: Any) -> Any:
        self.read.update(names)
        name = self.name_of(names)
        if name in self.raw:
            return self.raw[name]
        self._check_spelling(name, is_required=default is REQUIRED)
        if default is REQUIRED:
            raise ConfigError(f"{self.where}{name}", "missing", "it is a required field")
        if default not in (None, ""):
            self.absent[name] = default
        return default

    def _check_spelling(self, missing: str, *, is_required: bool) -> None:
        """Raise ConfigError for a key that resembles a missing one.

        Else `num_key_value_head` would silently mean as many as query heads.
        """
        cutoff = 0.85 if is_required else 0.9
        unknown = [str(key)[:80] for key in list(self.raw)[:_MAX_NEIGHBOURS]]
        for key in get_close_matches(missing, unknown, n=3, cutoff=cutoff):
            if key not in self.read and key not in _RESEMBLING:
                allowed = f"it is an unknown field, did you mean `{missing}`?"
                value = one_line(self.raw.get(key))
                raise ConfigError(f"{self.where}{ascii(key)[1:-1]}", value, allowed)

    def _whole(self, names: tuple[str, ...], default: Any, null: Any, low: int) -> Any:
        value = self._value(names, default)
        name = self.name_of(names)
        if name not in self.raw:
            self.absent[name] = value
        if value is None and (default is None or null is not REQUIRED):
            return None if null is REQUIRED else null
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._of_type(name, "int", value)
        if not low <= value <= _LARGEST:
            raise self.error(name, f"a whole number from {low} to {_LARGEST}")
        return value

    def _of_type(self, name: str, kind: str, value: object) -> ConfigError:
        return self.error(name, f"{kind}, not {_TYPES.get(type(value), 'an object')}")


_TYPES = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    list: "array",
    type(None): "null",
}
# Keys of their own that resemble others.
_RESEMBLING = frozenset(
    {
        *("num_experts", "num_local_experts", "num_experts_per_tok", "n_shared_experts"),
        *("num_shared_experts", "moe_intermediate_size", "use_qk_norm", "qk_norm"),
        *("no_rope_layers", "no_rope_layer_interval", "mamba_n_heads", "mamba_n_groups"),
        *("attention_bias", "attention_in_multiplier", "attention_out_multiplier"),
        *("num_attention_heads", "num_key_value_heads", "n_group", "n_groups"),
        *("q_lora_rank", "kv_lora_rank"),
    }
)


def cycle(items: Iterable[Any]) -> tuple[Any, ...]:
    """Return the shortest start of a list that, again and again, is the list."""
    values = list(items)
    for length in range(1, len(values) + 1):
        if all(values[index] == values[index % length] for index in range(length, len(values))):
            return tuple(values[:length])
    return tuple(values)
