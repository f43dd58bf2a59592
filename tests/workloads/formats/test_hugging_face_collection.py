"""Published Hugging Face configurations against what transformers builds of them.

The counts in tests/data/hugging-face are made by validation/hugging_face_truth.py.
"""

import random

import pytest
from validation import hugging_face_models as collection

LINES = [line for path in collection.FILES for line in collection.read_lines(path)]
# Names of configurations that must be read, all of them exactly. Add those that are read since:
# `python validation/hugging_face_models.py --names` prints them.
EXACT = frozenset((collection.DATA / "exact.txt").read_text(encoding="utf-8").splitlines())


def by_name(line: collection.Line) -> str:
    return str(line["name"])


def test_names_are_unique_and_all_lines_have_a_source():
    names = [line["name"] for line in LINES]
    assert len(names) == len({name.lower() for name in names}) >= 125
    assert set(names) >= EXACT
    assert all(line["source"] for line in LINES)


@pytest.mark.parametrize("line", LINES, ids=by_name)
def test_a_configuration_is_read_exactly_or_refused_by_what_it_has(line):
    verdict = collection.judge(line)
    assert not verdict.wrong
    if verdict.model is None:
        assert line["name"] not in EXACT
        assert "\n" not in verdict.refusal
        keys = {*line["config"], *line["config"].get("text_config", ())}
        is_named = any(key in verdict.refusal for key in keys)
        assert is_named or "is missing" in verdict.refusal, verdict.refusal
    elif verdict.wrong_scores and not verdict.wrong:
        notes = " ".join(verdict.model.unmodelled)
        assert "attention" in notes, verdict.wrong_scores


@pytest.mark.parametrize("line", random.Random(20261130).sample(LINES, 10), ids=by_name)
def test_the_counts_are_those_of_transformers(line):
    pytest.importorskip("transformers")
    from validation.hugging_face_truth import truth

    counts = truth(line["config"], most_tokens=128)
    of_all_lengths = (
        *("parameters", "active_parameters", "buffers"),
        *("matmul_flops_per_token", "score_flops_per_key"),
    )
    for name in of_all_lengths:
        assert counts[name] == line[name], name


def test_a_wrong_count_is_named():
    line = next(line for line in LINES if line["name"] == "Mixtral-8x7B-v0.1")
    wrong = {
        "parameters": line["parameters"] + 1,
        "active_parameters": line["active_parameters"] - 1,
        "matmul_flops_per_token": line["matmul_flops_per_token"] + 2,
        "score_flops": 2 * line["score_flops"],
    }
    for name, count in wrong.items():
        verdict = collection.judge({**line, name: count})
        assert [*verdict.wrong, *verdict.wrong_scores], name
    assert collection.judge(line).kind == "exact"
