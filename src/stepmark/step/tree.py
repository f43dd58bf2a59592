"""One module tree per model and layout: operations, parameters and activations of a rank.

Operator cases, workload rules, FLOPs, parameter counts and memory derive from it. Paths are the
module names of the step that `stepmark train` runs (training/transformer.py). A leaf
multiplies the rows of all tensor-parallel ranks, or its own share of them. FLOPs of a rank
/ twins, summed over ranks, are the model's.

Experts: with balanced routing a rank of ep x etp computes as many rows as it sends out, those
of its etp peers included, over 1 / etp of the width of num_experts / ep experts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from stepmark.cases.train_case import TrainCase
from stepmark.ground.dtypes import DType
from stepmark.model.model import Linear, ModelConfig
from stepmark.model.ops import (
    Activation,
    Attention,
    CrossEntropy,
    GroupedGemm,
    Norm,
    Op,
    Phase,
    Rope,
)
from stepmark.model.parallel import ParallelConfig, stage_layers
from stepmark.step.kernel_choice import (
    KernelChoice,
    gradient_sum,
    loss_module,
    memory_kernel,
    stored_scores,
    swiglu,
    with_dropout,
    with_joined_gradients,
    with_transposes,
    without_padding,
)
from stepmark.step.layout import (
    Inputs,
    ShardLayout,
    grouped_products,
    linear_products,
    table_lookup,
    tensor_sum,
)
from stepmark.step.lora import frozen, scaled_sum
from stepmark.step.module import Module, Param, SavedTensors, between, both, role_of, work_of
from stepmark.step.workload import Kernel

_PhaseKernel = tuple[Phase, Kernel]


def build(model: ModelConfig, layout: ShardLayout, inputs: Inputs) -> Module:
    """Return the modules of one pipeline stage on one rank."""
    layout.check(model)
    builder = TreeBuilder(model=model, layout=layout, inputs=inputs)
    pp = layout.axes.pp
    units = [builder.embedding()] if layout.stage == 0 else []
    dense = model.num_dense_layers
    for layers in stage_layers(model.num_layers, pp * layout.chunks, layout.split)[
        layout.stage :: pp
    ]:
        start, stop = layers.start, layers.stop
        for first, last, moe in (
            (start, min(stop, dense), False),
            (max(start, dense), stop, True),
        ):
            if first < last:
                block = builder.block(moe=moe)
                units.append(replace(block, name=f"blocks.{first}", times=last - first))
    if layout.stage == pp - 1:
        units.append(builder.output())
    return Module(inside=tuple(units))


def stage_of_case(case: TrainCase, stage: int) -> Module:
    """Return the modules of a training case's stage, not divided by tp and ep."""
    axes = ParallelConfig(cp=case.parallel.cp, pp=case.parallel.pp)
    chunks = case.num_stages // case.parallel.pp
    layout = ShardLayout(axes=axes, stage=stage, chunks=chunks, split=case.pp_split)
    return _stage(case.model, layout)


