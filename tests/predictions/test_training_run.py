"""Days, GPU hours and cost of a training run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.ground.errors import ConfigError
from stepmark.ground.options import build, plain
from stepmark.model.device import find_device_by_alias
from stepmark.predictions.predict_options import PredictOptions
from stepmark.predictions.training_run import TrainingRun, show_tokens, training_run


@given(
    tokens=st.floats(1, 1e18),
    tokens_per_s=st.floats(1, 1e12),
    num_ranks=st.integers(1, 2**20),
    price=st.floats(0.01, 1e6),
)
def test_figures_are_those_of_the_rate(
    tokens: float, tokens_per_s: float, num_ranks: int, price: float
) -> None:
    run = TrainingRun(tokens=tokens, gpu_hour_price=price)
    figures = run.figures(tokens_per_s, num_ranks)
    days, gpu_hours, cost = (figures[name] for name in ("days", "gpu_hours", "cost"))
    assert days is not None
    assert days * 86400 * tokens_per_s == pytest.approx(tokens)
    assert gpu_hours == pytest.approx(days * 24 * num_ranks)
    assert cost == pytest.approx(price * days * 24 * num_ranks)


def test_gpu_hours_of_llama_405b() -> None:
    """As published, which has interruptions, checkpoints and phases of other sizes, too.

    Llama 3 (arXiv:2407.21783): 3.8e25 FLOPs for 15.6T tokens, section 3.2; 400 TFLOP/s of each
    of 16,384 GPUs, table 4. Meta's model card of Llama 3.1: 30.84M GPU hours.
    """
    tokens = 15.6e12
    tokens_per_s = 16_384 * 400e12 / (3.8e25 / tokens)
    gpu_hours = TrainingRun(tokens=tokens).figures(tokens_per_s, 16_384)["gpu_hours"]
    assert gpu_hours is not None
    assert 0.8 * 30.84e6 < gpu_hours < 30.84e6


@pytest.mark.parametrize(
    ("text", "tokens"), [("15T", 15e12), ("300b", 3e11), ("1e12", 1e12), ("1.4t", 1.4e12)]
)
def test_tokens_are_read(text: str, tokens: float) -> None:
    options = build(PredictOptions, {"tokens": text})
    assert options.tokens == tokens
    assert build(PredictOptions, plain(options)) == options


def test_tokens_are_shown_as_typed() -> None:
    assert [show_tokens(n) for n in (15e12, 1.4e12, 3e11, 999.0)] == [
        "15T",
        "1.4T",
        "300B",
        "999",
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("tokens", text) for text in ("T", "-1T", "nan", "inf", "15X", "0", "1e30")),
        *(("price", text) for text in ("2", "-2/h", "h100=", "1/h,2/h", "inf/h", "2/d", "")),
        *(("measured", text) for text in ("0s", "-1s", "0tokens/s", "1.2.3tokens/s", "9tok")),
    ],
)
def test_bad_values_are_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=name):
        build(PredictOptions, {name: text})


def test_the_price_is_that_of_the_device() -> None:
    prices = build(PredictOptions, {"price": "h100=2/h,b200=5/h"}).price
    for name, price in (("h100-sxm", 2.0), ("b200", 5.0)):
        run = training_run(1e12, prices, find_device_by_alias(name))
        assert run is not None
        assert run.gpu_hour_price == price
    with pytest.raises(ConfigError, match="the price of h200-sxm"):
        training_run(1e12, prices, find_device_by_alias("h200"))


def test_a_price_needs_tokens() -> None:
    with pytest.raises(
        ConfigError, match=r"price 2\.5/h is invalid: it works only with --tokens"
    ):
        training_run(None, (("", 2.5),), None)
