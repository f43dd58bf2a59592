"""Tensors of a training step of training on one rank, as they come and go."""

from collections import deque
from collections.abc import Iterable
from itertools import accumulate

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import GradSync, OptimizerKind, Precision, Recompute
from stepmark.ground.dtypes import DType
from stepmark.ground.units import MIB
from stepmark.model.ops import Phase
from stepmark.model.parallel import TpPlan
from stepmark.step.module import Module
from stepmark.step_memory.allocator import Allocator, Block
from stepmark.step_memory.fsdp_memory import FsdpMemory
from stepmark.step_memory.step_tensors import FP32, Formats, FsdpUnit, UnitBuilder, Weight
from stepmark.workloads.pipeline import Act, Action
from stepmark.workloads.rules.pytorch.fsdp_order import FsdpOrder
from stepmark.workloads.rules.pytorch.narrow_states import moment_bytes
from stepmark.workloads.rules.pytorch.order import Order, act_of
from stepmark.workloads.rules.pytorch.schedules import spans

# cuBLAS's on Hopper, for the thread of the forward pass and that of the backward pass.
_WORKSPACES = (32 * MIB, 32 * MIB)
BF16 = DType.BF16.itemsize
# torch's gradient of a lookup adds sorted segments of tokens where there are more than a few.
_FEW_LOOKUPS = 3072
_LOOKUPS_PER_SEGMENT = 10

# By leaf; then the head's logits, or gradients of a chunked loss.
_SavedTensors = list[list[Block]]
# Weights without a gradient yet, and the tensors from which it is computed.
_Waiting = list[tuple[list[Weight], list[Block]]]


def _actions(case: TrainCase, rank: int) -> list[Action]:
    """Return torch's schedule of a micro-step, without repetitions that need no more memory."""
    if case.parallel.pp == 1:
        return [act_of(Act.FORWARD), act_of(Act.BACKWARD)]
    order = Order(
        schedule=case.pp_schedule,
        num_ranks=case.parallel.pp,
        num_microbatches=case.num_microbatches,
        num_chunks=case.num_stages // case.parallel.pp,
    )
    actions: list[Action] = []
    for span in spans(order)[rank]:
        once = [action for tick in span.ticks for action in tick]
        acts = {action.act for action in once}
        is_steady = Act.FORWARD in acts and bool(acts & {Act.BACKWARD, Act.BACKWARD_WEIGHT})
        actions += once * (1 if is_steady else span.times)
    return actions


