"""A text to learn: generated, the same bytes everywhere, or read from a file.

Generated, so that it is in the public domain and nothing has to be shipped or downloaded.
Sentences of a small grammar with words drawn as in natural language, the k-th of a list with a
probability of about 1/k (Zipf's law). A model that learns nothing but letters, or words, or
the grammar lowers its loss by each. Free of torch: the command line checks files with it.
"""

import hashlib
from bisect import bisect_right
from functools import cache
from itertools import accumulate
from pathlib import Path

from stepmark.core.errors import ConfigError

GENERATED = "text"
NUM_BYTES = 300_000
SHA256 = "1f785dcb5cdefa624429ed4f9b7d5da0037fa2c94e162e488479cf97c7b03866"

# Lists are in the order of frequency. A template draws a word of each capital's list.
_WORDS = {
    "N": """
        time man day way world house hand night water river door road tree light morning garden
        mountain sea window voice child woman king city ship horse stone bird field letter wind
        fire book bridge boat island table wall forest village winter summer snow rain tower
        clock lamp market street teacher sailor farmer baker painter doctor captain soldier
        friend stranger sister brother mother father dog cat wolf fox owl shadow dream story
        song bell coat hat key map mirror candle bread apple cup barrel basket rope wheel cart
        engine train station hill valley lake shore cloud star moon sun storm leaf root seed
        flower feather shell coin ring crown sword drum violin kitchen cellar roof chimney
        harbour mill school church library square fountain gate path meadow well orchard cave
        desert glacier
        """,
    "V": """
        saw found took heard left made knew followed carried held watched opened reached crossed
        remembered turned built brought lost kept passed touched called met painted sold bought
        climbed closed broke cleaned counted mended feared praised drew lifted hid washed warmed
        admired burned filled guarded ignored measured moved noticed pulled pushed repaired
        searched shook stole threw tied visited wanted whispered_to wrote_about
        """,
    "I": """
        slept waited laughed walked stood ran sang fell smiled sat came_back went_home looked_up
        wept worked rested dreamed danced shouted listened nodded vanished arrived hesitated
        wandered trembled
        """,
    "J": """
        old little great long white dark young good cold new small quiet green red high deep
        heavy empty strange bright blue broken warm tall narrow wild grey poor golden silent
        distant gentle wooden early tired yellow clever lonely round sharp sleepy famous hollow
        ancient curious brave rusty silver crooked pale thin
        """,
    "R": """
        slowly then again quickly always never once gently suddenly often quietly together
        at_last carefully later soon patiently seldom twice bravely in_silence without_a_word
        """,
    "P": """
        in on near behind under beside above across beyond through before after towards around
        between_the_walls_of
        """,
    "D": "the a the his her the this every their some that another no",
    "C": "and but so because while until although as_if when before",
    "S": "he she it they we nobody everybody I someone",
    "O": "him her it them us me",
    "Q": "how why when where whether",
}
_TEMPLATES = (
    "D N V D N.",
    "S V D J N P D N.",
    "D J N I P D N.",
    "S R V D N, C D N I.",
    "P D N, D N V D J N.",
    "S I R, C S V D N P D N.",
    "D N P D N V O R.",
    "C D J N V D N, S I.",
    '"D N I," S said, "C S V O."',
    "S asked Q D N V D J N, C nobody knew.",
    "R D N of D N V D N C I.",
    "D N was J, C D N was J.",
    "who V D J N?",
    "D N and D N I P D J N.",
)
_PARAGRAPH = 7  # sentences, about


class _Draws:
    """A linear congruential generator: Knuth's MMIX constants, of which the high bits count.

    Not the random module, whose sequences may change between Python versions.
    """

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, limit: int) -> int:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self._state >> 32) * limit >> 32


class _Zipf:
    """Draws from a list, the k-th item with a weight of 1/k."""

    def __init__(self, items: tuple[str, ...]) -> None:
        self._items = items
        # Whole numbers: floats could round differently elsewhere.
        self._ends = list(accumulate(2**20 // place for place in range(1, len(items) + 1)))

    def draw(self, draws: _Draws) -> str:
        return self._items[bisect_right(self._ends, draws.below(self._ends[-1]))]


@cache
def generated() -> bytes:
    """NUM_BYTES of ASCII text. Raises RuntimeError where they are not those of SHA256."""
    lists = {
        kind: _Zipf(tuple(word.replace("_", " ") for word in words.split()))
        for kind, words in _WORDS.items()
    }
    templates = _Zipf(_TEMPLATES)
    draws = _Draws(1)
    parts: list[str] = []
    size = 0
    while size < NUM_BYTES:
        sentence = _sentence(templates.draw(draws), lists, draws)
        parts.append(sentence + ("\n\n" if draws.below(_PARAGRAPH) == 0 else " "))
        size += len(parts[-1])
    text = "".join(parts).encode("ascii")[:NUM_BYTES]
    if hashlib.sha256(text).hexdigest() != SHA256:
        raise RuntimeError("the generated text is not the one that is expected")
    return text


def _sentence(template: str, lists: dict[str, _Zipf], draws: _Draws) -> str:
    words = []
    for slot in template.split():
        kind = slot.strip('.,?"')
        word = lists[kind].draw(draws) if kind in lists else kind
        words.append(slot.replace(kind, word, 1))
    text = " ".join(words)
    start = 1 if text[0] == '"' else 0
    return text[:start] + text[start].upper() + text[start + 1 :]


def read(data: str, *, at_least: int = 2) -> bytes:
    """The generated text for "text", else a file's bytes.

    Raises ConfigError for a file that cannot be read or has fewer bytes than at_least: a
    sequence needs one more than its length.
    """
    if data == GENERATED:
        text = generated()
    else:
        try:
            text = Path(data).expanduser().read_bytes()
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise ConfigError("text-file", data, f"a file that can be read ({why})") from error
    if len(text) < at_least:
        allowed = f"a text of at least {at_least} bytes, one sequence; it has {len(text)}"
        raise ConfigError("text-file", data, allowed)
    return text


def describe(data: str) -> str:
    """E.g. "generated text, 300 kB, sha256 01234..., byte tokenizer". Raises ConfigError."""
    text = read(data)
    digest = f"sha256 {hashlib.sha256(text).hexdigest()[:12]}, byte tokenizer"
    if data == GENERATED:
        return f"generated text, {len(text) // 1000} kB, {digest}"
    return f"file {Path(data).name}, {len(text)} bytes, {digest}"
