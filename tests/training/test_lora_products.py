"""Products of a step whose weights are frozen, against those that torch's autograd executes."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.training.models import made
from tests.training.workload_on_ranks import adapt
from torch.utils.flop_counter import FlopCounterMode

from stepmark.model.model_tables import find_model
from stepmark.model.ops import Gemm, Phase
from stepmark.step.workload import ComputeOp
from stepmark.workloads.job import Job
from stepmark.workloads.rules import RULES

RANK = 4


def executed(model: Any) -> Counter[Phase]:
    """FLOPs of matrix products by pass."""
    net = made(model)
    adapt(net, RANK)
    for parameter in net.parameters():
        parameter.data.normal_(std=0.02)
    tokens = torch.randint(model.vocab_size, (1, model.seq_len))
    found: Counter[Phase] = Counter()
    for phase in (Phase.FWD, Phase.BWD):
        with FlopCounterMode(display=False) as counter:
            if phase is Phase.FWD:
                loss = net(tokens, tokens)
            else:
                loss.backward()
        counts = counter.get_flop_counts()["Global"]
        names = (torch.ops.aten.mm, torch.ops.aten.addmm)
        found[phase] = sum(counts.get(name, 0) for name in names)
    return found


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2-125m", "qwen3-8b"])
def test_frozen_weights_cost_what_autograd_executes(name: str) -> None:
    """The table has no gradient, so that the first block's input needs none."""
    model = replace(find_model(name).tiny(), num_layers=3)
    rule = RULES["pytorch"]
    step = rule.workload(Job(model=model), rule.make(lora_rank=RANK))
    generated: Counter[Phase] = Counter()
    for op in step.expand():
        if isinstance(op, ComputeOp) and isinstance(op.op, Gemm):
            phase = Phase.FWD if op.phase is Phase.FWD else Phase.BWD
            generated[phase] += op.op.flops
    assert generated == executed(model)
