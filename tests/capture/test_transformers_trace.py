"""Families that are traced through transformers, against transformers and torch."""

import json
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Attention, Gemm, GroupedGemm, Phase
from stepmark.model.ops.attention import masked_pairs
from stepmark.model.parallel import ParallelConfig
from stepmark.step.workload import Kernel
from stepmark.workloads.architecture import Architecture, Batch
from stepmark.workloads.formats.huggingface.config import read_config
from stepmark.workloads.formats.huggingface.families import FAMILIES
from stepmark.workloads.formats.huggingface.trace import Trace, TraceRequest
from stepmark.workloads.formats.huggingface.traced_units import architecture_of
from stepmark.workloads.job import Job, with_seq_len
from stepmark.workloads.rules.deepspeed import huggingface

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, which are not ours

SEQ = 64
BATCH = Batch(mbs=2, seq_len=SEQ)
ZAMBA2 = ["linear_attention", "hybrid"] * 2
SMALL: dict[str, dict[str, Any]] = {
    "apertus": {"num_hidden_layers": 3},
    "bart": {"decoder_layers": 2, "encoder_layers": 1},
    "biogpt": {"num_hidden_layers": 3},
    "diffllama": {"num_hidden_layers": 3},
    "doge": {"num_hidden_layers": 3},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "num_kv_shared_layers": 2,
    },
    "jais2": {"num_hidden_layers": 2},
    "jamba": {"num_hidden_layers": 9},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "minicpm3": {"num_hidden_layers": 3},
    "mpt": {"n_layers": 3},
    "nanochat": {"num_hidden_layers": 3},
    "openai-gpt": {"n_layer": 3},
    "persimmon": {"num_hidden_layers": 2},
    "xglm": {"num_layers": 2},
    "zamba2": {"num_hidden_layers": 4, "layer_types": ZAMBA2, "hybrid_layer_ids": [1, 3]},
}
# Families that have readers, too.
READ = {"apertus", "lfm2", "persimmon"}
# Without experts, whose products torch 2.13 does not count.
DENSE = sorted(SMALL.keys() - {"jamba", "bart", "zamba2"})


def module() -> Any:
    """transformers takes as long to import as torch, so that only its tests do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from stepmark.capture import transformers_trace
    return transformers_trace


def request(family: str, **keys: Any) -> TraceRequest:
    config = {"model_type": family, **SMALL.get(family, {}), **keys}
    return TraceRequest(config=config, mbs=BATCH.mbs, seq_len=SEQ, dtype="bfloat16")


@cache
def trace(family: str) -> Trace:
    result: Trace = module().trace(request(family))
    return result


def traced(family: str) -> Architecture:
    return architecture_of(trace(family), family, BATCH, "config.json")


def operations(architecture: Architecture, *, backward: bool) -> Iterator[tuple[Any, int]]:
    """Yield each operator of a pass with the number of times that it runs."""
    for unit in architecture.units:
        for piece in unit.walk():
            for op in piece.bwd if backward else piece.fwd:
                yield op.op, unit.times


def flops(op: Any) -> int:
    """Return an operator's FLOPs, of attention with the half that a causal mask leaves out."""
    if not isinstance(op, Attention):
        return op.flops or 0
    passes = 1 if op.phase is Phase.FWD else 2
    pairs = op.batch * op.heads * op.seq_q * op.seq_kv
    return passes * 2 * pairs * (op.head_dim_qk + op.head_dim_v)


def counted(family: str, *, backward: bool) -> int:
    """Return the FLOPs that torch counts of the class, with eager attention."""
    from transformers import PreTrainedModel, masking_utils

    trace(family)  # which registers the attention that build asks for
    model, _ = module().build(request(family))
    with torch.device("meta"):
        model = type(model)._from_config(
            model.config, attn_implementation="eager", dtype=torch.bfloat16
        )
    model.train(False)
    tokens = torch.zeros((BATCH.mbs, SEQ), dtype=torch.long, device="meta")
    counter = FlopCounterMode(display=False)
    with (
        mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None),
        mock.patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask"),
        counter,
    ):
        logits = model(input_ids=tokens, use_cache=False).logits
        if not backward:
            return counter.get_total_flops()
        before = counter.get_total_flops()
        logits.backward(torch.empty_like(logits))
        return counter.get_total_flops() - before


@pytest.mark.parametrize("family", sorted(SMALL))
def test_each_parameter_is_in_one_unit(family: str) -> None:
    units = traced(family).units
    model, _ = module().build(request(family))
    assert family not in FAMILIES or family in READ
    assert traced(family).num_params == sum(param.numel() for param in model.parameters())
    names = [
        name
        for unit in units
        for copy in range(unit.times)
        for name in (f"{unit.name}.{copy}.{param.name}" for param in unit.params)
    ]
    assert len(names) == len({*names}) == len(list(model.parameters()))


@pytest.mark.parametrize("family", ["apertus", "lfm2", "mpt", "minicpm3", "jamba"])
def test_parameters_are_registered_in_the_order_of_transformers(family: str) -> None:
    shapes = [
        param.shape
        for unit in traced(family).units
        for _ in range(unit.times)
        for param in unit.registered_params
    ]
    model, _ = module().build(request(family))
    assert shapes == [tuple(param.shape) for param in model.parameters()]


@pytest.mark.parametrize("family", DENSE)
def test_the_forward_pass_has_the_flops_that_torch_counts(family: str) -> None:
    ours = sum(times * flops(op) for op, times in operations(traced(family), backward=False))
    assert ours == counted(family, backward=False)


