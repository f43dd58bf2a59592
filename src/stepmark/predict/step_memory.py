"""Tensors of a training step on one rank, in the order in which they come and go.

bench/training builds and runs the step; FSDP's tensors are those of torch 2.11,
_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py. State and what FSDP gathers and
reduces are tensors by parameter; activations are those that modules' `keeps` count.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from stepmark.core.dtypes import DType
from stepmark.core.module import Module, Param
from stepmark.core.train_case import TrainCase
from stepmark.core.training import (
    CompileScope,
    DataParallel,
    Fp8,
    GradSync,
    Precision,
    Recompute,
)
from stepmark.core.units import MIB
from stepmark.predict.allocator import Allocator, Block

_FP32 = 4
_STORED_ITEMSIZE = {
    Precision.AMP: _FP32,
    Precision.MASTER: 2,
    Precision.BF16: 2,
    Precision.FP32: _FP32,
}
# cuBLAS's on Hopper, for the thread of the forward pass and that of the backward pass.
_WORKSPACES = (32 * MIB, 32 * MIB)
# torch's gradient of a lookup adds sorted segments of tokens where there are more than a few.
_FEW_LOOKUPS, _LOOKUPS_PER_SEGMENT = 3072, 10
_FIRST_BUCKET = MIB
_COMPUTE, _GATHER, _REDUCE = 0, 1, 2  # streams


@dataclass(slots=True, eq=False)
class _Weight:
    """A parameter on this rank: elements before and after FSDP divides it."""

    param: Param
    numel: int
    stored: int
    is_fp8: bool  # as an operand of its product
    is_gathered_fp8: bool
    gathered_itemsize: int
    copy_itemsize: int  # of a copy for its product; 0: none
    grad: Block | None = None
    copy: Block | None = None


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A module with none inside: bytes per token that it keeps, and of its input's gradient."""

    keeps: tuple[int, ...]
    input_grad: int
    output: int  # a product's, before tensor parallelism divides it
    is_norm: bool
    is_residual: bool


@dataclass(slots=True)
class _Unit:
    """A block, or one end of the model. Leaves are in forward order."""

    name: str
    leaves: tuple[_Leaf, ...]
    weights: list[list[_Weight]]  # by leaf
    is_checkpointed: bool = False
    groups: "list[_Group]" = field(default_factory=list)

    @property
    def all_weights(self) -> list[_Weight]:
        return [weight for weights in self.weights for weight in weights]


@dataclass(slots=True, eq=False)
class _Group:
    """Parameters that FSDP gathers and reduces together."""

    weights: list[_Weight]
    num_units: int
    has_blocks: bool
    reshards: bool  # after the forward pass
    in_backward: bool = True  # gathered for it
    buffer: Block | None = None
    whole: list[Block] = field(default_factory=list)
    partial: Block | None = None  # what resharding over some ranks leaves
    sharded_grad: Block | None = None
    units_done: int = 0


_Kept = list[list[Block]]  # by leaf; then the head's logits, or gradients of a chunked loss


