"""The depth of JSON text."""

import json

import pytest

from stepmark.ground.json_text import MAX_DEPTH, check_depth, decode


def nested(depth: int, opening: str = "[", closing: str = "]") -> str:
    return opening * depth + closing * depth


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 10 * MAX_DEPTH, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":[', "]}"), ("[", "")])
def test_deep_text_is_refused(depth: int, opening: str, closing: str) -> None:
    with pytest.raises(ValueError, match="deeper than 100"):
        decode(nested(depth, opening, closing))
    with pytest.raises(ValueError, match="deeper than 100"):
        check_depth('{"a": 1, "b": [1, ' + nested(depth, opening, closing))


def test_wide_text_and_brackets_in_strings_are_read() -> None:
    assert decode(nested(MAX_DEPTH))
    value = [{"a": [1, 2, [], {}]} for _ in range(1000)] + ["[{" * 1000, '"[' * 1000, "\\"]
    assert decode(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a": 5,', "line 1, column 9: it ends too early"),
        (b'{"a": 5\n "b": 2}', "line 2, column 2: expected ',' or '}'"),
    ],
)
def test_an_error_has_its_place(text: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}$"):
        decode(text)


@pytest.mark.parametrize("text", [b"", b"NaN", b'"\xff"', b"1e400", b"1" * 5000, b"[1"])
def test_other_text_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(text)
