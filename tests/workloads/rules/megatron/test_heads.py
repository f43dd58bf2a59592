"""Attention by heads over real ranks equals that of one, with the messages of a workload."""

from collections import Counter
from dataclasses import replace

import pytest
from tests.ranks_pool import Pool

from stepmark.model.layers import Layer
from stepmark.model.ops import Attention
from stepmark.workloads.rules.megatron.rule import Megatron, workload
from stepmark.workloads.rules.megatron.settings import CpComm

from .heads_on_ranks import by_heads
from .jobs import SINKS, comms, computes, make

WINDOWS = (16, 0)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_heads_are_exchanged_as_real_ranks_do(num_ranks: int) -> None:
    pattern = tuple(Layer(window=window) for window in WINDOWS)
    model = replace(SINKS, num_layers=len(WINDOWS), pattern=pattern)
    settings = Megatron(cp_comm_type=CpComm.A2A)
    program = workload(make(model, microbatches=1, cp=num_ranks), settings)
    cores = [op.op for op in computes(program, 0) if isinstance(op.op, Attention)]
    assert {core.window for core in cores} == set(WINDOWS)
    (core, *_) = cores
    case = {
        "batch": core.batch,
        "seq": core.seq_q,
        "heads": core.heads * num_ranks,
        "kv_heads": core.kv_heads * num_ranks,
        "head_dim": core.head_dim_qk,
    }
    calls: Counter[tuple[str, str, int]] = Counter()
    with Pool(num_ranks) as pool:
        for window in WINDOWS:
            answers = pool.run(by_heads, case | {"window": window}, timeout_s=120)
            for error, of_rank in answers:
                assert error < 1e-12
                assert of_rank == answers[0][1]
            calls += Counter(answers[0][1])
    # Counts of a workload are of the part for one rank.
    sent = Counter(
        (str(op.phase), str(op.collective), op.count * num_ranks)
        for op in comms(program, 0, "attention.core")
    )
    assert sent == calls
