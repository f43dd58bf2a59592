"""What gloo ranks send in one step of each case of test_workload_truth.

What the trainer has no switch for is put in its place here: the pool that runs it is then fit
for nothing else.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tests.training.curves import _batches
from tests.training.workload_cases import CASES, DDP, WITH_LORA, WITH_ROOT
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining.stage import _PipelineStageBase
from validation.ordered_messages import OrderedRecorder

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import DataParallel, Precision
from stepmark.measuring.ranks import Ranks
from stepmark.training import parallelize, trainer
from stepmark.training.layers import Experts
from stepmark.training.messages import PAIRS
from stepmark.training.model_parallel import Meshes, coordinates_of
from stepmark.training.optimizer import Update
from stepmark.training.transformer import Transformer

Row = tuple[str, str, int, int | None, tuple[int, ...], int | None, str]


class Recorder(OrderedRecorder):
    """In a pipeline phases overlap: a transfer's is that of the stage's call that made it."""

    def __init__(self, *, is_pipeline: bool) -> None:
        super().__init__()
        self.is_pipeline = is_pipeline
        self.rows: list[Row] = []
        self.by_buffer: dict[int, str] = {}

    def note(self, name: str, values: Sequence[Any], result: Any) -> None:
        first = len(self.ordered)
        super().note(name, values, result)
        for one in self.ordered[first:]:
            phase = one.kind.phase
            if self.is_pipeline and phase == "forward":
                phase = "backward" if one.in_backward else phase
                if name in PAIRS:
                    phase = self.by_buffer.get(values[0][0].data_ptr(), "")
            kind = one.kind
            self.rows.append(
                (
                    kind.collective,
                    kind.dtype,
                    kind.call_bytes,
                    kind.message_bytes,
                    one.members,
                    one.peer,
                    phase,
                )
            )


class Told:
    """What stages say of their calls to the recorder of the moment, and how DDP is called."""

    def __init__(self) -> None:
        self.recorder = Recorder(is_pipeline=False)
        self.changes: dict[str, Any] = {}  # to how DDP is called
        self.rank: int | None = None  # of adapters
        narrowed = parallelize.precision.apply_fp8

        def built(model: nn.Module, case: TrainCase) -> None:
            narrowed(model, case)
            if self.rank:
                adapt(model, self.rank)

        parallelize.precision.apply_fp8 = built
        self.fsdp = parallelize._fsdp
        wrapped = parallelize.DistributedDataParallel  # type: ignore[attr-defined]
        parallelize.DistributedDataParallel = (  # type: ignore[attr-defined]
            lambda *args, **values: wrapped(*args, **(values | self.changes))
        )
        for side in ("recv", "send"):
            self._tagged(f"get_fwd_{side}_ops", "forward")
            self._tagged(f"get_bwd_{side}_ops", "backward")
        self._in_backward(_PipelineStageBase, "perform_reduce_grad")
        self._in_backward(Update, "collect")

    def _in_backward(self, owner: Any, name: str) -> None:
        called = getattr(owner, name)

        def in_backward(one: Any, *args: Any) -> None:
            before, self.recorder.phase = self.recorder.phase, "backward"
            called(one, *args)
            self.recorder.phase = before

        setattr(owner, name, in_backward)

    def _tagged(self, name: str, phase: str) -> None:
        made = getattr(_PipelineStageBase, name)

        def tagged(stage: Any, microbatch: int) -> Any:
            ops = made(stage, microbatch)
            for op in ops:
                self.recorder.by_buffer[op.tensor.data_ptr()] = phase
            return ops

        setattr(_PipelineStageBase, name, tagged)


def of_root(model: Transformer, case: TrainCase, meshes: Meshes) -> None:
    """fully_shard as torch's tutorial calls it: on every block, then on the model."""
    is_amp = case.precision is Precision.AMP
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if is_amp else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for block in model.blocks.values():
        fully_shard(block, mesh=meshes.data(), mp_policy=policy)
    fully_shard(model, mesh=meshes.data(), mp_policy=policy)


class Adapted(nn.Linear):
    """A linear layer with an adapter beside it, as torchtitan's: components/lora.py."""

    lora_a: nn.Linear
    lora_b: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.lora_b(self.lora_a(x))
        return super().forward(x) + 2 * adapted


def adapt(model: nn.Module, rank: int) -> None:
    """Freeze the model, and put adapters beside the linear layers of its blocks."""
    model.requires_grad_(requires_grad=False)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and not name.endswith(("head", "router")):
            module.lora_a = nn.Linear(module.in_features, rank, bias=False)
            module.lora_b = nn.Linear(rank, module.out_features, bias=False)
            module.__class__ = Adapted


def evenly(self: Experts, x_NC: Tensor) -> tuple[Tensor, Tensor]:
    """Every expert gets as many rows: what a workload says of all-to-all."""
    rows = torch.arange(len(x_NC) * self.top_k, device=x_NC.device)
    experts_NK = rows.view(-1, self.top_k) % self.num_experts
    weights_NK = self.router(x_NC).float().softmax(dim=-1).gather(1, experts_NK)
    return weights_NK / weights_NK.sum(dim=-1, keepdim=True), experts_NK


def sent(case: TrainCase, ranks: Ranks, told: Told) -> tuple[list[Row], list[Row]]:
    """While all is made, and in a steady step: the second; DDP's buckets are the third's."""
    with Recorder(is_pipeline=False) as setup:
        made = trainer.make(case, ranks.device)
    batches = _batches(case, coordinates_of(ranks.rank, case.parallel))

    def step() -> Recorder:
        recorder = told.recorder = Recorder(is_pipeline=case.parallel.pp > 1)

        def mark(name: str) -> None:
            recorder.phase = "backward" if name == "fwd" else "forward"

        with recorder:
            for index in range(case.grad_accum):
                recorder.phase = "forward"
                tokens, labels = next(batches)
                is_last = index + 1 == case.grad_accum
                made.micro_step(tokens, labels, is_last=is_last, mark=mark)
            recorder.phase = "optimizer"
            made.optimizer_step()
        return recorder

    for _ in range(2 if case.data_parallel is DataParallel.DDP else 1):
        step()
    return setup.rows, step().rows


def sent_by_all(ranks: Ranks, names: list[str]) -> dict[str, list[list[Row]]]:
    """Return rows of these cases, by case and rank. Every rank calls it.

    A row is collective, dtype, call bytes, message bytes, members, peer and phase.
    """
    Experts.route = evenly  # type: ignore[method-assign]
    told = Told()
    found: dict[str, list[list[Row]]] = {}
    for name in names:
        case = CASES[ranks.num_ranks][name]
        told.changes = DDP.get(name, {})
        told.rank = WITH_LORA.get(name)
        parallelize._fsdp = of_root if name in WITH_ROOT else told.fsdp
        by_rank = ranks.gather(sent(case, ranks, told))
        found[name] = [step for _, step in by_rank]
        found[f"{name}, setup"] = [setup for setup, _ in by_rank]
    return found