@pytest.mark.parametrize("family", ["apertus", "mpt", "nanochat"])
def test_the_backward_pass_has_the_flops_that_torch_counts(family: str) -> None:
    ours = sum(times * flops(op) for op, times in operations(traced(family), backward=True))
    assert ours == counted(family, backward=True)


def test_experts_compute_the_rows_that_are_routed_to_them() -> None:
    """Jamba has 16 experts, of which a token takes two, in each second layer."""
    products = Counter(
        {
            op: times
            for op, times in operations(traced("jamba"), backward=False)
            if isinstance(op, GroupedGemm)
        }
    )
    assert {op.tokens for op in products} == {2 * BATCH.tokens}
    assert {(op.num_groups, op.n, op.k) for op in products} == {
        (16, 2 * 14336, 4096),
        (16, 4096, 14336),
    }


NATIVE: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    },
    "qwen3": {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1000,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 128,
        "vocab_size": 1000,
    },
}


def products(architecture: Architecture) -> Counter[tuple[Any, ...]]:
    """Return products and attention of both passes with the number of times they run."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for backward in (False, True):
        for op, times in operations(architecture, backward=backward):
            if isinstance(op, Gemm):
                counts[backward, op.m, op.n, op.k, op.dtype] += times
            elif isinstance(op, Attention):
                counts[backward, op] += times
    return counts


@pytest.mark.parametrize("family", NATIVE)
def test_a_family_with_a_reader_is_the_same_through_transformers(
    family: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": family, **NATIVE[family]}))
    model = with_seq_len(read_config(path), SEQ)
    job = Job(model=model, parallel=ParallelConfig(), mbs=BATCH.mbs, gbs=BATCH.mbs)
    native = huggingface.architecture(job)
    through = architecture_of(
        module().trace(request(family, **NATIVE[family])), family, BATCH, "config.json"
    )
    assert through.num_params == native.num_params == model.num_params
    assert products(through) == products(native)
    assert through.num_layers == native.num_layers


@given(st.integers(2, 40), st.integers(1, 50))
def test_a_window_is_read_off_the_masks_function(seq: int, window: int) -> None:
    """The pairs are those of transformers' own mask, but for half of the diagonal."""
    module()
    from transformers import masking_utils

    from stepmark.capture.transformers_recorder import _mask

    function = masking_utils.sliding_window_causal_mask_function(window)
    sizes = {"batch_size": 1, "q_length": seq, "kv_length": seq, "mask_function": function}
    causal, width = _mask(**sizes, local_size=window).mask
    real = masking_utils.sdpa_mask(**sizes, device="cpu", allow_is_causal_skip=False)
    assert causal
    num_halves = min(width or seq, seq)  # queries whose window begins before the sequence
    assert 0 <= int(real.sum()) - masked_pairs(seq, width) - num_halves // 2 <= 1


def test_chunks_are_refused() -> None:
    module()
    from transformers import masking_utils

    from stepmark.capture.transformers_recorder import _mask

    function = masking_utils.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int))
    with pytest.raises(ConfigError, match="chunks of 8"):
        _mask(1, 32, 32, function, local_size=8)


def test_a_scan_is_a_fused_kernel_and_no_loop_over_tokens() -> None:
    """Jamba's scan has u, dt, z and y of [batch, width, seq]; a loop has a state for each."""
    assert not trace("jamba").loops
    first = traced("jamba").units[1]
    num_bytes = sum(
        op.op.bytes_moved or 0
        for op in first.fwd[0]
        if isinstance(op.op, Kernel) and op.op.name == "elementwise"
    )
    width = 2 * 4096
    state = 16
    assert 2 * 4 * BATCH.tokens * width < num_bytes < 2 * 4 * BATCH.tokens * width * state


def test_kernels_of_gradients_move_the_bytes_that_autograd_moves() -> None:
    """1.5 x those of the forward pass, of a class whose kernels torch runs one by one."""
    ours = [
        sum(
            times * op.bytes_moved
            for op, times in operations(traced("lfm2"), backward=backward)
            if isinstance(op, Kernel) and op.name == "elementwise"
        )
        for backward in (False, True)
    ]
    assert ours[1] == pytest.approx(1.5 * ours[0], rel=0.1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5"}, "family with a causal language model"),
        ({"model_type": "nobody", "auto_map": {"AutoConfig": "x.Y"}}, "is never run"),
        ({"model_type": "rwkv", "num_hidden_layers": 1}, "no loop over tokens"),
        ({"model_type": "hrm_text", "num_hidden_layers": 2}, "calls each of its layers once"),
        ({"model_type": "lfm2", "hidden_size": "x"}, "hidden_size"),
        ({"model_type": "lfm2", "hidden_size": 7}, "can be traced"),
        ({"model_type": "openai-gpt", "n_positions": 32}, "at most 32, the rows of"),
        ({"model_type": "longcat_flash", "num_layers": 1}, "depends on values of tensors"),
    ],
)
def test_a_class_that_cannot_be_traced_is_refused(config: dict[str, Any], message: str) -> None:
    seq_len = 512 if config["model_type"] == "rwkv" else SEQ
    sizes = {"mbs": 1, "seq_len": seq_len}
    answer = module()._answer(TraceRequest(config=config, dtype="bfloat16", **sizes))
    if refusal := answer.refusal:
        assert message in str(ConfigError(refusal.field, refusal.value, refusal.allowed))
    else:
        with pytest.raises(ConfigError, match=message):
            architecture_of(answer.trace, "x", Batch(**sizes), "config.json")
