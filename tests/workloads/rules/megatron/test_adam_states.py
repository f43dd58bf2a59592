"""Adam with narrower states: bytes, traffic, and types of messages."""

from dataclasses import replace
from typing import Any

import pytest

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Optimizer, Phase
from stepmark.model.parallel import ParallelConfig
from stepmark.step.workload import CommOp, ComputeOp, Kernel, Workload
from stepmark.step_memory.megatron_memory import stage_memories
from stepmark.workloads.job import Job
from stepmark.workloads.rules.megatron import adam_states
from stepmark.workloads.rules.megatron.narrow import Fp8Format, Fp8Recipe
from stepmark.workloads.rules.megatron.plan import make_plan
from stepmark.workloads.rules.megatron.rule import workload
from stepmark.workloads.rules.megatron.settings import Megatron, StateDtype

from .jobs import DENSE

AWARE = Megatron(use_distributed_optimizer=True, use_precision_aware_optimizer=True)
# Bytes of a parameter's states that FusedAdam.initialize_state of TransformerEngine 2.11 made
# on a CPU: weights of the model, main weights, both moments.
FUSED_ADAM = {
    ("bf16", "fp32", "fp32", "fp32"): 10,
    ("bf16", "fp32", "bf16", "bf16"): 6,
    ("bf16", "fp32", "fp8", "fp16"): 5,
    ("bf16", "fp32", "fp8", "fp8"): 4,
    ("bf16", "fp16", "fp32", "fp32"): 10,
    ("bf16", "fp16", "fp8", "fp8"): 4,
    ("fp16", "fp32", "fp32", "fp32"): 12,
    ("fp16", "fp32", "bf16", "bf16"): 8,
    ("fp16", "fp32", "fp8", "fp8"): 6,
    ("fp16", "fp16", "fp8", "fp16"): 5,
}


def narrow(main: str = "fp32", first: str = "fp32", second: str = "fp32") -> Megatron:
    return replace(
        AWARE,
        main_params_dtype=StateDtype(main),
        exp_avg_dtype=StateDtype(first),
        exp_avg_sq_dtype=StateDtype(second),
    )


def job_of(dtype: str = "bf16") -> Job:
    return Job(model=DENSE, parallel=ParallelConfig(dp_shard=4), gbs=4, dtype=DType(dtype))


@pytest.mark.parametrize(("types", "size"), FUSED_ADAM.items())
def test_states_have_the_bytes_of_fused_adam(
    types: tuple[str, str, str, str], size: int
) -> None:
    weights, *states = types
    job = job_of(weights)
    settings = narrow(*states)
    assert adam_states.state_bytes(make_plan(job, settings)) == size
    (memory,) = stage_memories(job, settings)
    (wide,) = stage_memories(job, replace(AWARE, use_precision_aware_optimizer=False))
    assert memory.optimizer_bytes / wide.optimizer_bytes == size / 12


def test_main_weights_stay_in_fp32_beside_other_recipes() -> None:
    """Only delayed scaling is cast by Adam's kernel (OptimizerConfig.__post_init__)."""
    settings = replace(
        narrow(first="bf16", second="bf16"),
        fp8_format=Fp8Format.HYBRID,
        fp8_recipe=Fp8Recipe.TENSORWISE,
    )
    plan = make_plan(job_of(), settings)
    assert adam_states.state_bytes(plan) == 4 + 2 + 2
    delayed = make_plan(job_of(), replace(settings, fp8_recipe=Fp8Recipe.DELAYED))
    assert adam_states.state_bytes(delayed) == 2 + 2 + 2


def update_of(made: Workload) -> dict[str, int]:
    """Bytes of the optimizer's kernels by name."""
    return {
        op.op.name: op.op.bytes_moved or 0
        for op in made.expand(0)
        if isinstance(op, ComputeOp)
        and isinstance(op.op, Kernel)
        and op.phase is Phase.OPTIM
        and op.module.startswith("optimizer")
    }


def test_one_kernel_updates_weights_of_both_types() -> None:
    """Gradients in, weights, remainders and moments both ways: no copy of weights follows."""
    plain = workload(job_of(), replace(AWARE, use_precision_aware_optimizer=False))
    (adam,) = (
        op.op
        for op in plain.expand(0)
        if isinstance(op, ComputeOp) and isinstance(op.op, Optimizer)
    )
    count = adam.num_params
    assert update_of(plain) == {"gradient_norm": 4 * count, "parameter_copy": 6 * count}
    each = 4 + 2 * 2 + 2 * 2 + 2 * (4 + 4)
    sizes = update_of(workload(job_of(), AWARE))
    assert sizes == {"gradient_norm": 4 * count, "adamw": each * count}


@pytest.mark.parametrize(
    ("state", "unscale", "scale"),
    # A copy to fp32; with fp16 its product with a scale. Back: the largest magnitude, the
    # product, the copy; with bf16 a cast and a copy.
    [("bf16", 2 + 4, 4 + 2 + 2 + 2), ("fp16", 6 + 8, 4 + 8 + 6), ("fp8", 1 + 4, 4 + 4 + 1)],
)
def test_narrow_states_are_fp32_while_they_are_updated(
    state: str, unscale: int, scale: int
) -> None:
    wide = update_of(workload(job_of(), AWARE))
    sizes = update_of(workload(job_of(), narrow(first=state)))
    count = wide["gradient_norm"] // 4
    assert sizes == wide | {"unscale": unscale * count, "scale": scale * count}
    plan = make_plan(job_of(), narrow(first=state, second=state))
    assert adam_states.temporary_bytes(plan) == 8


def test_temporary_states_may_be_more_than_the_passes_have() -> None:
    few_tokens = replace(DENSE, seq_len=8)
    job = replace(job_of(), model=few_tokens)
    settings = narrow(first="fp8", second="fp8")
    (memory,) = stage_memories(job, settings)
    assert memory.working_bytes == 2 * memory.optimizer_bytes  # 8 bytes for 4
    assert memory.activations_bytes == memory.head_bytes == 0


def test_main_gradients_in_bf16_are_reduced_so() -> None:
    made = workload(job_of(), replace(AWARE, main_grads_dtype=StateDtype.BF16))
    kinds = {
        op.dtype for op in made.expand(0) if isinstance(op, CommOp) and op.module == "gradients"
    }
    assert kinds == {DType.BF16}
    assert (
        update_of(made)["gradient_norm"] * 2
        == update_of(workload(job_of(), AWARE))["gradient_norm"]
    )
    assert "gradient_cast" not in update_of(made)


@pytest.mark.parametrize(
    ("dtype", "changes", "words"),
    [
        ("bf16", {"use_distributed_optimizer": False}, "only with use_distributed_optimizer"),
        ("fp32", {}, "only with bf16 or fp16"),
        ("fp16", {"main_grads_dtype": StateDtype.BF16}, "main_grads_dtype bf16.*without bf16"),
        ("bf16", {"main_grads_dtype": StateDtype.FP16}, "main_grads_dtype fp16.*fp32 or bf16"),
        ("bf16", {"main_params_dtype": StateDtype.BF16}, "main_params_dtype.*fp32 or fp16"),
        (
            "bf16",
            {"fp8_format": Fp8Format.HYBRID, "fp8_param_gather": True},
            "false with fp8_param_gather",
        ),
    ],
)
def test_what_megatron_refuses(dtype: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        workload(job_of(dtype), replace(AWARE, **changes))
