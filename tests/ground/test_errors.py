"""The nearest of a closed set, and the sentence that names it."""

import pytest

from stepmark.ground.errors import nearest, not_one_of


@pytest.mark.parametrize(
    ("word", "expected"),
    [("FSDP", ["fsdp"]), ("fspd", ["fsdp"]), ("all-reduc", ["all_reduce"]), ("xyz", [])],
)
def test_nearest(word: str, expected: list[str]) -> None:
    assert nearest(word, ["ddp", "fsdp", "all_reduce"]) == expected


def test_the_first_of_equals_is_suggested() -> None:
    assert nearest("all_reduce", ["all_reduce", "all-reduce"]) == ["all_reduce"]


def test_the_sentence_names_field_value_nearest_and_all() -> None:
    error = not_one_of("dtype", "bf61", ["fp32", "bf16"], " for gemm")
    assert str(error) == (
        "dtype bf61 is invalid: did you mean bf16? It must be one of fp32, bf16 for gemm."
    )
    assert str(not_one_of("dtype", "x", ["fp32"])) == (
        "dtype x is invalid: it must be one of fp32."
    )


def test_an_alias_is_suggested_but_not_listed() -> None:
    error = not_one_of("device", "h2000", ["h20", "h200-sxm"], aliases=["h200"])
    assert "did you mean h200? It must be one of h20, h200-sxm." in str(error)


def test_what_is_missing_has_no_nearest() -> None:
    assert "did you mean" not in str(not_one_of("api", None, ["None", "torch"]))
