"""A training run of many steps: how many days, GPU hours and how much money it takes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from stepmark.ground.errors import ConfigError
from stepmark.ground.options import Reader, exact
from stepmark.model.device import DeviceSpec, find_device_by_alias

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
RUN_FIGURES = ("days", "gpu_hours", "cost")
_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S


def _read_tokens(text: str, field: str) -> float:
    squeezed = text.strip().lower()
    number = squeezed.rstrip("kmbgt")
    try:
        tokens = float(number) * _SCALES[squeezed[len(number) :]]
    except (ValueError, KeyError):
        tokens = 0.0
    if not 1 <= tokens <= 1e18:
        raise ConfigError(field, text, "a number of tokens such as 15T, 300B or 1e12")
    return tokens


def show_tokens(tokens: float) -> str:
    """Return e.g. 15T."""
    for letter, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if tokens >= scale:
            return f"{exact(tokens / scale)}{letter}"
    return exact(tokens)


Prices = tuple[tuple[str, float], ...]  # of a GPU hour, by device; "": of every device


def _read_prices(text: str, field: str) -> Prices:
    prices: dict[str, float] = {}
    for word in text.split(","):
        device, _, price = word.strip().rpartition("=")
        number = price.removesuffix("/h")
        is_price = re.fullmatch(r"\d{1,9}(\.\d{1,9})?", number) and price != number
        if not is_price or device in prices:
            allowed = "of a GPU hour: 2.5/h, or by device h100-sxm=2.5/h,b200=5/h, each once"
            raise ConfigError(field, word, allowed)
        prices[device] = float(number)
    return tuple(prices.items())


def _show_prices(prices: Prices) -> str:
    return ",".join(
        f"{device}={exact(price)}/h" if device else f"{exact(price)}/h"
        for device, price in prices
    )


Tokens = Annotated[float, Reader(read=_read_tokens, show=show_tokens, metavar="15T")]
GpuHourPrices = Annotated[Prices, Reader(read=_read_prices, show=_show_prices, metavar="2.5/h")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A run over this many tokens. gpu_hour_price: in any currency; None where not given."""

    tokens: float
    gpu_hour_price: float | None = None

    def figures(self, tokens_per_s: float, num_ranks: int) -> Mapping[str, float | None]:
        """Return what the run takes without interruptions."""
        seconds = self.tokens / tokens_per_s
        gpu_hours = num_ranks * seconds / _HOUR_S
        price = self.gpu_hour_price
        cost = None if price is None else price * gpu_hours
        return dict(zip(RUN_FIGURES, (seconds / _DAY_S, gpu_hours, cost), strict=True))


def training_run(
    tokens: float | None, prices: Prices | None, device: DeviceSpec | None
) -> TrainingRun | None:
    """Return the run that --tokens and --price describe. Raises ConfigError."""
    if tokens is None:
        if prices:
            raise ConfigError("price", _show_prices(prices), "only with --tokens")
        return None
    price = _price_of(device, prices) if prices else None
    return TrainingRun(tokens=tokens, gpu_hour_price=price)


def _price_of(device: DeviceSpec | None, prices: Prices) -> float:
    for name, price in prices:
        if not name or (device and find_device_by_alias(name) == device):
            return price
    name = device.key if device else "this device"
    allowed = f"one with the price of {name}, such as {name}=2.5/h"
    raise ConfigError("price", _show_prices(prices), allowed)


def run_text(document: Mapping[str, Any]) -> str:
    """Return what the run of a prediction's document takes, as text."""
    least = "at least " if document["is_lower_bound"] else ""
    days = f"{least}{document['days']:,.1f} days without interruptions"
    text = f"{show_tokens(document['run_tokens'])} tokens in {days}"
    text += f", {document['gpu_hours']:,.0f} GPU hours"
    if document["cost"] is not None:
        text += f", cost {document['cost']:,.0f} at {document['gpu_hour_price']:g} an hour"
    return text