@lru_cache(maxsize=64)
def _stage(model: ModelConfig, layout: ShardLayout) -> Module:
    return build(model, layout, Inputs(mbs=1, seq_len=model.seq_len))


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeBuilder:
    """Factory of a model's units: embedding, dense and MoE block, output."""

    model: ModelConfig
    layout: ShardLayout
    inputs: Inputs
    kernels: KernelChoice = KernelChoice()

    @property
    def _tp(self) -> int:
        return self.layout.axes.tp

    @property
    def tokens(self) -> int:
        """Tokens of one cp rank, before tensor parallelism divides them."""
        return self.inputs.mbs * self.inputs.seq_len // self.layout.axes.cp

    @property
    def own_tokens(self) -> int:
        """Rows of norms and residuals."""
        return self.tokens // self.layout.row_parts or 1

    @property
    def kv_heads(self) -> int:
        """KV heads of one rank; tp ranks beyond the model's KV heads share them."""
        return max(1, self.model.num_kv_heads // self._tp)

    @property
    def own_replicas(self) -> int:
        return self._tp // self.layout.row_parts

    @property
    def without_products(self) -> "TreeBuilder":
        """The builder whose linear layers have the type of everything else."""
        return replace(self, inputs=replace(self.inputs, products=None))

    def embedding(self) -> Module:
        """Return the tables of tokens and, if learned, of positions."""
        model = self.model
        width = self.model.hidden_size
        lookup = table_lookup(self.tokens * width * self.inputs.plain_dtype.itemsize)
        if self.kernels.adds_table_gradient:
            numel = model.vocab_size // self._tp * width
            added = gradient_sum(numel, self.inputs.plain_dtype.itemsize, self.kernels)
            lookup = (*lookup, (Phase.WGRAD, added))
        tables = [("tokens", model.vocab_size // self._tp)]
        tables += [("positions", model.max_positions)] if model.max_positions else []
        leaves = []
        for name, rows in tables:
            param = Param(
                name=f"embedding.{name}.weight", shape=(rows, width), part="embedding"
            )
            work = work_of("embedding", *lookup, layer=None) if name == "tokens" else ()
            leaf = Module(
                name=name, role="embedding", work=work, params=(param,), has_input_grad=False
            )
            leaves.append(leaf)
        return self._trained(Module(name="embedding", inside=tuple(leaves)))

    def output(self) -> Module:
        """Return the last norm, the head and the loss."""
        model = self.model
        width = self.model.hidden_size
        vocab = model.vocab_size // (1 if self.layout.whole_loss else self._tp)
        loss = CrossEntropy(tokens=self.tokens, vocab=vocab, dtype=self.inputs.plain_dtype)
        narrow = self.inputs.products
        has_narrow_head = narrow is not None and narrow.has_head
        builder = self if has_narrow_head else self.without_products
        head = builder.linear(Linear("head", model.vocab_size, width, "out"), "head")
        norm = self._residual_norm("norm", "head.norm")
        inside = (
            replace(norm, keeps=SavedTensors(whole=width)),
            replace(head, keeps=SavedTensors(whole=width)),
            loss_module(loss, self.kernels),
        )
        return self._trained(Module(name="output", inside=tuple(map(_in_output, inside))))

    def block(self, *, moe: bool) -> Module:
        """Return attention and MLP or experts, each with its norm and its residual sum."""
        linears = list(self._fused(self.model.linears(moe)))
        attention = [linear for linear in linears if linear.name.startswith("attention.")]
        rest = linears[len(attention) :]
        inside = (
            self._residual_norm("attention_norm", "attention.norm"),
            Module(name="attention", inside=tuple(self._attention(attention))),
            self._residual("attention.residual"),
            self._residual_norm("ffn_norm", "mlp.norm"),
            self._experts(rest) if moe else Module(name="ffn", inside=self._mlp(rest)),
            self._residual("mlp.residual"),
        )
        return self._trained(Module(name="block", inside=inside))

    def _trained(self, unit: Module) -> Module:
        """Return the unit with its weights frozen where only adapters are trained."""
        return frozen(unit) if self.layout.lora else unit

    def _fused(self, linears: Iterable[Linear]) -> Iterator[Linear]:
        """Yield the products as the framework fuses them."""
        fused = self.layout.fused
        gate = None
        for linear in linears:
            role = linear.name.rpartition(".")[2]
            together = "experts" if "held" in linear.name else "gate_up"
            if role == "qkv" and "qkv" not in fused:
                for name in "qkv":
                    rows = self.model.num_heads if name == "q" else self.model.num_kv_heads
                    rows *= self.model.head_dim
                    yield replace(linear, name=f"attention.{name}", out=rows)
            elif role == "gate" and together in fused:
                gate = linear
            elif role == "up" and gate is not None:
                yield replace(linear, name=f"{gate.name}_up", out=2 * linear.out)
                gate = None
            else:
                yield linear

    def _attention(self, linears: list[Linear]) -> Iterator[Module]:
        model = self.model
        of_input = [
            linear.name
            for linear in linears
            if not linear.name.endswith(("up", "attention.out"))
        ]
        for linear in linears:
            if linear.name == "attention.out":
                yield from self._qk_norms()
                yield from self._scores()
                out = linear
                continue
            leaf = self.linear(linear, role_of(linear.name))
            if linear is linears[0]:
                leaf = replace(leaf, keeps=SavedTensors(whole=model.hidden_size))
            elif linear.name.endswith("up"):  # the latent vector is kept before its norm, too
                norm = linear.name.replace("up", "norm")
                yield self._norm(norm, role_of(norm), linear.width)
                leaf = replace(leaf, keeps=SavedTensors(divided=linear.width))
            if linear.name in of_input[:-1]:  # gradients of the input are added up
                leaf = replace(leaf, work=(*leaf.work, *self._sum(leaf.role, self.tokens).bwd))
            yield leaf
        yield replace(
            self.linear(out, role_of(out.name)), keeps=SavedTensors(divided=out.width)
        )

    def _qk_norms(self) -> Iterator[Module]:
        model = self.model
        heads = {"q_norm": model.num_heads // self._tp, "k_norm": self.kv_heads}
        for name in heads if model.qk_norm else ():
            rows = self.tokens * heads[name]
            path = f"attention.{name}"
            yield replace(self._norm(path, path, model.head_dim, rows), keeps=SavedTensors())

    def _scores(self) -> Iterator[Module]:
        """Yield rotary positions, and softmax(q k.T) v.

        Under context parallelism each rank has a chunk of the head and one of the tail of a
        sequence. Together they have as many pairs of queries and keys as seq_len / cp queries
        with seq_len / 2 keys each: the count is exact, the shape stands for the two chunks.
        """
        model = self.model
        inputs = self.inputs
        cp = self.layout.axes.cp
        heads = model.num_heads // self._tp
        kv_heads = self.kv_heads
        local_seq = inputs.seq_len // cp
        if not model.max_positions:
            mla = model.mla
            rope = Rope(
                batch=inputs.mbs,
                seq=local_seq,
                heads=heads,
                kv_heads=1 if mla else kv_heads,
                head_dim=mla.qk_rope_head_dim if mla else model.head_dim,
                dtype=inputs.plain_dtype,
            )
            rope_width = (model.num_heads + kv_heads * self._tp) * model.d_qk
            rope_width = model.num_heads * mla.qk_nope_head_dim if mla else rope_width
            yield replace(
                between("attention.rope", *both(rope)), keeps=SavedTensors(divided=rope_width)
            )
        core = Attention(
            batch=inputs.mbs,
            seq_q=local_seq,
            seq_kv=inputs.seq_len // 2 if cp > 1 else local_seq,
            heads=heads,
            kv_heads=heads if model.mla else kv_heads,
            head_dim_qk=model.d_qk,
            head_dim_v=model.d_v,
            causal=cp == 1,
            dtype=inputs.plain_dtype,
        )
        if self.kernels.stores_scores:
            kv_heads = core.kv_heads * self._tp
            yield from stored_scores(core, self.kernels, model.num_heads, kv_heads)
            return
        # Keys and values of all ranks of cp.
        keys = cp * kv_heads * self._tp * (model.d_qk + model.d_v)
        keeps = SavedTensors(
            divided=model.num_heads * model.d_qk + keys, statistics=model.num_heads
        )
        fused = replace(between("attention.core", *both(core)), keeps=keeps)
        # Context parallelism exchanges keys and values in the layout that they have.
        if self.kernels.batch_first and cp == 1:
            fused = with_transposes(fused, core)
        if self.kernels.unpads:
            fused = without_padding(fused, core)
        if self.kernels.joins_qkv:
            fused = with_joined_gradients(fused, core)
        yield fused

    def _mlp(self, linears: list[Linear], *, is_shared: bool = False) -> tuple[Module, ...]:
        *ups, down = (self.linear(linear, role_of(linear.name)) for linear in linears)
        width = linears[-1].width
        if not is_shared:  # shared experts have the router's input
            ups[0] = replace(ups[0], keeps=SavedTensors(whole=self.model.hidden_size))
        name = down.role.replace("down", "activation")
        activation = self._activation(name, self.tokens, width // self._tp, width)
        keeps = SavedTensors(divided=width)
        return (*self._with_grad_sum(ups, self.tokens), activation, replace(down, keeps=keeps))

    def _activation(self, role: str, rows: int, width: int, kept_width: int) -> Module:
        """kept_width: per token over all tp ranks. Eager SwiGLU keeps silu(gate), too."""
        kind = self.model.activation
        dtype = self.inputs.plain_dtype
        is_gated = kind == "swiglu"
        op = Activation(tokens=rows, width=width, kind=kind, dtype=dtype)
        gated = SavedTensors(divided=2 * kept_width, eager=kept_width)
        keeps = gated if is_gated else SavedTensors(divided=kept_width)
        if is_gated and not self.kernels.fused_swiglu:
            return replace(
                swiglu(role, op), keeps=replace(gated, divided=3 * kept_width, eager=0)
            )
        return replace(between(role, *both(op)), keeps=keeps)

    def _experts(self, linears: list[Linear]) -> Module:
        """Return router, routed experts and shared ones."""
        model = self.model
        moe = self.model.moe
        assert moe is not None
        router, *rest = linears
        routed = [linear for linear in rest if linear.copies > 1 or "held" in linear.name]
        keeps = SavedTensors(whole=model.hidden_size, divided=4 * moe.num_experts)
        *ups, down = (self._grouped(linear) for linear in routed)
        rows = self.expert_rows
        width = moe.ffn_hidden_size // self.layout.expert_tp
        copies = moe.top_k * model.hidden_size
        inner = moe.top_k * moe.ffn_hidden_size
        ups[0] = replace(ups[0], keeps=SavedTensors(divided=copies))
        expert_modules = (
            *self._with_grad_sum(ups, rows),
            self._activation("mlp.experts_activation", rows, width, inner),
            replace(down, keeps=SavedTensors(divided=inner + copies)),
        )
        inside = [
            replace(self.without_products.linear(router, "mlp.router"), keeps=keeps),
            Module(name="ffn.held", inside=expert_modules),
        ]
        if shared := rest[len(routed) :]:
            shared_modules = self._mlp(shared, is_shared=True)
            inside.append(Module(name="ffn.shared", inside=shared_modules))
        bias: tuple[Param, ...] = ()
        if moe.router_bias:
            param = Param(name="ffn.router_bias", shape=(moe.num_experts,), part="mlp.router")
            bias = (replace(param, is_trained=False),)
        return Module(name="ffn", params=bias, inside=tuple(inside))

    @property
    def expert_rows(self) -> int:
        """Rows of one rank's experts."""
        moe = self.model.moe
        etp = self.layout.expert_tp
        assert moe is not None
        rows = max(1, self.tokens * moe.top_k * max(etp, self.own_replicas) // self._tp)
        return self.inputs.expert_rows or rows

    def _grouped(self, linear: Linear) -> Module:
        etp = self.layout.expert_tp
        ep = self.layout.axes.ep
        inputs = self.inputs
        out = linear.out // etp if linear.split == "out" else linear.out
        width = linear.width // etp if linear.split == "in" else linear.width
        count = linear.copies // ep
        role = role_of(linear.name)
        rows = self.expert_rows
        ops: tuple[tuple[Phase, Op | Kernel], ...]
        if inputs.dtype is DType.FP64:  # no operator: experts one by one
            kernel = Kernel(name="experts", flops=2 * rows * out * width)
            ops = tuple((phase, kernel) for phase in (Phase.FWD, Phase.DGRAD, Phase.WGRAD))
        else:
            product = GroupedGemm(
                num_groups=count,
                tokens=rows,
                n=out,
                k=width,
                skew=inputs.skew,
                dtype=inputs.plain_dtype,
            )
            ops = tuple(grouped_products(inputs, product))
        if self.kernels.adds_gradients:
            added = gradient_sum(count * out * width, inputs.plain_dtype.itemsize, self.kernels)
            ops = (*ops, (Phase.WGRAD, added))
        # Without sequence parallelism every tp rank has all rows; ranks of another part of the
        # width do other work.
        num_replicas = max(1, self.own_replicas // etp)
        param = Param(name=linear.name, shape=(count, out, width), part=role, is_expert=True)
        work = work_of(role, *ops)
        return Module(
            name=linear.name, role=role, work=work, params=(param,), num_replicas=num_replicas
        )

    def linear(self, linear: Linear, role: str) -> Module:
        """Return a linear layer, with its adapter inside where it has one."""
        lora = self.layout.lora
        base = self._product(linear, role, self.inputs)
        if lora is None or not lora.adapts(role):
            return base
        down, up = (
            self._product(part, f"{role}.{part.name.rpartition('.')[2]}", self.plain_inputs)
            for part in lora.layers_of(linear)
        )
        rows = self.tokens if linear.split == "out" else self.own_tokens
        out = linear.out // self._tp if linear.split == "out" else linear.out
        added, scaled = work_of(
            up.role, *scaled_sum(rows * out * self.inputs.plain_dtype.itemsize)
        )
        up = replace(
            up,
            work=(*up.fwd, added, scaled, *up.bwd),
            keeps=SavedTensors(whole=lora.rank),
        )
        # Gradients of the input of both are added up after the weight's, which come last.
        size = down.params[0].shape[1] * self.tokens * self.inputs.plain_dtype.itemsize
        work = (*base.work, *tensor_sum(role, size).bwd)
        return replace(base, work=work, inside=(down, up))

    @property
    def plain_inputs(self) -> Inputs:
        """Inputs of products that are never lowered."""
        return replace(self.inputs, dtype=self.inputs.plain_dtype, products=None)

    def _product(self, linear: Linear, role: str, inputs: Inputs) -> Module:
        """Return y [m, n] = x [m, k] w [n, k].T; dx = dy w; dw = dy.T x."""
        out = linear.out // self._tp if linear.split == "out" else linear.out
        width = linear.width // self._tp if linear.split == "in" else linear.width
        rows, num_replicas = (
            (self.tokens, 1) if linear.split else (self.own_tokens, self.own_replicas)
        )
        narrow = inputs.products
        is_gathered = narrow is not None and narrow.casts_shards and self.own_tokens < rows
        products = linear_products(
            inputs,
            rows,
            out,
            width,
            x_rows=self.own_tokens if is_gathered and linear.split == "out" else None,
            dy_rows=self.own_tokens if is_gathered and linear.split == "in" else None,
        )
        weight = Param(name=f"{linear.name}.weight", shape=(out, width), part=role)
        weight = replace(weight, is_partial=not linear.split)
        bias = replace(weight, name=f"{linear.name}.bias", shape=(out,))
        is_narrow = narrow is not None and narrow.fits(out, width)
        weight = replace(weight, is_narrow=is_narrow)
        bias = replace(bias, is_partial=linear.split != "out")
        return Module(
            name=linear.name,
            role=role,
            work=work_of(role, *products, *self._weight_kernels(linear, role, rows)),
            params=(weight, bias) if linear.has_bias else (weight,),
            num_replicas=num_replicas,
            is_linear=True,
        )

    def _weight_kernels(self, linear: Linear, role: str, rows: int) -> Iterator[_PhaseKernel]:
        """Yield the kernels of a bias, and the sum of the weight's gradient.

        rows: of the product. A bias after the sum over tp has the rank's own rows.
        """
        kernels = self.kernels
        size = self.inputs.plain_dtype.itemsize
        out, width = linear.out, linear.width
        if linear.split == "out":
            out //= self._tp
        elif linear.split == "in":
            rows = self.own_tokens
            width //= self._tp
        if linear.has_bias and role in kernels.added_biases:
            yield Phase.FWD, memory_kernel("bias_add", 2 * rows * out * size)
        if linear.has_bias and role in kernels.summed_biases:
            yield Phase.WGRAD, memory_kernel("bias_gradient", rows * out * size)
        if kernels.adds_gradients:
            yield Phase.WGRAD, gradient_sum(out * width, size, kernels)

    def _norm(
        self, name: str, role: str, width: int, rows: int = 0, *, kind: str = "rmsnorm"
    ) -> Module:
        """rows: of a norm over heads; 0: the rank's own share of the tokens."""
        op = Norm(
            tokens=rows or self.own_tokens,
            hidden=width,
            kind=kind,
            dtype=self.inputs.plain_dtype,
        )
        param = Param(name=f"{name}.weight", shape=(width,), part=role, is_partial=True)
        num_replicas = 1 if rows else self.own_replicas
        return Module(
            name=name,
            role=role,
            work=work_of(role, *both(op)),
            params=(param,),
            num_replicas=num_replicas,
            keeps=SavedTensors(divided=width),
        )

    def _residual_norm(self, name: str, role: str) -> Module:
        """Return a norm of the residual stream, of the model's kind."""
        model = self.model
        is_layernorm = model.norm == "layernorm"
        norm = self._norm(name, role, model.hidden_size, kind=model.norm)
        weight = replace(norm.params[0], is_norm=True)
        bias = replace(weight, name=f"{name}.bias")
        return replace(
            norm,
            params=(weight, bias) if is_layernorm else (weight,),
            keeps=SavedTensors(divided=model.hidden_size, statistics=1 + is_layernorm),
        )

    def _residual(self, role: str) -> Module:
        """Return x + f(x)."""
        residual = replace(self._sum(role, self.own_tokens), num_replicas=self.own_replicas)
        if not self.kernels.dropout_of_rows:
            return residual
        width = self.model.hidden_size
        size = self.inputs.plain_dtype.itemsize
        return with_dropout(residual, self.own_tokens * width, width, size)

    def _sum(self, role: str, rows: int) -> Module:
        return tensor_sum(
            role, rows * self.model.hidden_size * self.inputs.plain_dtype.itemsize
        )

    def _with_grad_sum(self, ups: list[Module], rows: int) -> list[Module]:
        """Add up the input's gradients of gate and up, two products of it, after gate's."""
        if len(ups) == 1:
            return ups
        gate, up = ups
        return [replace(gate, work=(*gate.work, *self._sum(gate.role, rows).bwd)), up]


def _in_output(leaf: Module) -> Module:
    """Return a module as part of the output, outside of all layers."""
    return replace(
        leaf,
        work=tuple(replace(op, layer=None) for op in leaf.work),
        params=tuple(replace(param, name=f"output.{param.name}") for param in leaf.params),
        inside=tuple(map(_in_output, leaf.inside)),
    )
