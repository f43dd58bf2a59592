"""The generated text: the same bytes everywhere, and something to learn at every order."""

import hashlib
import math
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.ground.errors import ConfigError
from stepmark.training import data


def entropy(order: int) -> float:
    """Nats per group of so many bytes that follow one another."""
    content = data.generated()
    groups = Counter(zip(*(content[start:] for start in range(order)), strict=False))
    total = sum(groups.values())
    return -sum(n / total * math.log(n / total) for n in groups.values())


def test_the_bytes_are_those_of_the_checksum() -> None:
    content = data.generated()
    assert len(content) == data.NUM_BYTES == 300_000
    assert hashlib.sha256(content).hexdigest() == data.SHA256
    assert content.startswith(b"She opened a bright water behind the painter. ")
    assert content.isascii()


def test_other_words_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_PARAGRAPH", 8)
    with pytest.raises(RuntimeError, match="not the one"):
        data.generated.__wrapped__()


def test_each_letter_of_context_tells_more() -> None:
    """What a model can reach, in nats per byte: letters alone, then with 1 and 3 before."""
    letters = entropy(1)
    after_one = entropy(2) - letters
    after_three = entropy(4) - entropy(3)
    assert letters < 3.1 < math.log(256)
    assert after_one < 2.2
    assert after_three < 1.0


def test_words_are_drawn_as_zipf_says() -> None:
    """Half as often in the second place; of all nouns, what 1/k gives the first."""
    nouns = tomllib.loads(data._TABLES.read_text())["words"]["N"].split()
    assert len(nouns) == len(set(nouns)) > 100
    zipf = data._Zipf(tuple(nouns))
    draws = data._Draws(5)
    found = Counter(zipf.draw(draws) for _ in range(50_000))
    share = 1 / sum(1 / place for place in range(1, len(nouns) + 1))
    assert found[nouns[0]] / 50_000 == pytest.approx(share, rel=0.05)
    assert found[nouns[0]] / found[nouns[1]] == pytest.approx(2, rel=0.1)
    assert set(found) == set(nouns)


@given(st.integers(0, 2**64 - 1), st.integers(1, 2**31))
def test_draws_stay_below(seed: int, limit: int) -> None:
    assert 0 <= data._Draws(seed).below(limit) < limit


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_bytes(bytes(range(256)))
    assert data.read(str(path)) == bytes(range(256))
    digest = hashlib.sha256(bytes(range(256))).hexdigest()[:12]
    expected = f"file some.txt, 256 bytes, sha256 {digest}, byte tokenizer"
    assert data.describe_text(str(path)) == expected


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none", "a file that exists"), (tmp_path, "not a folder")):
        with pytest.raises(ConfigError, match=why):
            data.read(str(path))
    short = tmp_path / "short"
    short.write_bytes(b"abc")
    assert data.read(str(short), at_least=3) == b"abc"
    with pytest.raises(ConfigError, match="at least 4 bytes, one sequence; it has 3"):
        data.read(str(short), at_least=4)


def test_the_generated_text_is_described() -> None:
    expected = f"generated text, 300 kB, sha256 {data.SHA256[:12]}, byte tokenizer"
    assert data.describe_text("text") == expected
