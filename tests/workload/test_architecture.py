"""Architectures of one's own, and the published ones against transformers."""

from itertools import chain

import pytest

from stepmark.core.ops import Attention, CrossEntropy, Gemm, Phase
from stepmark.workload.architecture import Architecture, Batch, unit
from stepmark.workload.published import PUBLISHED


def shapes(made: Architecture) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for one in made.units:
        found += [param.shape for param in one.params] * one.times
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_transformers_in_its_order(name: str) -> None:
    import torch
    import transformers

    kinds = {
        "gpt-j-6b": (transformers.GPTJForCausalLM, transformers.GPTJConfig),
        "bigbird-roberta-base": (transformers.BigBirdForMaskedLM, transformers.BigBirdConfig),
    }
    model, config = kinds[name]
    with torch.device("meta"):
        real = [tuple(param.shape) for param in model(config()).parameters()]
    assert shapes(PUBLISHED[name](Batch(mbs=1, seq_len=128))) == real


@pytest.mark.parametrize(("name", "tied"), [("gpt-j-6b", 0), ("bigbird-roberta-base", 1)])
def test_forward_products_are_two_per_token_and_weight(name: str, tied: int) -> None:
    batch = Batch(mbs=2, seq_len=1024)
    made = PUBLISHED[name](batch)
    flops = dict.fromkeys(Phase, 0)
    for one in made.units:
        for op in chain.from_iterable((*part.fwd, *part.bwd) for part in one.parts):
            if isinstance(op.op, Gemm):
                flops[op.phase] += one.times * op.op.flops
    tables = ("wte", "word_embeddings", "position_embeddings", "token_type_embeddings")
    weights = 0
    for one in made.units:
        for param in one.params:
            looked_up = any(table in param.name for table in tables)
            if len(param.shape) == 2 and not looked_up and "pooler" not in param.name:
                weights += one.times * param.numel
    weights += tied * 50358 * 768
    pooler = 2 * batch.mbs * 768 * 768 if tied else 0
    assert flops[Phase.FWD] == 2 * batch.tokens * weights + pooler
    assert flops[Phase.DGRAD] == flops[Phase.WGRAD] == flops[Phase.FWD]


def test_block_sparse_attention_is_linear_in_the_sequence() -> None:
    def pairs(seq_len: int) -> int:
        made = PUBLISHED["bigbird-roberta-base"](Batch(mbs=1, seq_len=seq_len))
        ops = chain.from_iterable(part.fwd for part in made.units[1].parts)
        return sum(one.op.pairs for one in ops if isinstance(one.op, Attention))

    assert pairs(704) == 704**2  # attended whole
    # ends see all, their neighbours 7 blocks, the rest 8
    assert pairs(4096) == 128 * 4096 + 128 * 7 * 64 + (4096 - 256) * 8 * 64
    assert pairs(8192) - pairs(4096) == 128 * 4096 + 4096 * 8 * 64


def test_own_architecture() -> None:
    batch = Batch(mbs=1, seq_len=8)
    table = unit("embed", batch.embedding("table", 100, 16))
    block = unit(
        "layers", batch.norm("norm", 16), batch.linear("mlp", 16, 16, bias=True), times=4
    )
    head = unit("head", batch.linear("head", 100, 16), batch.loss("loss", 100))
    made = Architecture(name="mine", units=(table, block, head))
    assert made.num_params == 1600 + 4 * (32 + 256 + 16) + 1600
    last = made.units[-1].parts[-1]
    assert [op.phase for op in (*last.fwd, *last.bwd)] == [Phase.FWD, Phase.BWD]
    assert isinstance(last.fwd[0].op, CrossEntropy)
