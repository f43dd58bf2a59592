"""What test_techniques runs on two gloo ranks: what each technique learns."""

from dataclasses import replace
from typing import Any

import torch
from tests.training.curves import FEW_STEPS, STEPS, losses, small, spread

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import CompileScope, Fp8, GradSync, Precision, Recompute
from stepmark.measuring.ranks import Ranks
from stepmark.training import parallelize, trainer
from stepmark.training.messages import MessageRecorder
from stepmark.training.transformer import canonical_name

MODEL = small("llama-3.1-8b", 2)
HALF: dict[str, Any] = {"recompute": Recompute.BLOCKS, "recompute_blocks": (1, 2)}
FULL: dict[str, Any] = {"recompute": Recompute.FULL}
OPS: dict[str, Any] = {"recompute": Recompute.OPS}
CHUNKS: dict[str, Any] = {"loss_chunks": 4}
TWICE: dict[str, Any] = {"grad_accum": 2}
LAST: dict[str, Any] = {**TWICE, "grad_sync": GradSync.LAST}
AMP: dict[str, Any] = {"precision": Precision.AMP}
BF16: dict[str, Any] = {"precision": Precision.BF16}
FP8: dict[str, Any] = {**AMP, "fp8": Fp8.TENSORWISE}
BLOCKS: dict[str, Any] = {"compile": CompileScope.BLOCK}

# What changes nothing but the order of sums, and what it is to be like.
EXACT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sac 1/2": (HALF, {}),
    "sac full": (FULL, {}),
    "sac ops": (OPS, {}),
    "chunks": (CHUNKS, {}),
    "chunks, sac ops": (CHUNKS | OPS, {}),
    "reduced at the last": (LAST, TWICE),
    "reduced at the last, sac full, chunks": (LAST | FULL | CHUNKS, TWICE),
}
ROUNDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "amp": (AMP, {}),
    "bf16": (BF16, {}),
    "bf16, sac ops, chunks": (BF16 | OPS | CHUNKS, {}),
}
# Of FSDP alone.
OF_FSDP: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp8": (FP8, AMP),
    "fp8 all-gather": (FP8 | {"fp8_all_gather": True}, AMP),
    "fp8 all-gather and head": (FP8 | {"fp8_all_gather": True, "fp8_head": True}, AMP),
    "compile, sac ops": (BLOCKS | OPS, {}),
}
MASTER: dict[str, Any] = {"precision": Precision.MASTER}
OF_DDP: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "master, reduced at the last": (MASTER | LAST, MASTER | TWICE),
}
LAYOUTS = {"ddp": {"dp_replicate": 2}, "fsdp": {"dp_shard": 2}}


def cases() -> dict[str, TrainCase]:
    """By layout and technique, "fsdp: amp"; what that is compared with is "fsdp: like amp"."""
    found: dict[str, TrainCase] = {}
    for layout, axes in LAYOUTS.items():
        techniques = EXACT | ROUNDED | (OF_FSDP if layout == "fsdp" else OF_DDP)
        for name, (values, like) in techniques.items():
            plain = spread(MODEL, layout, **axes)
            found[f"{layout}: {name}"] = replace(plain, **values)
            found[f"{layout}: like {name}"] = replace(plain, **like)
    return found


def kinds(case: TrainCase, ranks: Ranks) -> dict[str, str]:
    """Of layers by name, and of what FSDP holds of the first product's weight."""
    (model,) = trainer.make(case, ranks.device).models
    found = {canonical_name(name): part for name, part in model.named_modules()}
    weight: Any = found["blocks.0.attention.qkv"].weight
    held = type(weight.to_local() if hasattr(weight, "to_local") else weight).__name__
    return {name: type(part).__name__ for name, part in found.items()} | {"held": held}


def reduced_bytes(case: TrainCase, ranks: Ranks) -> int:
    """Of gradients, in the backward passes of one optimizer step."""
    made = trainer.make(case, ranks.device)
    tokens = torch.zeros((case.mbs, case.model.seq_len), dtype=torch.int64)

    def step(recorder: MessageRecorder) -> None:
        def mark(name: str) -> None:
            recorder.phase = "backward" if name == "fwd" else ""

        with recorder:
            for index in range(case.grad_accum):
                is_last = index + 1 == case.grad_accum
                made.micro_step(tokens, tokens, is_last=is_last, mark=mark)
            made.optimizer_step()

    for _ in range(2):  # DDP's first pass finds its buckets
        step(recorder := MessageRecorder())
    return sum(
        kind.call_bytes * tally.calls
        for kind, tally in recorder.histogram()
        if kind.phase == "backward" and kind.collective in ("all_reduce", "reduce_scatter")
    )


def curves_kinds_and_bytes(
    ranks: Ranks, names: list[str], backend: str = "aot_eager"
) -> dict[str, Any]:
    """Return losses of these cases, and of what they are compared with; of all FP8 cases the
    kinds of layers and of a weight; and how many bytes of gradients two micro-steps reduce.

    backend: of torch.compile.
    """
    parallelize._how = lambda _case: {"backend": backend, "dynamic": False}
    wanted = {*names, *(name.replace(": ", ": like ", 1) for name in names)}
    found = {name: case for name, case in cases().items() if name in wanted}
    steps: dict[str, int] = {}  # by case: as many as a comparison with it needs
    for name, case in found.items():
        is_exact = name.partition(": ")[2].removeprefix("like ") in EXACT
        needed = FEW_STEPS if is_exact else STEPS
        steps[case.case_id] = max(needed, steps.get(case.case_id, 0))
    known: dict[str, list[float]] = {}
    for case in found.values():
        if case.case_id not in known:
            known[case.case_id] = losses(case, ranks, steps[case.case_id])
    curves = {name: known[case.case_id] for name, case in found.items()}
    layers = {name: kinds(case, ranks) for name, case in cases().items() if case.fp8 != "none"}
    reduced = {
        f"{layout}: {sync.value}": reduced_bytes(
            replace(spread(MODEL, layout, **axes), grad_accum=2, grad_sync=sync), ranks
        )
        for layout, axes in LAYOUTS.items()
        for sync in GradSync
    }
    return {"curves": curves, "kinds": layers, "reduced": reduced}
