"""Batches of tokens through a DataLoader, as in a training job.

Sequence number s of a seed is always the same. Micro-step i of n data ranks has the sequences
from stepmark.ground.read_text import read_whole
from i * n * mbs on, each rank mbs of them: neither the number of workers nor that of data ranks
changes the training data.

A text is generated, the same bytes everywhere, or read from a file. Generated, it is in the
public domain and needs no download: sentences of a small grammar with words drawn as in natural
language, the k-th of a list with a probability of about 1/k (Zipf's law). A model that learns
only letters, or words, or the grammar lowers its loss by each.
"""

import hashlib
import tomllib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from stepmark.cases.train_case import TrainCase
from stepmark.ground.errors import ConfigError
from stepmark.ground.read_text import open_file, readable
from stepmark.training.model_parallel import SequenceShard

RANDOM = "random"
_BYTES = 256  # tokens of a byte tokenizer
_PREFETCH = 2  # batches that each worker makes ahead

Batch = tuple[torch.Tensor, torch.Tensor]
_WHOLE = SequenceShard(rank=0, num_ranks=1)


class Sequences(IterableDataset[Batch]):
    """Endless micro-batches (tokens_BT, labels_BT); labels are one token ahead."""

    def __init__(
        self, case: TrainCase, data_rank: int, num_data_ranks: int, share: SequenceShard
    ) -> None:
        self._case = case
        self._share = share
        self._vocab_size = case.model.vocab_size
        self._length = case.model.seq_len + 1
        self._data_rank = data_rank
        self._num_data_ranks = num_data_ranks
        self._text: torch.Tensor | None = None
        if case.data == RANDOM:
            return
        if self._vocab_size < _BYTES:
            allowed = f"at least {_BYTES}, the byte tokenizer's, for a text"
            raise ConfigError("vocab_size", self._vocab_size, allowed)
        content = bytearray(read(case.data, at_least=self._length))
        self._text = torch.frombuffer(content, dtype=torch.uint8)

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        # The DataLoader takes one batch of each worker in turn.
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        generator = torch.Generator()
        micro_step = first
        while True:
            yield self.batch(micro_step, generator)
            micro_step += stride

    def batch(self, micro_step: int, generator: torch.Generator) -> Batch:
        """Return this data rank's part of a micro-step."""
        number = (micro_step * self._num_data_ranks + self._data_rank) * self._case.mbs
        sequences_BT = torch.empty((self._case.mbs, self._length), dtype=torch.int64)
        for row, sequence_T in enumerate(sequences_BT):
            generator.manual_seed(_seed_of(self._case.seed, number + row))
            self._draw(sequence_T, generator)
        tokens_BT = sequences_BT[:, :-1]
        labels_BT = sequences_BT[:, 1:]
        return (
            self._share.of(tokens_BT, dim=1).contiguous(),
            self._share.of(labels_BT, dim=1).contiguous(),
        )

    def _draw(self, out_T: torch.Tensor, generator: torch.Generator) -> None:
        if self._text is None:
            out_T.random_(0, self._vocab_size, generator=generator)
            return
        starts = len(self._text) - self._length + 1
        start = int(torch.randint(starts, (), generator=generator))
        out_T.copy_(self._text[start : start + self._length])


def _seed_of(seed: int, number: int) -> int:
    """Return the seed of a sequence. A hash separates (0, 1) from (1, 0)."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def loader(
    case: TrainCase,
    data_rank: int,
    num_data_ranks: int,
    device: torch.device,
    share: SequenceShard = _WHOLE,
) -> Iterator[Batch]:
    """Yield (tokens_BT, labels_BT) without end, int64 on the CPU, pinned for a CUDA device.

    share: the tokens of each sequence that a rank has under context parallelism. The
    DataLoader's case.workers processes start here and end when the iterator is dropped. Raises
    ConfigError for a text that cannot be read.
    """
    batches = DataLoader(
        Sequences(case, data_rank, num_data_ranks, share),
        batch_size=None,
        num_workers=case.workers,
        prefetch_factor=_PREFETCH if case.workers else None,
        pin_memory=device.type == "cuda",
    )
    return ((tokens_BT, labels_BT) for tokens_BT, labels_BT in batches)


def describe(case: TrainCase) -> str:
    """Return the training data, e.g. "random tokens, shifted labels". Raises ConfigError."""
    return "random tokens, shifted labels" if case.data == RANDOM else describe_text(case.data)


GENERATED = "text"
NUM_BYTES = 300_000
SHA256 = "1f785dcb5cdefa624429ed4f9b7d5da0037fa2c94e162e488479cf97c7b03866"

_TABLES = Path(__file__).parents[1] / "data" / "text.toml"
_PARAGRAPH = 7  # sentences, about


class _Draws:
    """A linear congruential generator with Knuth's MMIX constants, which uses the high bits.

    Not the random module, whose sequences may change between Python versions.
    """

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, limit: int) -> int:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self._state >> 32) * limit >> 32


class _Zipf:
    """Draws from a list, the k-th item with a weight of 1/k."""

    def __init__(self, items: Sequence[str]) -> None:
        self._items = items
        # Integers: floats could round differently on other machines.
        self._ends = list(accumulate(2**20 // place for place in range(1, len(items) + 1)))

    def draw(self, draws: _Draws) -> str:
        return self._items[bisect_right(self._ends, draws.below(self._ends[-1]))]


@cache
def generated() -> bytes:
    """Return NUM_BYTES of ASCII text. Raises RuntimeError where its SHA256 is another one."""
    tables = tomllib.loads(_TABLES.read_text(encoding="utf-8"))
    lists = {
        kind: _Zipf([word.replace("_", " ") for word in words.split()])
        for kind, words in tables["words"].items()
    }
    templates = _Zipf(tables["templates"])
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
    """Return the generated text for "text", else a file's bytes.

    Raises ConfigError for a file that cannot be read or has fewer bytes than at_least: a
    sequence needs one more than its length.
    """
    if data == GENERATED:
        text = generated()
    else:
        path = Path(data).expanduser()
        with readable(path, "text-file"), open_file(path, "text-file") as stream:
            text = stream.read()
    if len(text) < at_least:
        allowed = f"a text of at least {at_least} bytes, one sequence; it has {len(text)}"
        raise ConfigError("text-file", data, allowed)
    return text


def describe_text(data: str) -> str:
    """Return e.g. "generated text, 300 kB, sha256 01234..., byte tokenizer"."""
    text = read(data)
    digest = f"sha256 {hashlib.sha256(text).hexdigest()[:12]}, byte tokenizer"
    if data == GENERATED:
        return f"generated text, {len(text) // 1000} kB, {digest}"
    return f"file {Path(data).name}, {len(text)} bytes, {digest}"
