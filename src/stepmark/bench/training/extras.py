"""One more sample, untimed: its messages, or its trace."""

from pathlib import Path

import torch

from stepmark.bench.ranks import Ranks
from stepmark.bench.training.attention import prefix_kernel
from stepmark.bench.training.loop import Loop
from stepmark.bench.training.messages import MessageRecorder, merge
from stepmark.bench.training.profile import Profile
from stepmark.core.message import MessageKind, Tally
from stepmark.core.train_case import TrainCase

_PROFILED = 3  # samples


def messages(
    work: Loop, ranks: Ranks, case: TrainCase
) -> tuple[tuple[MessageKind, Tally], ...]:
    """What all ranks sent in one cycle, ranks counted together."""
    recorder = MessageRecorder()

    def begins(phase: str) -> None:
        # A pipeline's forward and backward passes cannot be told apart.
        mixed = case.parallel.pp > 1 and phase == "forward"
        recorder.phase = "" if mixed else phase

    with recorder:
        work.aside(on_phase=begins)
    return merge(ranks.gather(recorder.histogram()))


def profile(
    work: Loop, ranks: Ranks, case: TrainCase, folder: Path, *, chosen: bool, launch: int
) -> tuple[str, ...]:
    """Kineto traces of a few samples, whole cycles, on chosen ranks; all files' names."""
    name = f"train-{case.case_id[:16]}" + (f"-launch{launch}" if launch > 1 else "")
    held = Profile(folder, name, ranks.rank) if chosen else None
    if held:
        held.start()
    for _ in range(max(1, _PROFILED // case.cycle)):
        work.aside()
        if held:
            held.step()
    files = held.stop() if held else ()
    if held:
        (folder / f"{name}-rank{ranks.rank}.txt").write_text(held.table())
    return tuple(file for found in ranks.gather(tuple(files)) for file in found)


_KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}


def attention_kernel(case: TrainCase, device: torch.device) -> str:
    """Which of its kernels torch's scaled_dot_product_attention takes for these shapes.

    Under context parallelism that of queries which are the last of a sequence. "" where a
    full device has no room to ask.
    """
    if case.attention != "auto":
        return case.attention
    model, tp, cp = case.model, case.parallel.tp, case.parallel.cp
    low = torch.float32 if case.precision == "fp32" else torch.bfloat16
    heads, kv_heads = model.num_heads // tp, max(1, model.num_kv_heads // tp)
    length = model.seq_len if cp == 1 else model.seq_len // (2 * cp)
    shape = (case.mbs, heads, length, model.d_qk)
    try:
        query = torch.empty(shape, dtype=low, device=device, requires_grad=True)
        key = torch.empty(
            (case.mbs, kv_heads, model.seq_len, model.d_qk), dtype=low, device=device
        )
        value = torch.empty((*key.shape[:3], model.d_v), dtype=low, device=device)
        if cp > 1 and (kernel := prefix_kernel(query, value, "auto")):
            return kernel
        shape_of_mask = (length, model.seq_len)
        mask = torch.empty(shape_of_mask, dtype=torch.bool, device=device) if cp > 1 else None
    except torch.OutOfMemoryError:
        return ""
    found = torch._fused_sdp_choice(
        query, key, value, mask, is_causal=cp == 1, enable_gqa=heads != kv_heads
    )
    return _KERNELS.get(int(found), str(found))
