"""Scores of published steps: jobs by their rows, rank correlation, and figures of papers."""

import itertools
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "validation"))
import published_jobs
import published_steps

from stepmark.ground.errors import ConfigError
from stepmark.step_memory.megatron_memory import stage_memories

STEPS = published_jobs.read_rows("published-steps.csv")
LAYOUTS = published_jobs.read_rows("published-layouts.csv")


def row_of(rows: list[dict[str, str]], **values: str) -> dict[str, str]:
    return next(row for row in rows if values.items() <= row.items())


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(1, 10), (2, 20), (3, 40)], 1.0),
        ([(1, 4), (2, 3), (3, 2), (4, 1)], -1.0),
        # 1 - 6 (0 + 0 + 1 + 1) / (4 x 15): Spearman's formula of distinct ranks
        ([(1, 1), (2, 2), (3, 4), (4, 3)], 0.8),
    ],
)
def test_rank_correlation(pairs: list[tuple[float, float]], expected: float) -> None:
    assert published_steps.spearman(pairs) == pytest.approx(expected)


def test_equal_values_share_their_rank() -> None:
    assert published_steps.ranks([7.0, 5.0, 7.0, 9.0]) == [1.5, 0.0, 1.5, 3.0]


@pytest.mark.parametrize(
    ("model", "recompute", "published_s"),
    [("Megatron-1T", "selective", 71.49), ("MT-NLG-530B", "selective", 37.83)],
)
def test_steps_of_a_paper(model: str, recompute: str, published_s: float) -> None:
    """Table 5 of arXiv:2205.05198: the step of 1T on 512 GPUs, and of 530B on 280."""
    row = row_of(STEPS, source="Korthikanti2022-T5", model=model, recompute=recompute)
    scored = published_steps.score(row)
    assert scored.published_s == pytest.approx(published_s)
    assert abs(scored.error) < 0.1


def test_published_counts_of_models() -> None:
    """Parameters by the shapes of a row are those that its source states."""
    billions = {
        "GPT-OSS-120B": 117,
        "Grok-1-314B": 314,
        "Kimi-K2": 1026,
        "Llama-4-Maverick-400B": 400,
        "MPT-30b": 30,
        "Nemotron-H-56B": 56,
        "Qwen3-235B-A22B": 235,
    }
    for name, expected in billions.items():
        row = row_of([*LAYOUTS, *STEPS], model=name, layers=_most_layers(name))
        job = published_jobs.job_of(row)
        assert job.job.model.num_params / 1e9 == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", published_jobs.BUILT_IN)
def test_built_in_models_have_the_stated_shapes(name: str) -> None:
    """Layers and sequence are the row's; the widths that it states are the built-in model's."""
    rows = [row for row in LAYOUTS if row["model"] == name]
    assert rows
    for row in rows:
        model = published_jobs.model_of(row)
        stated = ("layers", "seq", "hidden", "heads", "kv_heads", "vocab")
        assert [int(row[column]) for column in stated] == [
            model.num_layers,
            model.seq_len,
            model.hidden_size,
            model.num_heads,
            model.num_kv_heads,
            model.vocab_size,
        ]
        experts = model.moe.ffn_hidden_size if model.moe else 0
        assert int(row["ffn"]) in (model.ffn_hidden_size, experts)


@pytest.mark.parametrize("name", published_jobs.BUILT_IN)
def test_layouts_of_built_in_models_can_be_predicted(name: str) -> None:
    assert published_steps.refusal_of(row_of(LAYOUTS, model=name)) == ""


def _most_layers(name: str) -> str:
    return max((row["layers"] for row in [*LAYOUTS, *STEPS] if row["model"] == name), key=int)


def test_refusals_name_a_field() -> None:
    with pytest.raises(ConfigError, match="gbs is missing"):
        published_jobs.job_of({**STEPS[0], "gbs": ""})
    with pytest.raises(ConfigError, match="gpus 7 is invalid"):
        published_jobs.job_of({**STEPS[0], "gpus": "7"})
    scored = published_steps.score({**STEPS[0], "precision": "FP3"})
    assert scored.outcome is None
    assert scored.refusal.startswith(published_steps.IN_BF16 + "precision FP3: ")


def test_weak_scaling_costs_little() -> None:
    """70B in bf16 by NVIDIA's layout without chunks, 512 to 2,048 H100, 2 sequences a GPU.

    Published steps grow by 0.3 to 1.1 % with each doubling. Slow ranks are not modelled
    (docs/network.md), so the upper bound alone has to hold.
    """
    row = row_of(LAYOUTS, model="Llama-3.1-70B", gpus="512", precision="BF16", vpp="5")
    steps_s = []
    for doublings in range(3):
        dp = int(row["dp"]) * 2**doublings
        sizes = {"gpus": 512 * 2**doublings, "dp": dp, "gbs": 64 * dp, "vpp": 1}
        scaled = {**row, **{name: str(size) for name, size in sizes.items()}}
        steps_s.append(published_steps.outcome_of(published_jobs.job_of(scaled)).step_s)
    growth = [later / earlier - 1 for earlier, later in itertools.pairwise(steps_s)]
    assert all(0 < each < 0.011 for each in growth)


@pytest.mark.parametrize("model", ["Megatron-22B", "GPT-3-175B", "MT-NLG-530B", "Megatron-1T"])
def test_activations_of_a_paper(model: str) -> None:
    """arXiv:2205.05198: 34 s b h L / t on the first stage, with sequence parallelism and
    selective recomputation; in the interleaved schedule 1 + (p - 1) / (p m) times as many."""
    row = row_of(STEPS, source="Korthikanti2022-T5", model=model, recompute="selective")
    published = published_jobs.job_of(row)
    shape, axes = published.job.model, published.job.parallel
    chunks = int(row["vpp"] or 1)
    more = 1 + (axes.pp - 1) / (axes.pp * chunks) if chunks > 1 else 1
    rows = shape.seq_len * published.job.mbs * shape.hidden_size
    expected = 34 * rows * shape.num_layers / axes.tp * more
    first = stage_memories(published.job, published.settings)[0]
    assert first.activations_bytes == pytest.approx(expected, rel=0.02)