class StepMemory:
    """Replay of a pipeline stage's start and of optimizer steps."""

    def __init__(self, case: TrainCase, stage: int, root: Module) -> None:
        self.heap = Allocator()
        self._case, axes = case, case.parallel
        self._is_fsdp = case.data_parallel is DataParallel.FSDP
        self._is_ddp = case.data_parallel is DataParallel.DDP
        self._is_compiled = case.compile is not CompileScope.NONE
        self._itemsize = _FP32 if case.precision is Precision.FP32 else 2
        self._casts = case.precision is Precision.AMP and not self._is_fsdp
        self._stored_itemsize = _STORED_ITEMSIZE[case.precision]
        self._grad_itemsize = _FP32 if self._casts else self._itemsize
        self._keeps_grads = case.cuda_graph or case.compiles_graphs
        # By DDP's hook: gradients in bf16 beside those in fp32.
        self._compresses = self._is_ddp and case.reduce_dtype is DType.BF16
        self._compresses = self._compresses and self._stored_itemsize == _FP32
        self._microbatches = 1 if axes.pp == 1 else case.pp_microbatches or axes.pp
        # 1F1B: the first stage is as many microbatches ahead as there are stages.
        self._in_flight = min(axes.pp - stage, self._microbatches)
        self._row_bytes = case.model.hidden_size * self._itemsize
        self._tokens = -(-case.mbs // self._microbatches) * case.model.seq_len // axes.cp
        self._units = self._make_units(root, stage)
        self._tie()
        self._weights = {id(x): x for unit in self._units for x in unit.all_weights}.values()
        self._groups = self._make_groups() if self._is_fsdp else []
        self._last_buffer: Block | None = None  # FSDP frees it after the next copy-out
        self._last_reduced: Block | None = None  # and this one before the next reduction
        self._added: list[Block] = []  # gradients that a compiled graph returns to be added
        self._has_moments = False
        self._start()

    def steps(self, count: int) -> None:
        """Run optimizer steps. Micro-steps after the second one repeat it."""
        micro_steps = min(self._case.grad_accum, 2)
        for _ in range(count):
            for number in range(micro_steps):
                self._micro_step(is_last=number == micro_steps - 1)
            self._optimize()

    # Start

    def _make_units(self, root: Module, stage: int) -> list[_Unit]:
        case, units = self._case, list[_Unit]()
        num_layers, stages = case.model.num_layers, case.parallel.pp
        index = 0 if stage == 0 else num_layers - num_layers // stages
        for module in root.inside:
            is_block = module.name.startswith("blocks")
            leaves = [leaf for leaf in module.walk() if not leaf.inside]
            shapes = tuple(self._leaves(leaves))
            for _ in range(module.times):
                unit = _Unit(
                    "block" if is_block else module.name,
                    shapes,
                    [[self._weight(param) for param in leaf.params] for leaf in leaves],
                    is_block and case.is_checkpointed[index],
                )
                units.append(unit)
                index += is_block
        return units

    def _leaves(self, modules: list[Module]) -> Iterator[_Leaf]:
        model, tp, size = self._case.model, self._case.parallel.tp, self._itemsize
        outputs, follows_product = model.hidden_size, False
        for module in modules:
            keeps, param = module.keeps, next(iter(module.params), None)
            is_eager = not self._is_compiled
            if self._case.parallel.ep > 1 and ".experts" in module.role:
                is_eager = True  # Dynamo leaves out what the exchange of rows calls
            eager = keeps.eager if is_eager else 0
            if self._case.parallel.ep > 1 and module.role == "mlp.experts_down" and model.moe:
                eager += model.moe.top_k * model.hidden_size  # index_copy keeps its source
            widths = [keeps.whole, keeps.divided // tp, eager // tp]
            tensors = [size * width for width in widths] + [_FP32 * keeps.statistics // tp]
            if self._is_fp8(param) and self._is_compiled:
                # The product's input in FP8; attention's output is kept as such, too.
                fp8 = keeps.whole + keeps.divided // tp
                is_attention = module.name.endswith("attention.out")
                tensors = [fp8, *(tensors if is_attention else ())]
            width, output = model.hidden_size, 0
            if param is not None and len(param.shape) > 1:
                copies = model.moe.top_k if model.moe and param.is_expert else 1
                width, output = copies * param.shape[-1], copies * param.shape[-2]
                outputs = output // tp + (outputs if follows_product else 0)
                follows_product = True
            elif param is None:
                width, follows_product = outputs, False
            yield _Leaf(
                keeps=tuple(filter(None, tensors)),
                input_grad=size * width,
                output=size * output,
                is_norm=param is not None and param.is_norm,
                is_residual=module.role.endswith("residual"),
            )

    def _is_fp8(self, param: Param | None) -> bool:
        """Return whether a product of this weight is in FP8."""
        case = self._case
        if case.fp8 is Fp8.NONE or param is None or len(param.shape) != 2:
            return False
        if param.part == "embedding" or "router" in param.part:
            return False
        return case.fp8_head or param.part != "head"

    def _weight(self, param: Param) -> _Weight:
        case, axes = self._case, self._case.parallel
        numel = param.numel // (1 if param.is_partial else axes.tp)
        numel //= axes.ep if param.is_expert else 1
        ranks = axes.dp_shard * axes.cp // (axes.ep if param.is_expert else 1)
        ranks = ranks if self._is_fsdp else 1
        is_fp8 = self._is_fp8(param)
        is_gathered_fp8 = is_fp8 and case.fp8_all_gather
        copy_itemsize = 2 if self._casts and param.part != "embedding" else 0
        if is_fp8 and self._is_compiled:
            copy_itemsize = 0 if is_gathered_fp8 else 1
        return _Weight(
            param=param,
            numel=numel,
            stored=-(-numel // ranks),
            is_gathered_fp8=is_gathered_fp8,
            gathered_itemsize=1 if is_gathered_fp8 else self._itemsize,
            is_fp8=is_fp8,
            copy_itemsize=copy_itemsize,
        )

    def _tie(self) -> None:
        """Let the head have the table where both are here."""
        first, last = self._units[0], self._units[-1]
        ends = (first.name, last.name)
        if self._case.model.tied_embeddings and ends == ("embedding", "output"):
            (table, head) = first.weights[0][0], last.weights[1][0]
            table.is_fp8, table.copy_itemsize = head.is_fp8, head.copy_itemsize
            last.weights[1] = [table]

    def _make_groups(self) -> list[_Group]:
        """Group parameters as bench/training/parallelize.py does."""
        case, groups = self._case, list[_Group]()
        reshards, is_apart = case.reshard != "no", case.parallel.ep > 1
        blocks = [unit for unit in self._units if unit.name == "block"]
        ends = [unit for unit in self._units if unit.name != "block"]

        def add(units: list[_Unit], reshards: bool, in_backward: bool = True) -> None:
            weights = {id(x): x for unit in units for x in unit.all_weights}.values()
            experts = [x for x in weights if is_apart and x.param.is_expert]
            others = [x for x in weights if not (is_apart and x.param.is_expert)]
            for members in filter(None, (others, experts)):
                has_blocks = units[0].name == "block"
                group = _Group(members, len(units), has_blocks, reshards, in_backward)
                groups.append(group)
                for unit in units:
                    unit.groups.append(group)

        is_tied = case.model.tied_embeddings and len(ends) == 2
        if is_tied:
            add(ends, reshards=False)
        elif ends and ends[0].name == "embedding":
            add(ends[:1], reshards, in_backward=False)
        for first in range(0, len(blocks), case.blocks_per_group):
            add(blocks[first : first + case.blocks_per_group], reshards)
        if ends and ends[-1].name == "output" and not is_tied:
            add(ends[-1:], reshards=False)
        return groups

    def _start(self) -> None:
        case, model = self._case, self._case.model
        for weight in self._weights:
            self._allocate(weight.stored * self._stored_itemsize, "weights")
        if not model.max_positions:
            width = model.mla.qk_rope_head_dim if model.mla else model.d_qk
            for _ in "cos", "sin":
                self._allocate(model.seq_len // case.parallel.cp * width * _FP32, "working")
        self._initialize()
        if case.precision is Precision.MASTER:
            for purpose in ("weights", "gradients"):
                for weight in self._weights:
                    self._allocate(weight.stored * _FP32, purpose)
        if self._keeps_grads:
            for weight in self._weights:
                weight.grad = self._allocate(weight.numel * self._grad_itemsize, "gradients")
        if self._is_ddp:
            self._allocate_buckets()
        for num_bytes in _WORKSPACES if case.device == "cuda" else ():
            self._allocate(num_bytes, "working")

    def _initialize(self) -> None:
        """Draw whole matrices in fp32, one at a time, of which a rank keeps its part."""
        for weight in self._weights:
            if len(weight.param.shape) > 1:
                whole = self._allocate(weight.param.numel * _FP32, "working")
                if weight.stored != weight.param.numel:
                    self._free(self._allocate(weight.stored * _FP32, "working"))
                self._free(whole)

    def _allocate_buckets(self) -> None:
        """Allocate DDP's buckets: they are the gradients, the last parameter's first."""
        limit, filled = _FIRST_BUCKET, 0
        for weight in reversed(self._weights):
            filled += weight.numel * self._stored_itemsize
            if filled >= limit:
                self._allocate(filled, "gradients")
                limit, filled = self._case.bucket_mb * MIB, 0
        if filled:
            self._allocate(filled, "gradients")

    # A step

    def _allocate(self, num_bytes: int, purpose: str, stream: int = _COMPUTE) -> Block:
        return self.heap.allocate(num_bytes, purpose, stream)

    def _free(self, *blocks: Block) -> None:
        for block in blocks:
            self.heap.free(block)

    def _micro_step(self, *, is_last: bool) -> None:
        is_reduced = is_last or self._case.grad_sync is GradSync.EVERY
        passes = [self._forward() for _ in range(self._in_flight)]
        if self._microbatches > self._in_flight:  # one of those that find gradients
            self._backward(passes.pop(0), reduces=False, reshards=False)
            passes.append(self._forward())
        while passes:
            is_over = len(passes) == 1
            self._backward(passes.pop(0), reduces=is_reduced and is_over, reshards=is_over)
        if self._case.precision is Precision.MASTER:
            self._drop_grads()

    def _forward(self) -> list[_Kept]:
        kept: list[_Kept] = []
        for unit in self._units:
            self._gather(unit)
            if unit.name == "embedding":
                kept.append([])
            elif unit.is_checkpointed:
                if self._casts and not self._is_compiled:
                    self._cast(unit.all_weights)
                sizes = self._checkpoint_sizes(unit)
                kept.append(
                    [[self._allocate(size * self._tokens, "activations")] for size in sizes]
                )
            else:
                kept.append(self._keep(unit))
                if unit.name == "output":
                    kept[-1].append(self._loss(unit))
            self._reshard(unit)
        if self._last_buffer:
            self._free(self._last_buffer)
            self._last_buffer = None
        for unit in self._units:  # autocast's cache ends with its region
            if unit.is_checkpointed:
                self._free_copies(unit.all_weights)
        return kept

    def _cast(self, weights: Iterable[_Weight]) -> None:
        """Make autocast's copies, which products keep for their backward pass."""
        for weight in weights:
            if weight.copy_itemsize and weight.copy is None:
                weight.copy = self._allocate(weight.copy_itemsize * weight.numel, "gathered")

    def _free_copies(self, weights: Iterable[_Weight]) -> None:
        for weight in weights:
            if weight.copy is not None:
                self._free(weight.copy)
                weight.copy = None

    def _keep(self, unit: _Unit) -> _Kept:
        kept: _Kept = []
        for leaf, weights in zip(unit.leaves, unit.weights, strict=True):
            self._cast(weights)
            sizes = (size * self._tokens for size in leaf.keeps)
            kept.append([self._allocate(size, "activations") for size in sizes])
        return kept

    def _checkpoint_sizes(self, unit: _Unit) -> list[int]:
        """Return bytes per token of what a checkpointed block keeps."""
        if self._case.recompute is not Recompute.OPS:
            return [self._row_bytes // self._case.parallel.tp]
        # Attention with its statistics, and the outputs of every second product.
        model, axes = self._case.model, self._case.parallel
        gathered = (axes.cp - 1) * model.num_kv_heads * (model.d_qk + model.d_v)
        sizes = [
            self._row_bytes,
            model.num_heads * (model.d_v * self._itemsize + _FP32),
            gathered * self._itemsize,
            sum(leaf.output for leaf in unit.leaves) // 2,
        ]
        return [size // axes.tp for size in sizes if size]

    def _loss(self, unit: _Unit) -> list[Block]:
        """Compute logits and loss, with chunks also gradients; return what is kept."""
        case, tokens = self._case, -(-self._tokens // self._case.loss_chunks)
        logits = tokens * case.model.vocab_size
        if case.loss_chunks == 1:
            block = self._allocate(self._itemsize * logits, "head")
            if self._is_compiled:
                return [block]
            fp32, log_softmax = (self._allocate(_FP32 * logits, "head") for _ in range(2))
            self._free(fp32, block)
            return [log_softmax]
        (head,) = unit.weights[1]
        grad_input = self._allocate(self._tokens * self._row_bytes, "head")
        total: Block | None = None
        for _ in range(2):
            made = [self._allocate(self._itemsize * logits, "head")]
            if not self._is_compiled:
                made += [self._allocate(_FP32 * logits, "head") for _ in range(3)]
            made.append(self._allocate(tokens * self._row_bytes, "head"))
            made.append(self._allocate(self._itemsize * head.numel, "head"))
            if self._casts:
                made.append(self._allocate(_FP32 * head.numel, "head"))
            total = total or self._allocate(self._grad_itemsize * head.numel, "head")
            self._free(*made)
        assert total is not None
        return [grad_input, total]

    def _backward(self, kept: list[_Kept], *, reduces: bool, reshards: bool) -> None:
        is_last = self._units[-1].name == "output"
        grad = self._allocate_rows(0 if is_last else self._row_bytes)
        for unit, blocks in zip(reversed(self._units), reversed(kept), strict=True):
            self._gather_again(unit)
            if unit.name == "output":
                grad = self._output_backward(unit, blocks, grad)
            elif unit.name == "block":
                grad = self._block_backward(unit, blocks, grad)
            else:
                grad = self._lookup_backward(unit, grad)
            self._free(*self._added)
            self._added.clear()
            if self._compresses:
                numel = sum(weight.numel for weight in unit.all_weights)
                self._free(self._allocate(2 * numel, "gathered"))
            self._reduce(unit, reduces=reduces, reshards=reshards)
        self._free(grad)
        if self._last_reduced:
            self._free(self._last_reduced)
            self._last_reduced = None

    def _output_backward(self, unit: _Unit, kept: _Kept, grad: Block) -> Block:
        case, logits = self._case, self._tokens * self._case.model.vocab_size
        self._free(grad)
        *kept, last = kept
        if case.loss_chunks > 1:
            new, total = last
            self._add_grads(unit.weights[1])
            self._free(total)
        else:
            if not self._is_compiled:  # else the gradient takes the place of the logits
                grads = [self._allocate(_FP32 * logits, "head") for _ in range(2)]
                self._free(grads[0], *last)
                last = [self._allocate(self._itemsize * logits, "head")]
                self._free(grads[1])
            (head,) = unit.weights[1]
            if head.is_fp8 and self._is_compiled:  # and transposed
                fp8 = [self._allocate(logits, "head") for _ in range(2)]
                self._free(*last)
                last = fp8
            product = self._allocate(head.numel * self._itemsize, "gradients")
            self._free(*kept.pop(1))
            new = self._allocate_rows(self._row_bytes)
            self._free(*last)
            self._add_grad(head, product)
        grad = self._allocate_rows(unit.leaves[0].input_grad)
        self._add_grads(unit.weights[0])
        self._free(new, *(block for blocks in kept for block in blocks))
        return grad

    def _allocate_rows(self, bytes_per_token: int) -> Block:
        return self._allocate(self._tokens * bytes_per_token, "working")

    def _block_backward(self, unit: _Unit, kept: _Kept, grad: Block) -> Block:
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
            self._add_grads(weights)
            self._free(*blocks)
            if grad is not waiting:
                self._free(grad)
            if leaf.is_norm and waiting:
                self._free(waiting)
                waiting = None
            grad = new
        self._free(*saved)
        return grad

    def _lookup_backward(self, unit: _Unit, grad: Block) -> Block:
        """Return a gradient of no size: tokens have none."""
        tokens, hidden = self._tokens, self._case.model.hidden_size
        if self._casts:
            cast = self._allocate_rows(hidden * _FP32)
            self._free(grad)
            grad = cast
        for (table,) in reversed(unit.weights):
            new = self._allocate(self._grad_itemsize * table.numel, "gradients")
            if tokens > _FEW_LOOKUPS and table is unit.weights[0][0]:
                segments = tokens // _LOOKUPS_PER_SEGMENT
                segments += min(tokens, table.numel // hidden)
                self._free(self._allocate(segments * hidden * _FP32, "working"))
            self._keep_grad(table, new)
        self._free(grad)
        return self._allocate_rows(0)

    def _add_grads(self, weights: list[_Weight]) -> None:
        for weight in weights:
            product = self._allocate(weight.numel * self._itemsize, "gradients")
            self._add_grad(weight, product)

    def _add_grad(self, weight: _Weight, new: Block) -> None:
        self._free_copies([weight])
        if self._casts:
            product, new = new, self._allocate(weight.numel * _FP32, "gradients")
            self._free(product)
        self._keep_grad(weight, new)

    def _keep_grad(self, weight: _Weight, new: Block) -> None:
        if weight.grad is None and not self._is_ddp:
            weight.grad = new
        elif self._is_compiled:
            self._added.append(new)
        else:
            self._free(new)

    def _drop_grads(self) -> None:
        for weight in self._weights:
            if weight.grad is not None and not self._keeps_grads:
                self._free(weight.grad)
                weight.grad = None
        for group in self._groups:
            if group.sharded_grad is not None:
                self._free(group.sharded_grad)
                group.sharded_grad = None

    def _optimize(self) -> None:
        is_master = self._case.precision is Precision.MASTER
        size = _FP32 if is_master else self._stored_itemsize
        for weight in self._weights if not self._has_moments else ():
            for _ in "first", "second":
                self._allocate(weight.stored * size, "optimizer")
        self._has_moments = True
        if not is_master:
            self._drop_grads()

    # FSDP

    def _unshard(self, group: _Group) -> None:
        if group.whole or group.buffer:
            return
        own: list[Block] = []
        plain = 0
        for weight in group.weights:
            if weight.is_gathered_fp8:  # torchao scales in fp32 before it casts
                scaled = [
                    self._allocate(weight.stored * _FP32, "gathered", _GATHER) for _ in range(2)
                ]
                own.append(self._allocate(weight.stored, "gathered", _GATHER))
                self._free(*scaled)
            else:
                plain += weight.stored * self._itemsize
        if plain:
            own.append(self._allocate(plain, "gathered", _GATHER))
        sizes = [weight.numel * weight.gathered_itemsize for weight in group.weights]
        group.buffer = self._allocate(sum(sizes), "gathered", _GATHER)
        self._free(*own)

    def _copy_out(self, group: _Group) -> None:
        assert group.buffer is not None
        group.whole = [
            self._allocate(weight.numel * weight.gathered_itemsize, "gathered")
            for weight in group.weights
        ]

    def _ahead(self, group: _Group, step: int) -> list[_Group]:
        """Return the next groups, or the previous ones, that are gathered ahead of time."""
        index = self._groups.index(group)
        if step < 0:
            return self._groups[max(0, index - self._case.prefetch) : index][::-1]
        if self._case.prefetch == 1 or not group.has_blocks:
            return []  # each is gathered as it begins
        others = self._groups[index + 1 : index + 1 + self._case.prefetch]
        return [other for other in others if other.has_blocks]

    def _gather(self, unit: _Unit) -> None:
        for group in unit.groups:
            if group.whole:
                continue
            self._unshard(group)
            if self._last_buffer:
                self._free(self._last_buffer)
            self._copy_out(group)
            self._last_buffer, group.buffer = group.buffer, None
            for other in self._ahead(group, 1):
                self._unshard(other)

    def _reshard(self, unit: _Unit) -> None:
        for group in unit.groups:
            group.units_done += 1
            if group.units_done == group.num_units:
                group.units_done = 0
                if group.reshards:
                    self._free(*group.whole)
                    group.whole = []
                    if self._case.reshard.isdecimal():
                        part = sum(weight.numel for weight in group.weights)
                        part = part * self._itemsize // int(self._case.reshard)
                        group.partial = self._allocate(part, "gathered")

    def _gather_again(self, unit: _Unit) -> None:
        for group in reversed(unit.groups):
            if not group.whole and group.in_backward:
                self._unshard(group)
                self._copy_out(group)
                assert group.buffer is not None
                self._free(group.buffer)
                group.buffer = None
            for other in self._ahead(group, -1):
                if other.in_backward:
                    self._unshard(other)

    def _reduce(self, unit: _Unit, *, reduces: bool, reshards: bool) -> None:
        size = self._case.reduce_dtype.itemsize
        for group in unit.groups:
            group.units_done += 1
            if group.units_done < group.num_units:
                continue
            group.units_done = 0
            if reshards:
                self._free(*group.whole)
                group.whole = []
            if group.partial:
                self._free(group.partial)
                group.partial = None
            if reduces:
                self._reduce_scatter(group)
                continue
            for weight in group.weights:  # it waits in the dtype of the reduction
                grad, weight.grad = weight.grad, self._allocate(weight.numel * size, "gathered")
                assert grad is not None
                self._free(grad)

    def _reduce_scatter(self, group: _Group) -> None:
        size = self._case.reduce_dtype.itemsize
        if self._last_reduced:
            self._free(self._last_reduced)
        numel = sum(weight.numel for weight in group.weights)
        self._last_reduced = self._allocate(numel * size, "gathered")
        grads: list[Block] = []
        for weight in group.weights:
            assert weight.grad is not None
            grads.append(weight.grad)
            weight.grad = None
        *grads, last_grad = grads  # a variable in foreach_reduce refers to the last one
        self._free(*grads)
        stored = sum(weight.stored for weight in group.weights)
        output = self._allocate(stored * size, "gradients", _REDUCE)
        if size != self._stored_itemsize:
            cast = self._allocate(stored * self._stored_itemsize, "gradients", _REDUCE)
            self._free(output)
            output = cast
        if group.sharded_grad:
            self._free(output)
        else:
            group.sharded_grad = output
        self._free(last_grad)