class StepMemory:
    """Replay of a pipeline stage's start and of optimizer steps."""

    def __init__(self, case: TrainCase, stage: int, root: Module) -> None:
        self.heap = Allocator()
        self._case = case
        self._stage = stage
        axes = case.parallel
        self._formats = Formats(case)
        self._keeps_grads = case.cuda_graph or case.compiles_graphs
        # By DDP's hook: gradients in bf16 beside those in fp32.
        self._compresses = self._formats.is_ddp and case.reduce_dtype is DType.BF16
        self._compresses = self._compresses and self._formats.stored_itemsize == FP32
        self._vocab = case.model.vocab_size  # of a rank's logits
        if case.tp_plan is TpPlan.TORCHTITAN:
            self._vocab //= axes.tp
        self._row_bytes = case.model.hidden_size * self._formats.itemsize
        self._tokens = -(-case.mbs // case.num_microbatches) * case.model.seq_len // axes.cp
        self._units = UnitBuilder(case).units(root, stage)
        self._actions = _actions(case, stage)
        self._weights = {id(x): x for unit in self._units for x in unit.all_weights}.values()
        self._stages = [(units, FsdpMemory(case, self.heap, units)) for units in self._divide()]
        self._matrices: dict[int, Weight] = {}  # that Muon updates
        if case.optimizer is OptimizerKind.MUON:
            blocks = [unit for unit in self._units if unit.name == "block"]
            weights = [weight for unit in blocks for weight in unit.all_weights]
            self._matrices = {id(x): x for x in weights if len(x.param.shape) == 2}
        self._added: list[Block] = []  # gradients that a compiled graph returns to be added
        self._later: _Waiting | None = None  # where gradients of weights are computed apart
        self._has_moments = False
        self._start()

    @property
    def _has_whole_table_grad(self) -> bool:
        """Return whether each rank has the gradient of all rows until the optimizer divides it.

        DTensor's lookup leaves it replicated over tp (torch 2.11 and 2.13). With FSDP, which
        reduces it, the estimate of steps is 3.6 % low on four H100 (docs/prediction.md).
        """
        case = self._case
        is_divided = case.parallel.tp > 1 and not self._formats.is_fsdp
        has_table = self._units[0].name == "embedding"
        return is_divided and has_table and not case.model.tied_embeddings

    @property
    def saved_bytes(self) -> int:
        """Bytes that blocks keep from a forward pass to its backward pass, without rounding."""
        sizes = (
            self._checkpoint_sizes(unit)
            if unit.is_checkpointed
            else (size for leaf in unit.leaves for size in leaf.keeps)
            for unit in self._units
            if unit.name == "block"
        )
        return self._tokens * sum(map(sum, sizes))

    def steps(self, count: int) -> None:
        """Run optimizer steps. Micro-steps after the second one repeat it."""
        micro_steps = min(self._case.grad_accum, 2)
        for _ in range(count):
            for number in range(micro_steps):
                self._micro_step(is_last=number == micro_steps - 1)
            self._optimize()

    # Start

    def _divide(self) -> list[list[FsdpUnit]]:
        """Return the units of each stage of this rank, as many as have layers or ends."""
        by_stage = self._case.stage_layers
        sizes = [len(by_stage[stage]) for stage in self._case.stages_of(self._stage)]
        sizes[0] += self._units[0].name == "embedding"
        sizes[-1] += self._units[-1].name == "output"
        ends = list(accumulate(sizes))
        return [self._units[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def _start(self) -> None:
        case = self._case
        model = self._case.model
        for weight in self._weights:
            self.heap.allocate(weight.stored * self._formats.stored_itemsize, "weights")
        if not model.max_positions:
            width = model.mla.qk_rope_head_dim if model.mla else model.d_qk
            for _ in "cos", "sin":
                self.heap.allocate(model.seq_len // case.parallel.cp * width * FP32, "working")
        self._initialize()
        if case.precision is Precision.MASTER:
            for purpose in ("weights", "gradients"):
                for weight in self._weights:
                    self.heap.allocate(weight.stored * FP32, purpose)
        if self._keeps_grads:
            for weight in self._weights:
                weight.grad = self.heap.allocate(
                    weight.numel * self._formats.grad_itemsize, "gradients"
                )
        if self._formats.is_ddp:
            self._allocate_buckets()
        for num_bytes in _WORKSPACES if case.device == "cuda" else ():
            self.heap.allocate(num_bytes, "working")
        if case.parallel.pp > 1:
            self._allocate_received()

    def _allocate_received(self) -> None:
        """Allocate what each stage receives of each micro-batch, which stays from step to step.

        torch/distributed/pipelining/stage.py (_create_act_recv_info, _create_grad_recv_info).
        """
        case = self._case
        rows = self._tokens // case.parallel.tp
        for stage in case.stages_of(self._stage):
            neighbours = (stage > 0) + (stage < case.num_stages - 1)
            for _ in range(neighbours * case.num_microbatches):
                self.heap.allocate(rows * self._row_bytes, "working")

    def _initialize(self) -> None:
        """Draw whole matrices in fp32, one at a time, of which a rank keeps its part."""
        for weight in self._weights:
            if len(weight.param.shape) > 1:
                whole = self.heap.allocate(weight.param.numel * FP32, "working")
                if weight.stored != weight.param.numel:
                    self.heap.free(self.heap.allocate(weight.stored * FP32, "working"))
                self.heap.free(whole)

    def _allocate_buckets(self) -> None:
        """Allocate DDP's buckets, of which gradients may be views; the last weight is first."""
        limit = MIB if self._case.small_first_bucket else self._case.bucket_mb * MIB
        filled = 0
        for weight in reversed(self._weights):
            filled += weight.numel * self._formats.stored_itemsize
            if filled >= limit:
                self.heap.allocate(filled, "gradients")
                filled = 0
                limit = self._case.bucket_mb * MIB
        if filled:
            self.heap.allocate(filled, "gradients")

    # A step

    def _micro_step(self, *, is_last: bool) -> None:
        is_reduced = is_last or self._case.grad_sync is GradSync.EVERY
        keeps = self._case.parallel.pp > 1  # gathered weights and gradients until REDUCE
        kept = [
            deque[list[_SavedTensors]]() for _ in self._stages
        ]  # of passes without a backward yet
        waiting = [deque[_Waiting]() for _ in self._stages]
        for action in self._actions:
            units, fsdp = self._stages[action.chunk]
            order = fsdp.order
            match action.act:
                case Act.FORWARD:
                    kept[action.chunk].append(self._forward(units, order))
                case Act.BACKWARD:
                    oldest = kept[action.chunk].popleft()
                    reduces = is_reduced and not keeps
                    self._backward(units, oldest, order, reduces=reduces, keeps=keeps)
                case Act.BACKWARD_INPUT if units[0].name != "embedding":
                    self._later = []
                    oldest = kept[action.chunk].popleft()
                    self._backward(units, oldest, order, reduces=False, keeps=True)
                    waiting[action.chunk].append(self._later)
                    self._later = None
                case Act.BACKWARD_WEIGHT if units[0].name != "embedding":
                    self._add_waiting(waiting[action.chunk].popleft())
                case Act.BACKWARD_WEIGHT:  # all of the first stage's backward pass
                    oldest = kept[action.chunk].popleft()
                    self._backward(units, oldest, order, reduces=False, keeps=True)
                case Act.GATHER:
                    order.unshard()
                case Act.RELEASE:
                    order.reshard()
                case Act.REDUCE:
                    for group in order.groups:
                        order.post_backward(group)
                    order.finalize()
        if self._case.precision is Precision.MASTER:
            self._drop_grads()

    def _forward(self, units: list[FsdpUnit], order: FsdpOrder[Weight]) -> list[_SavedTensors]:
        order.wait_for_unshard(Phase.FWD)
        kept: list[_SavedTensors] = []
        for unit in units:
            for group in unit.begins:
                order.pre_forward(group)
            if unit.name == "embedding":
                kept.append([])
            elif unit.is_checkpointed:
                if self._formats.casts and not self._formats.is_compiled:
                    # Experts' copies are no part of autocast's cache.
                    self._cast(x for x in unit.all_weights if not x.param.is_expert)
                sizes = self._checkpoint_sizes(unit)
                kept.append(
                    [[self.heap.allocate(size * self._tokens, "activations")] for size in sizes]
                )
            else:
                kept.append(self._keep(unit))
                if unit.name == "output":
                    kept[-1].append(self._loss(unit))
            for group in unit.ends:
                order.post_forward(group)
        order.end_forward()
        for unit in units:  # autocast's cache ends with its region
            if unit.is_checkpointed:
                self._free_copies(unit.all_weights)
        return kept

    def _cast(self, weights: Iterable[Weight]) -> None:
        """Make autocast's copies, which products keep for their backward pass."""
        for weight in weights:
            if weight.copy_itemsize and weight.copy is None:
                weight.copy = self.heap.allocate(
                    weight.copy_itemsize * weight.numel, "gathered"
                )

    def _free_copies(self, weights: Iterable[Weight]) -> None:
        for weight in weights:
            if weight.copy is not None:
                self.heap.free(weight.copy)
                weight.copy = None

    def _keep(self, unit: FsdpUnit) -> _SavedTensors:
        kept: _SavedTensors = []
        for leaf, weights in zip(unit.leaves, unit.weights, strict=True):
            self._cast(weights)
            sizes = (size * self._tokens for size in leaf.keeps)
            kept.append([self.heap.allocate(size, "activations") for size in sizes])
        return kept

    def _checkpoint_sizes(self, unit: FsdpUnit) -> list[int]:
        """Return bytes per token of what a checkpointed block keeps."""
        if self._case.recompute is not Recompute.OPS:
            return [self._row_bytes // self._case.parallel.tp]
        # Attention with its statistics, the outputs of the first, third, ... product, and those
        # of messages: gathered rows before, and divided ones after what is summed over ranks.
        # Compiled, what only the block's output is made of is not kept.
        model = self._case.model
        axes = self._case.parallel
        gathered = (axes.cp - 1) * model.num_kv_heads * (model.d_qk + model.d_v)
        products = [leaf for leaf in unit.leaves if leaf.output]
        num_gathered = num_summed = sum(leaf.is_summed for leaf in products if axes.tp > 1)
        saved = products[::2]
        if self._formats.is_compiled:
            saved = [leaf for leaf in saved if leaf is not products[-1]]
            num_summed -= products[-1].is_summed and axes.tp > 1
        sizes = [
            (1 + num_summed) * self._row_bytes,
            model.num_heads * (model.d_v * self._formats.itemsize + FP32),
            gathered * self._formats.itemsize,
            sum(leaf.output for leaf in saved if not leaf.is_summed),
        ]
        whole = [num_gathered * self._row_bytes]
        whole += [leaf.output for leaf in saved if leaf.is_summed]
        return [size for size in (*(each // axes.tp for each in sizes), *whole) if size]

    def _loss(self, unit: FsdpUnit) -> list[Block]:
        """Compute logits and loss, with chunks also gradients; return what is kept."""
        case = self._case
        tokens = -(-self._tokens // self._case.loss_chunks)
        logits = tokens * self._vocab
        if case.loss_chunks == 1:
            block = self.heap.allocate(self._formats.itemsize * logits, "head")
            if self._formats.is_head_compiled:
                if self._vocab < case.model.vocab_size:  # its softmax is no part of the graph
                    self.heap.free(self.heap.allocate(FP32 * logits, "head"))
                return [block]
            fp32, log_softmax = (self.heap.allocate(FP32 * logits, "head") for _ in range(2))
            if self._vocab < case.model.vocab_size:  # the softmax is computed again
                self.heap.free(fp32, log_softmax)
                return [block]
            if case.parallel.pp > 1:  # its stage keeps its outputs for the backward pass
                self.heap.free(fp32)
                return [block, log_softmax]
            self.heap.free(fp32, block)
            return [log_softmax]
        head = unit.weights[1][0]
        grad_input = self.heap.allocate(self._tokens * self._row_bytes, "head")
        total: Block | None = None
        for _ in range(2):
            allocated = [self.heap.allocate(self._formats.itemsize * logits, "head")]
            if not self._formats.is_head_compiled:
                allocated += [self.heap.allocate(FP32 * logits, "head") for _ in range(3)]
            allocated.append(self.heap.allocate(tokens * self._row_bytes, "head"))
            allocated.append(self.heap.allocate(self._formats.itemsize * head.numel, "head"))
            if self._formats.casts:
                allocated.append(self.heap.allocate(FP32 * head.numel, "head"))
            total = total or self.heap.allocate(
                self._formats.grad_itemsize * head.numel, "head"
            )
            self.heap.free(*allocated)
        assert total is not None
        return [grad_input, total]

    def _backward(
        self,
        units: list[FsdpUnit],
        kept: list[_SavedTensors],
        order: FsdpOrder[Weight],
        *,
        reduces: bool,
        keeps: bool,
    ) -> None:
        """keeps: weights stay gathered."""
        order.wait_for_unshard(Phase.BWD)
        is_last = units[-1].name == "output"
        grad = self._allocate_rows(0 if is_last else self._row_bytes)
        for unit, blocks in zip(reversed(units), reversed(kept), strict=True):
            for group in reversed(unit.ends):
                order.pre_backward(group)
            if unit.name == "output":
                grad = self._output_backward(unit, blocks, grad)
            elif unit.name == "block":
                grad = self._block_backward(unit, blocks, grad)
            else:
                grad = self._lookup_backward(unit, grad)
            self.heap.free(*self._added)
            self._added.clear()
            if self._compresses:
                numel = sum(weight.numel for weight in unit.all_weights)
                self.heap.free(self.heap.allocate(2 * numel, "gathered"))
            for group in reversed(unit.begins):
                order.post_backward(group, reduces=reduces, keeps=keeps)
        self.heap.free(grad)
        if not keeps:
            order.finalize(reduces=reduces)

    def _output_backward(self, unit: FsdpUnit, kept: _SavedTensors, grad: Block) -> Block:
        case = self._case
        logits = self._tokens * self._vocab
        self.heap.free(grad)
        *kept, last = kept
        if case.loss_chunks > 1:
            new, total = last
            self._add_grads(unit.weights[1])
            self.heap.free(total)
        else:
            if (
                not self._formats.is_head_compiled
            ):  # else the gradient takes the place of the logits
                grads = [self.heap.allocate(FP32 * logits, "head") for _ in range(2)]
                self.heap.free(grads[0], *last)
                last = [self.heap.allocate(self._formats.itemsize * logits, "head")]
                self.heap.free(grads[1])
            head, *biases = unit.weights[1]
            if self._later is not None:
                self._later.append(([head, *biases], [*kept.pop(1), *last]))
                new = self._allocate_rows(self._row_bytes)
                grad = self._allocate_rows(unit.leaves[0].input_grad)
                others = [block for blocks in kept for block in blocks]
                self._later.append((unit.weights[0], [new, *others]))
                return grad
            if head.is_fp8 and self._formats.is_head_compiled:  # and transposed
                fp8 = [self.heap.allocate(logits, "head") for _ in range(2)]
                self.heap.free(*last)
                last = fp8
            product = self.heap.allocate(head.numel * self._formats.itemsize, "gradients")
            self.heap.free(*kept.pop(1))
            new = self._allocate_rows(self._row_bytes)
            self.heap.free(*last)
            self._add_grad(head, product)
            self._add_grads(biases)
        grad = self._allocate_rows(unit.leaves[0].input_grad)
        self._add_grads(unit.weights[0])
        self.heap.free(new, *(block for blocks in kept for block in blocks))
        return grad

    def _allocate_rows(self, bytes_per_token: int) -> Block:
        return self.heap.allocate(self._tokens * bytes_per_token, "working")

    def _block_backward(self, unit: FsdpUnit, kept: _SavedTensors, grad: Block) -> Block:
        """Walk modules backwards. Residual sums pass the gradient on without a copy."""
        saved: list[Block] = []
        if unit.is_checkpointed:
            saved = [block for blocks in kept for block in blocks]
            kept = self._keep(unit)
        waiting: Block | None = None  # gradient around the modules since a residual sum
        for leaf, weights, blocks in reversed(
            list(zip(unit.leaves, unit.weights, kept, strict=True))
        ):
            if leaf.is_residual:
                waiting = grad
                continue
            new = self._allocate_rows(leaf.input_grad)
            ended = [] if grad is waiting else [grad]
            if leaf.is_norm and waiting:
                ended.append(waiting)
                waiting = None
            if self._later is None:
                self._add_grads(weights)
                self.heap.free(*blocks, *ended)
            elif weights:
                self._later.append((weights, [*blocks, *ended]))
            else:  # what the graph has stays until all weights have their gradients
                self._later.append(([], blocks))
                self.heap.free(*ended)
            grad = new
        self.heap.free(*saved)
        return grad

    def _lookup_backward(self, unit: FsdpUnit, grad: Block) -> Block:
        """Return a gradient of no size: tokens have none."""
        tokens = self._tokens
        hidden = self._case.model.hidden_size
        if self._formats.casts:
            cast = self._allocate_rows(hidden * FP32)
            self.heap.free(grad)
            grad = cast
        for table in reversed(unit.all_weights):
            numel = table.numel
            if self._has_whole_table_grad and table is unit.weights[0][0]:
                numel *= self._case.parallel.tp
            new = self.heap.allocate(self._formats.grad_itemsize * numel, "gradients")
            if tokens > _FEW_LOOKUPS and table is unit.weights[0][0]:
                segments = tokens // _LOOKUPS_PER_SEGMENT
                segments += min(tokens, table.numel // hidden)
                self.heap.free(self.heap.allocate(segments * hidden * FP32, "working"))
            self._keep_grad(table, new)
        self.heap.free(grad)
        return self._allocate_rows(0)

    def _add_waiting(self, waiting: _Waiting) -> None:
        """Compute the gradients of weights that a backward pass left, the first ones first."""
        case = self._case
        converts = self._formats.is_fsdp
        converts = converts and case.reduce_dtype.itemsize != self._formats.grad_itemsize
        for weights, blocks in reversed(waiting):
            for weight in weights if converts else ():
                if weight.grad is not None and weight.fresh is None:
                    size = weight.numel * self._formats.grad_itemsize
                    weight.fresh = self.heap.allocate(size, "gradients")
            self._add_grads(weights)
            self.heap.free(*blocks)

    def _add_grads(self, weights: list[Weight]) -> None:
        for weight in weights:
            product = self.heap.allocate(weight.numel * self._formats.itemsize, "gradients")
            self._add_grad(weight, product)

    def _add_grad(self, weight: Weight, new: Block) -> None:
        self._free_copies([weight])
        if self._formats.casts:
            product = new
            new = self.heap.allocate(weight.numel * FP32, "gradients")
            self.heap.free(product)
        self._keep_grad(weight, new)

    def _keep_grad(self, weight: Weight, new: Block) -> None:
        if weight.grad is None and not (self._formats.is_ddp and self._case.bucket_view):
            weight.grad = new
        elif self._formats.compiles("output" if weight.param.part == "head" else "blocks"):
            self._added.append(new)
        else:
            self.heap.free(new)

    def _drop_grads(self) -> None:
        for weight in self._weights:
            if weight.grad is not None and not self._keeps_grads:
                self.heap.free(weight.grad)
                weight.grad = None
        for _, fsdp in self._stages:
            fsdp.drop_grads()

    def _optimize(self) -> None:
        is_master = self._case.precision is Precision.MASTER
        size = FP32 if is_master else self._formats.stored_itemsize
        for weight in self._weights if not self._has_moments else ():
            moment: tuple[int, ...] = (weight.stored * size,)
            if self._case.optimizer is OptimizerKind.ADAMW8BIT:
                moment = moment_bytes(weight.stored, size)
            for num_bytes in moment * (1 if id(weight) in self._matrices else 2):
                self.heap.allocate(num_bytes, "optimizer")
        self._has_moments = True
        for weight in self._matrices.values():
            # The update, the same in bf16 before and after an iteration, A and B.
            pairs = min(weight.param.shape) ** 2
            num_bytes = (size + 2 * BF16) * weight.stored + 2 * BF16 * pairs
            self.heap.free(self.heap.allocate(num_bytes, "working"))
        if self._has_whole_table_grad:
            table = self._units[0].weights[0][0]
            part = self._formats.grad_itemsize * table.numel
            self.heap.free(self.heap.allocate(part, "working"))
        if not is_master:
            self._drop_grads()
