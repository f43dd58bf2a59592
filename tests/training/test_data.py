"""Batches: the same for the same seed whoever shares them, shifted, and learnable."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmark.cases.train_case import TrainCase
from stepmark.ground.errors import ConfigError
from stepmark.model.model_tables import find_model
from stepmark.training import data
from stepmark.training.data import Batch, describe, loader

CPU = torch.device("cpu")
TINY = find_model("gpt2-125m").tiny()


def batches(case: TrainCase, count: int, data_rank: int = 0, ranks: int = 1) -> list[Batch]:
    return list(itertools.islice(loader(case, data_rank, ranks, CPU), count))


def case(**more: object) -> TrainCase:
    plain = TrainCase(model=TINY, mbs=2, device="cpu", backend="gloo")
    return dataclasses.replace(plain, **more)  # type: ignore[arg-type]


def same(left: list[Batch], right: list[Batch]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a, b) for one, two in pairs for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("data", ["random", "text"])
def test_labels_are_the_tokens_one_ahead(data: str) -> None:
    for tokens_BT, labels_BT in batches(case(data=data), 3):
        assert tokens_BT.shape == labels_BT.shape == (2, TINY.seq_len)
        assert tokens_BT.dtype == labels_BT.dtype == torch.int64
        assert torch.equal(tokens_BT[:, 1:], labels_BT[:, :-1])
        assert tokens_BT.is_contiguous()
        assert labels_BT.is_contiguous()


def test_random_tokens_are_all_of_the_vocabulary() -> None:
    tokens = torch.cat([tokens_BT.flatten() for tokens_BT, _ in batches(case(mbs=64), 16)])
    counts = torch.bincount(tokens, minlength=TINY.vocab_size)
    assert len(counts) == TINY.vocab_size
    mean = tokens.numel() / TINY.vocab_size  # 128, whose deviation is 11
    assert counts.min() > mean - 60
    assert counts.max() < mean + 60


def test_text_is_text() -> None:
    for tokens_BT, _ in batches(case(data="text"), 3):
        for tokens_T in tokens_BT:
            assert bytes(tokens_T.tolist()) in data.generated()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**63), st.sampled_from(["random", "text"]))
def test_a_seed_is_all_there_is(seed: int, data: str) -> None:
    asked = case(seed=seed, data=data)
    assert same(batches(asked, 2), batches(asked, 2))
    assert not same(batches(asked, 2), batches(case(seed=seed + 1, data=data), 2))
    first, second = batches(asked, 2)
    assert not torch.equal(first[0], second[0])


def test_workers_do_not_change_the_data() -> None:
    assert same(batches(case(workers=2), 5), batches(case(), 5))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_batch_of_one(ranks: int) -> None:
    whole = batches(case(mbs=4), 3)
    parts = [batches(case(mbs=4 // ranks), 3, rank, ranks) for rank in range(ranks)]
    joined = [
        (torch.cat([tokens for tokens, _ in step]), torch.cat([labels for _, labels in step]))
        for step in zip(*parts, strict=True)
    ]
    assert same(joined, whole)


def test_accumulation_goes_through_the_same_sequences() -> None:
    whole = torch.cat([tokens for tokens, _ in batches(case(mbs=4), 2)])
    assert torch.equal(torch.cat([tokens for tokens, _ in batches(case(mbs=1), 8)]), whole)


def test_a_text_of_one_sequence_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(TINY.seq_len + 1))
    batches(case(data=str(path)), 1)
    path.write_bytes(bytes(TINY.seq_len))
    with pytest.raises(ConfigError, match="at least 65 bytes"):
        loader(case(data=str(path)), 0, 1, CPU)


def test_bytes_need_a_vocabulary_of_256() -> None:
    small = dataclasses.replace(TINY, vocab_size=255)
    with pytest.raises(ConfigError, match="vocab_size 255 is invalid: it must be at least 256"):
        loader(case(model=small, data="text"), 0, 1, CPU)
    batches(case(model=small), 1)


def test_what_it_is_called() -> None:
    assert describe(case()) == "random tokens, shifted labels"
    assert describe(case(data="text")) == data.describe_text("text")


def test_thirty_steps_learn_the_text_and_not_the_noise() -> None:
    """A table of next letters alone falls far; of random tokens nothing can be learned."""

    def last_loss(data: str) -> float:
        torch.manual_seed(0)
        table = torch.nn.Embedding(TINY.vocab_size, TINY.vocab_size)
        torch.nn.init.zeros_(table.weight)
        optimizer = torch.optim.Adam(table.parameters(), lr=0.3)
        loss = torch.tensor(0.0)
        for tokens_BT, labels_BT in batches(case(data=data, mbs=8), 30):
            logits_BTV = table(tokens_BT)
            loss = torch.nn.functional.cross_entropy(logits_BTV.mT, labels_BT)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    assert last_loss("text") < 2.8
    assert last_loss("random") > 6.2  # ln 512 = 6.24
