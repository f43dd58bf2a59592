"""What test_context_parallel runs on two gloo ranks that share each sequence."""

import functools
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from tests.training import curves
from tests.training.curves import FEW_STEPS, SHORT, SHORT_GPT2, spread
from tests.training.techniques_on_ranks import AMP, BLOCKS, FP8, FULL, HALF, OPS

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import CompileScope
from stepmark.measuring.ranks import Ranks
from stepmark.training import trainer
from stepmark.training.messages import MessageRecorder

MODEL: dict[str, Any] = {"compile": CompileScope.MODEL}
CASES = {
    "plain": spread(SHORT, "ddp", cp=2),
    "recomputed": spread(SHORT, "ddp", FULL, cp=2),
    "sac ops": spread(SHORT, "fsdp", OPS, cp=2),
    "chunks": spread(SHORT_GPT2, "fsdp", {"loss_chunks": 4}, cp=2),
    "compiled blocks": spread(SHORT, "fsdp", BLOCKS, cp=2),
    "compiled blocks, learned positions": spread(SHORT_GPT2, "ddp", BLOCKS, cp=2),
    "compiled blocks, sac 1/2": spread(SHORT, "fsdp", BLOCKS | HALF, cp=2),
    "compiled model": spread(replace(SHORT, num_layers=1), "ddp", MODEL, cp=2),
}
ROUNDED = {
    "amp": replace(spread(SHORT, "ddp", cp=2), **AMP),
    "amp of shards": replace(spread(SHORT, "fsdp", cp=2), **AMP),
    "fp8": replace(spread(SHORT, "fsdp", cp=2), **FP8, fp8_all_gather=True),
}
INDUCTOR = ("compiled blocks",)
TOLD = ("plain", "recomputed")


def sent(case: TrainCase, ranks: Ranks) -> dict[str, tuple[int, int]]:
    """By phase and collective: calls, and bytes that this rank gives to one or gets of it."""
    made = trainer.make(case, ranks.device)
    shape = (case.mbs, case.model.seq_len // case.parallel.cp)
    tokens = torch.zeros(shape, dtype=torch.int64)
    recorder = MessageRecorder()

    def mark(name: str) -> None:
        recorder.phase = "backward" if name == "fwd" else ""

    with recorder:
        recorder.phase = "forward"
        made.micro_step(tokens, tokens, is_last=True, mark=mark)
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for kind, tally in recorder.histogram():
        if kind.collective in ("all_gather", "reduce_scatter"):
            name = f"{kind.phase} {kind.collective}"
            found[name] = found[name][0] + tally.calls, kind.call_bytes
    return dict(found)


def learned_and_sent(ranks: Ranks, names: list[str]) -> dict[str, Any]:
    """Losses and first gradient norm of these cases; and what a step of attention sends, as
    (calls, bytes of a call) by phase and collective.

    One case goes through all of the compiler. The others stop where code would be generated:
    what the collectives change is decided before, and generating takes most of the time.
    """
    whole = torch.compile
    learned: dict[str, Any] = {}
    for name in names:
        torch.compiler.reset()
        backend = "inductor" if name in INDUCTOR else "aot_eager"
        torch.compile = functools.partial(whole, backend=backend)  # type: ignore[assignment]
        learned[name] = curves.learned((CASES | ROUNDED)[name], ranks, FEW_STEPS)
    return {"learned": learned, "sent": {name: sent(CASES[name], ranks) for name in TOLD}}
