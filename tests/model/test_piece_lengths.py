"""The law of packed pieces' lengths: its moments, pairs counted by hand, and samples of it."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.cases import flops
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import build
from stepmark.model.layers import Layer
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model
from stepmark.model.ops import Attention, Phase
from stepmark.model.packing import Packing
from stepmark.workloads.workload_options import GenerateOptions

PACKED = Attention(
    batch=1,
    seq_q=8192,
    seq_kv=8192,
    heads=4,
    kv_heads=2,
    head_dim_qk=64,
    head_dim_v=64,
    piece_mean=1000.0,
    piece_max=4096.0,
)
LAWS = [(700, 4096), (2048, 4096), (2040, 4096), (3500, 4096), (4096, 4096), (4095, 4096)]


def integrated(packing: Packing, window: float) -> tuple[float, float]:
    """Return the mean length and pairs per token by the law's definition, in 20000 steps.

    The exponent is fitted to the mean here anew, by secants.
    """
    steps = [(index + 0.5) / 20_000 for index in range(20_000)]

    def mean(rate: float) -> float:
        weights = [math.exp(-rate * (x - (rate < 0))) for x in steps]
        return sum(x * w for x, w in zip(steps, weights, strict=True)) / sum(weights)

    target = packing.mean / packing.longest
    low, high = -2e4, 2e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) > target else (low, middle)
    weights = [math.exp(-low * (x - (low < 0))) for x in steps]
    lengths = [x * packing.longest for x in steps]
    total = sum(weights)
    pairs = [
        length**2 / 2 if length <= window else length * window - window**2 / 2
        for length in lengths
    ]
    of_mean = sum(a * w for a, w in zip(lengths, weights, strict=True)) / total
    return of_mean, sum(p * w for p, w in zip(pairs, weights, strict=True)) / total / of_mean


@pytest.mark.parametrize(("mean", "longest"), [*LAWS[:4], (50, 4096)])
@pytest.mark.parametrize("window", [0, 512])
def test_pairs_are_those_of_the_law_with_the_greatest_entropy(
    mean: float, longest: float, window: int
) -> None:
    packing = Packing(mean=mean, longest=longest)
    of_mean, pairs = integrated(packing, window or math.inf)
    assert of_mean == pytest.approx(mean, rel=1e-4)
    assert packing.pairs_per_token(window) == pytest.approx(pairs, rel=2e-4)


def test_laws_that_are_known() -> None:
    """Uniform up to M: E[L^2] is M^2 / 3; exponential: 2 m^2; pieces of one length: m^2."""
    assert Packing(mean=500, longest=1000).pairs_per_token() == pytest.approx(1000 / 3)
    assert Packing(mean=10, longest=10_000).pairs_per_token() == pytest.approx(10)
    assert Packing(mean=100, longest=100).pairs_per_token() == 50
    assert Packing(mean=100, longest=100).pairs_per_token(20) == 18


@given(
    longest=st.floats(1, 1e6),
    share=st.floats(1e-4, 1),
    windows=st.lists(st.integers(1, 2_000_000), min_size=2, max_size=2),
)
def test_pairs_lie_between_equal_pieces_and_the_longest(
    longest: float, share: float, windows: list[int]
) -> None:
    packing = Packing(mean=longest * share, longest=longest)
    pairs = packing.pairs_per_token()
    # The law of a mean next to the longest is exact to 1e-6.
    assert packing.mean / 2 * (1 - 2e-6) <= pairs <= longest / 2 * (1 + 1e-9)
    narrow, wide = (packing.pairs_per_token(window) for window in sorted(windows))
    assert 0 < narrow <= wide * (1 + 1e-6) <= pairs * (1 + 2e-6)
    assert narrow <= min(windows) * (1 + 1e-6)
    assert packing.scaled(2).pairs_per_token() == pytest.approx(2 * pairs)


@given(longest=st.floats(1, 1e6), share=st.floats(1e-3, 1), levels=st.lists(st.floats(0, 1)))
def test_quantiles_rise_from_nothing_to_the_longest(
    longest: float, share: float, levels: list[float]
) -> None:
    packing = Packing(mean=longest * share, longest=longest)
    values = [packing.quantile(level) for level in sorted(levels)]
    assert all(0 <= value <= longest * (1 + 1e-9) for value in values)
    assert all(one <= two * (1 + 1e-9) + 1e-9 for one, two in pairwise(values))


@pytest.mark.parametrize(("mean", "longest"), LAWS)
@pytest.mark.parametrize("window", [0, 300])
def test_products_are_those_of_sampled_pieces(mean: float, longest: float, window: int) -> None:
    """FLOPs of drawn varlen operators, whole pieces packed without a rest."""
    packing = Packing(mean=mean, longest=longest)
    draw = random.Random(7)
    lengths = [max(1, round(packing.quantile(draw.random()))) for _ in range(20_000)]
    tokens = sum(lengths)
    drawn = replace(
        PACKED,
        piece_mean=0.0,
        piece_max=0.0,
        window=window,
        seq_q=tokens,
        seq_kv=tokens,
        varlen=tuple(lengths),
        phase=Phase.BWD,
    )
    law = replace(
        PACKED,
        piece_mean=mean,
        piece_max=longest,
        window=window,
        seq_q=tokens,
        seq_kv=tokens,
        phase=Phase.BWD,
    )
    ratio = law.flops / drawn.flops
    # Pairs less their expectation by tokens, which the ratio of two sums has (delta method).
    expected = law.pairs / tokens
    pairs = [
        length**2 / 2 - max(0, length - window) ** 2 / 2 * (window > 0) for length in lengths
    ]
    rests = [p - expected * length for p, length in zip(pairs, lengths, strict=True)]
    error = math.sqrt(sum(rest**2 for rest in rests)) / (expected * tokens)
    assert abs(ratio - 1) < 4 * error + 2e-3  # half a token of rounding per piece
    assert law.executed_flops / law.flops == drawn.executed_flops / drawn.flops


@given(
    longest=st.integers(8, 5000),
    share=st.floats(0.05, 1),
    total=st.integers(1, 100_000),
)
def test_lengths_fill_a_row(longest: int, share: float, total: int) -> None:
    packing = Packing(mean=longest * share, longest=longest)
    lengths = packing.lengths(total)
    assert sum(lengths) == total
    assert min(lengths) > 0
    assert packing.lengths(total) == lengths


@pytest.mark.parametrize(("mean", "longest"), LAWS)
def test_measured_lengths_have_the_pairs_of_the_law(mean: float, longest: float) -> None:
    op = replace(PACKED, batch=64, piece_mean=mean, piece_max=longest)
    chosen = op.with_lengths()
    assert chosen.varlen
    assert not chosen.packing
    assert chosen.seq_q == op.batch * op.seq_q
    assert chosen.flops == pytest.approx(op.flops, rel=0.02)
    assert chosen.bytes_moved == op.bytes_moved


def test_a_ring_has_all_pairs_of_its_pieces() -> None:
    """A rank has 1 / cp of each piece, and in each step the keys of another rank."""
    cp = 4
    part = Packing(mean=1000, longest=4096).scaled(1 / cp)
    step = replace(
        PACKED,
        causal=False,
        seq_q=8192 // cp,
        seq_kv=4096 // cp,
        piece_mean=part.mean,
        piece_max=part.longest,
    )
    assert cp * cp * step.pairs == pytest.approx(PACKED.pairs, rel=1e-6)
    with pytest.raises(ConfigError, match="piece-mean 250"):
        step.with_lengths()
    whole = replace(step, piece_mean=2048.0, piece_max=2048.0)
    assert whole.pairs == whole.seq_q * whole.seq_kv


def test_pieces_as_long_as_the_row_are_causal_attention() -> None:
    plain = replace(PACKED, piece_mean=0.0, piece_max=0.0)
    for window in (0, 100):
        packed = replace(PACKED, piece_mean=8192.0, piece_max=8192.0, window=window)
        assert packed.flops == replace(plain, window=window).flops


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"piece_mean": 5000.0}, r"piece-mean 5000.*at most --piece-max \(4096\)"),
        ({"piece_mean": 0.0}, "piece-mean 0"),
        ({"piece_max": 10_000.0}, r"piece-max 10000.*--seq-q \(8192\)"),
        ({"varlen": (8192,)}, "varlen.*left out with --piece-mean"),
    ],
)
def test_lengths_that_do_not_go_together_are_refused(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(PACKED, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("5", "packing 5 .*such as 1200,8192"),
        ("a,b", "packing a,b .*such as"),
        ("0,10", "packing 0,10 .*a mean length above 0"),
        ("-4,10", "packing -4,10 .*a mean length above 0"),
        ("nan,10", "packing nan,10 .*a mean length above 0"),
        ("20,10", "packing 20,10 .*a greatest length of at least that"),
        ("1,10000000", "packing 1,10000000 .*a millionth"),
        ("1,inf", "packing 1,inf .*a greatest"),
    ],
)
def test_an_option_is_two_lengths(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(GenerateOptions, {"packing": text})


def test_an_option_is_read_and_shown_alike() -> None:
    options = build(GenerateOptions, {"packing": "1200.5, 8192"})
    assert options.packing == Packing(mean=1200.5, longest=8192)
    assert options.packing.text == "1200.5,8192"


def packed(model: ModelConfig, mean: float, longest: float) -> ModelConfig:
    return replace(model, packing=Packing(mean=mean, longest=longest))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3-next-80b-a3b", "layers that carry a state"),
        ("deepseek-v3.2", "sparse attention"),
        ("llama-4-scout", "attention in chunks"),
    ],
)
def test_models_whose_work_depends_on_more_than_lengths_are_refused(
    name: str, words: str
) -> None:
    model = replace(find_model(name), seq_len=16_384)
    with pytest.raises(ConfigError, match=rf"packing 100,200 .*left out with {words}"):
        packed(model, 100, 200)


def test_flops_of_a_token_count_the_pairs_of_pieces() -> None:
    """torchtitan's convention is of whole squares, whatever the mask."""
    model = replace(find_model("llama-3.1-8b"), pattern=(Layer(window=256), Layer()))
    of_pieces = packed(model, 1000, 4096)
    law = Packing(mean=1000, longest=4096)
    width = 4 * model.num_heads * model.head_dim
    for layer, window in zip(model.pattern, (256, 0), strict=True):
        pairs = law.pairs_per_token(window)
        assert flops.attention(of_pieces, layer) == pytest.approx(width * pairs)
    before, after = (flops.of_model(each, 0.0) for each in (model, of_pieces))
    assert after.torchtitan == before.torchtitan
    assert after.six_n == before.six_n
    assert after.causal < before.causal
    whole = packed(model, model.seq_len, model.seq_len)
    assert flops.of_model(whole, 0.0) == before
    assert packed(model, 1000, 4096).tiny().packing == Packing(mean=7.8125, longest=32)
