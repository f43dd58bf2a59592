"""Batches of tokens through a DataLoader, as a training job gets them.

Sequence number s of a seed is always the same. Micro-step i of n data ranks has the sequences
from i * n * mbs on, each rank mbs of them: neither the number of workers nor how many data
ranks share a batch changes what is learned from.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from stepmark.bench.training import text
from stepmark.bench.training.mesh import SequenceShard
from stepmark.core.errors import ConfigError
from stepmark.core.train_case import TrainCase

RANDOM = "random"
_BYTES = 256  # tokens of a byte tokenizer
_PREFETCH = 2  # batches that each worker makes ahead

Batch = tuple[torch.Tensor, torch.Tensor]
_WHOLE = SequenceShard(rank=0, num_ranks=1)


class Sequences(IterableDataset[Batch]):
    """Whole micro-batches (tokens_BT, labels_BT) without end; labels are one token ahead."""

    def __init__(
        self, case: TrainCase, data_rank: int, num_data_ranks: int, share: SequenceShard
    ) -> None:
        self._vocab_size = case.model.vocab_size
        self._length = case.model.seq_len + 1
        self._mbs = case.mbs
        self._seed = case.seed
        self._data_rank = data_rank
        self._num_data_ranks = num_data_ranks
        self._share = share
        self._text: torch.Tensor | None = None
        if case.data == RANDOM:
            return
        if self._vocab_size < _BYTES:
            allowed = f"at least {_BYTES}, the byte tokenizer's, for a text"
            raise ConfigError("vocab_size", self._vocab_size, allowed)
        content = bytearray(text.read(case.data, at_least=self._length))
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
        """This data rank's part of a micro-step."""
        number = (micro_step * self._num_data_ranks + self._data_rank) * self._mbs
        drawn_BT = torch.empty((self._mbs, self._length), dtype=torch.int64)
        for row, drawn_T in enumerate(drawn_BT):
            generator.manual_seed(_seed_of(self._seed, number + row))
            self._draw(drawn_T, generator)
        tokens_BT, labels_BT = drawn_BT[:, :-1], drawn_BT[:, 1:]
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
    """Seeds near one another would be as good; a hash keeps (0, 1) and (1, 0) apart."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def _as_is(batch: Any) -> Any:
    return batch


def loader(
    case: TrainCase,
    data_rank: int,
    num_data_ranks: int,
    device: torch.device,
    share: SequenceShard = _WHOLE,
) -> Iterator[Batch]:
    """Endless (tokens_BT, labels_BT), int64 on the CPU, pinned where the device is CUDA.

    share: which tokens of each sequence a rank has, under context parallelism.
    Through a DataLoader with case.workers processes, which start here and end when the
    iterator is dropped. Raises ConfigError for a text that is not to be had.
    """
    batches = DataLoader(
        Sequences(case, data_rank, num_data_ranks, share),
        batch_size=None,
        collate_fn=_as_is,
        num_workers=case.workers,
        prefetch_factor=_PREFETCH if case.workers else None,
        pin_memory=device.type == "cuda",
    )
    return ((tokens_BT, labels_BT) for tokens_BT, labels_BT in batches)


def describe(case: TrainCase) -> str:
    """What is trained on, e.g. "random tokens, shifted labels". Raises ConfigError."""
    return "random tokens, shifted labels" if case.data == RANDOM else text.describe(case.data)
