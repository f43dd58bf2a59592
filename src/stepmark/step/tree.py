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
from stepmark.model.layers import Layer, Linear
from stepmark.model.model import EXPERT_NORMS, NORM_VECTORS, ModelConfig
from stepmark.model.ops import (
    Activation,
    CrossEntropy,
    Norm,
    Phase,
    Rope,
)
from stepmark.model.parallel import ParallelConfig, stage_layers
from stepmark.step.attention_core import attention_core, head_norm_params, index_scores
from stepmark.step.fp8_attention import in_fp8
from stepmark.step.grouped_linear import grouped_linear
from stepmark.step.kernel_choice import (
    KernelChoice,
    gated_kernels,
    gradient_sum,
    loss_module,
    memory_kernel,
    stored_scores,
    with_copies,
    with_dropout,
)
from stepmark.step.layout import (
    Inputs,
    ShardLayout,
    linear_products,
    table_lookup,
    tensor_sum,
)
from stepmark.step.lora import frozen, scaled_sum
from stepmark.step.module import (
    Module,
    Param,
    SavedTensors,
    between,
    both,
    outside_layers,
    role_of,
    work_of,
)
from stepmark.step.scan_modules import GATE, ScanModules
from stepmark.step.workload import Kernel

_PhaseKernel = tuple[Phase, Kernel]


def build(model: ModelConfig, layout: ShardLayout, inputs: Inputs) -> Module:
    """Return the modules of one pipeline stage on one rank."""
    layout.check(model)
    builder = TreeBuilder(model=model, layout=layout, inputs=inputs)
    stages = layout.stages
    units = [builder.embedding()] if stages[0] == 0 else []
    blocks = {layer: builder.block(layer) for layer in model.layer_counts}
    by_stage = stage_layers(model.num_layers, layout.num_stages, layout.split)
    for layers in (by_stage[stage] for stage in stages):
        units += [
            replace(blocks[layer], name=f"blocks.{first}", times=end - first)
            for first, end, layer in model.layer_runs(layers.start, layers.stop)
        ]
    if stages[-1] == layout.num_stages - 1:
        if model.num_mtp_layers:
            units.append(replace(builder.mtp(), times=model.num_mtp_layers))
        units.append(builder.output())
    return Module(inside=tuple(units))


def stage_of_case(case: TrainCase, stage: int) -> Module:
    """Return the modules of a training case's stage, not divided by tp and ep."""
    axes = ParallelConfig(cp=case.parallel.cp, pp=case.parallel.pp)
    layout = ShardLayout(
        axes=axes,
        stage=stage,
        chunks=case.num_stages // case.parallel.pp,
        schedule=case.pp_schedule,
        split=case.pp_split,
    )
    return _stage(case.model, layout, case.imbalance)


@lru_cache(maxsize=64)
def _stage(model: ModelConfig, layout: ShardLayout, imbalance: float) -> Module:
    return build(model, layout, Inputs(mbs=1, seq_len=model.seq_len, imbalance=imbalance))


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
        if model.per_layer_width:
            leaves += self._second_embedding()
        if model.embedding_multiplier != 1:
            leaves.append(self._scaled("embedding.scale", self.own_tokens))
        if model.embedding_norm:
            leaves.append(self._residual_norm("embedding.norm", "embedding.norm"))
        return self._trained(Module(name="embedding", inside=tuple(leaves)))

    def _second_embedding(self) -> Iterator[Module]:
        """Yield Gemma 4's inputs of all layers: a lookup, and a product of the first embedding.

        The product is normed and added. The three are scaled (modeling_gemma4.py of
        transformers 5.23, project_per_layer_inputs).
        """
        model = self.model
        product = model.per_layer_projection
        numel = self.tokens * product.out
        size = numel * self.inputs.plain_dtype.itemsize
        role = "embedding.per_layer"
        table = Param(name=f"{role}.weight", shape=(model.vocab_size, product.out), part=role)
        lookup = work_of(role, *table_lookup(size), layer=None)
        yield Module(name=role, role=role, work=lookup, params=(table,), has_input_grad=False)
        keeps = SavedTensors(whole=model.hidden_size)
        yield outside_layers(replace(self.linear(product, product.name), keeps=keeps))
        rows = self.tokens * model.num_layers
        norm = self._norm(f"{role}_norm", f"{role}_norm", model.per_layer_width, rows)
        yield outside_layers(replace(norm, keeps=SavedTensors(whole=product.out)))
        scaled = memory_kernel("scale", 6 * size)
        added = memory_kernel("add", 3 * size)
        work = (Phase.FWD, scaled), (Phase.FWD, added), (Phase.BWD, scaled)
        yield outside_layers(between(f"{role}_sum", *work))

    def output(self) -> Module:
        """Return the last norm, the head and the loss."""
        model = self.model
        width = self.model.hidden_size
        vocab = model.vocab_size // (1 if self.layout.whole_loss else self._tp)
        loss = CrossEntropy(tokens=self.tokens, vocab=vocab, dtype=self.inputs.plain_dtype)
        narrow = self.inputs.products
        has_narrow_head = narrow is not None and narrow.has_head
        builder = self if has_narrow_head else self.without_products
        head = builder.linear(model.head, "head")
        norm = self._residual_norm("norm", "head.norm")
        inside = (
            replace(norm, keeps=SavedTensors(whole=width)),
            replace(head, keeps=SavedTensors(whole=width)),
            *self._logit_kernels(self.tokens * vocab),
            loss_module(loss, self.kernels),
        )
        return self._trained(Module(name="output", inside=tuple(map(_in_output, inside))))

    def mtp(self) -> Module:
        """Return a module of multi-token prediction, with the model's table and head.

        DeepSeek-V3 (arXiv:2412.19437, section 2.2): the next token's embedding and the hidden
        state, each normed, are joined and projected; then a layer, a norm, head and loss.
        """
        model = self.model
        width = model.hidden_size
        lookup = self.embedding().inside[0]
        joined = memory_kernel(
            "concatenate", 4 * self.own_tokens * width * self.inputs.plain_dtype.itemsize
        )
        projection = self.linear(model.mtp_projection, "mtp.projection")
        _, *rest = self.output().inside
        norm = self._residual_norm("norm", "mtp.norm")
        inside = (
            replace(lookup, name="embedding", params=(), is_module=False),
            self._residual_norm("embedding_norm", "mtp.embedding_norm"),
            self._residual_norm("hidden_norm", "mtp.hidden_norm"),
            between("mtp.joined", (Phase.FWD, joined), (Phase.BWD, joined)),
            replace(projection, keeps=SavedTensors(whole=2 * width)),
            *self.block(model.mtp_layer).inside,
            replace(norm, keeps=SavedTensors(whole=width)),
            *(replace(leaf, params=()) for leaf in rest),
        )
        return self._trained(Module(name="mtp.0", inside=inside))

    def _logit_kernels(self, numel: int) -> Iterator[Module]:
        """Yield what scales logits, or caps them: c tanh(x / c), three kernels."""
        model = self.model
        size = numel * self.inputs.plain_dtype.itemsize
        if model.logit_multiplier != 1:
            op = memory_kernel("scale", 2 * size)
            yield between("head.scale", (Phase.FWD, op), (Phase.BWD, op))
        if model.logit_softcap:
            op = memory_kernel("softcap", 6 * size)
            back = memory_kernel("softcap_backward", 7 * size)
            capped = between("head.softcap", (Phase.FWD, op), (Phase.BWD, back))
            yield replace(capped, keeps=SavedTensors(divided=model.vocab_size))

    def block(self, layer: Layer) -> Module:
        """Return mixer and FFN, each with its norms and its residual sum."""
        own = replace(self, model=self.model.of_layer(layer))
        linears = list(own._fused(self.model.linears(layer)))
        mixing = [linear for linear in linears if linear.name.startswith("attention.")]
        parts: list[tuple[str, Module]] = []
        if layer.mixer:
            mixer = Module(name="attention", inside=tuple(own._mixer(layer, mixing)))
            parts.append(("attention", mixer))
        if layer.ffn:
            rest = [linear for linear in linears if linear.name.startswith("ffn.")]
            ffn = own._experts(rest) if layer.has_experts else None
            parts.append(("mlp", ffn or Module(name="ffn", inside=own._mlp(rest))))
        inside = [*self._placed(parts)]
        if self.model.per_layer_width:
            inside += self._gated_by_embedding(linears[-2:])
        if self.model.layer_scale:
            inside.append(self._scaled("layer.scale", self.own_tokens))
        return self._trained(Module(name="block", inside=tuple(inside)))

    def _gated_by_embedding(self, linears: list[Linear]) -> Iterator[Module]:
        """Yield x + norm(out(gelu(gate(x)) * e)) with the layer's part e of its embedding."""
        gate, out = (self.linear(linear, linear.name) for linear in linears)
        width = out.params[0].shape[1]
        yield replace(gate, keeps=SavedTensors(whole=self.model.hidden_size))
        yield self._activation("per_layer.activation", self.own_tokens, width, width)
        yield replace(out, keeps=SavedTensors(whole=width))
        yield self._residual_norm("per_layer_norm", "per_layer.norm")
        yield self._residual("per_layer.residual")

    def _placed(self, parts: list[tuple[str, Module]]) -> Iterator[Module]:
        """Yield a block's parts with their norms and residual sums around them."""
        model = self.model
        placement = model.norm_placement
        sums = []
        for index, (role, part) in enumerate(parts):
            norm = self._residual_norm(_NORM_NAMES[role], f"{role}.norm")
            if placement in ("pre", "both") or (placement == "shared" and index == 0):
                yield norm
            yield part
            if placement == "post":
                yield norm
            if placement == "both":
                name = f"{_NORM_NAMES[role]}_after"
                yield self._residual_norm(name, f"{role}.norm_after")
            residual = self._residual(f"{role}.residual")
            if model.is_parallel:
                sums.append(residual)
            else:
                yield residual
        yield from sums

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
                k_rows = self.model.num_kv_heads * self.model.d_qk
                v_rows = 0 if self.model.shares_kv else self.model.num_kv_heads * self.model.d_v
                q_rows = linear.out - k_rows - v_rows
                names = "qkv" if v_rows else "qk"
                for name, rows in zip(names, (q_rows, k_rows, v_rows), strict=False):
                    yield replace(linear, name=f"attention.{name}", out=rows)
            elif linear.name.startswith("ffn.") and role == "gate" and together in fused:
                gate = linear
            elif role == "up" and gate is not None:
                yield replace(linear, name=f"{gate.name}_up", out=2 * linear.out)
                gate = None
            else:
                yield linear

    def _mixer(self, layer: Layer, linears: list[Linear]) -> Iterator[Module]:
        """Yield what mixes tokens: attention, a scan, or both of one input and their sum."""
        of_scan = linears
        if layer.has_attention:
            of_scan = [linear for linear in linears if linear.name.startswith(_SSM)]
        if layer.scan:
            scan = ScanModules(
                model=self.model,
                layer=layer,
                inputs=self.inputs,
                tokens=self.tokens,
                tp=self._tp,
            )
            yield from self._projected(of_scan, scan.modules())
        if layer.has_attention:
            own = [linear for linear in linears if linear not in of_scan or not layer.scan]
            yield from self._projected(own, self._attention(layer))
        if layer.has_attention and layer.scan:
            yield self._sum("attention.sum", self.own_tokens)

    def _projected(self, linears: list[Linear], inside: Iterable[Module]) -> Iterator[Module]:
        """Yield products of a mixer's input, what is inside, and the output's product."""
        model = self.model
        *projections, out = linears
        of_input = [
            linear.name
            for linear in projections
            if linear.has_input_grad and not linear.name.endswith("up")
        ]
        for linear in projections:
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
        yield from inside
        yield replace(
            self.linear(out, role_of(out.name)), keeps=SavedTensors(divided=out.width)
        )

    def _attention(self, layer: Layer) -> Iterator[Module]:
        """Yield what is between attention's projections."""
        yield from self._head_norms(layer)
        if layer.has_indexer:
            yield from self._indexer()
        yield from self._scores(layer)
        if self.model.gate:
            yield self._output_gate()

    def _output_gate(self) -> Module:
        """Return the product of attention's output with a sigmoid."""
        model = self.model
        width = model.num_heads * model.d_v
        gate_width = width if model.gate == "element" else model.num_heads
        size = self.tokens * self.inputs.plain_dtype.itemsize // self._tp
        fwd = memory_kernel(GATE, size * (2 * width + gate_width))
        bwd = memory_kernel("gate_backward", size * (3 * width + 2 * gate_width))
        gated = between("attention.gated", (Phase.FWD, fwd), (Phase.BWD, bwd))
        return replace(gated, keeps=SavedTensors(divided=width + gate_width))

    def _indexer(self) -> Iterator[Module]:
        """Yield the norm of the indexer's keys, and the scores that choose keys."""
        mla = self.model.mla
        if mla is None or mla.indexer is None:
            return
        indexer = mla.indexer
        norm = self._norm(
            "attention.index_norm",
            "attention.index_norm",
            indexer.head_dim,
            self.tokens,
            kind="layernorm",
        )
        (weight,) = norm.params
        bias = replace(weight, name="attention.index_norm.bias")
        yield replace(norm, params=(weight, bias))
        scores = index_scores(indexer, self.inputs, self.tokens)
        yield replace(scores, num_replicas=self._tp)

    def _head_norms(self, layer: Layer) -> Iterator[Module]:
        """Yield norms of queries, keys and values, and the scale of values, as there are."""
        model = self.model
        is_whole = model.qk_norm_kind == "all"
        heads = {"q_norm": model.num_heads // self._tp}
        if layer.has_kv:
            heads["k_norm"] = self.kv_heads
        for name, count in heads.items() if model.qk_norm else ():
            width = model.head_dim * (count if is_whole else 1)
            rows = self.tokens * (1 if is_whole else count)
            path = f"attention.{name}"
            is_rms = not model.qk_norm_kind.startswith("layernorm")
            norm = self._norm(
                path, path, width, rows, kind="rmsnorm" if is_rms else "layernorm"
            )
            yield replace(
                norm,
                params=head_norm_params(model, norm.params[0], count),
                is_module=model.qk_norm_kind != "unit",
                keeps=SavedTensors(),
            )
        if model.v_norm and layer.has_kv:
            path = "attention.v_norm"
            norm = self._norm(path, path, model.d_v, self.tokens * self.kv_heads)
            norm = replace(norm, params=(), is_module=False, keeps=SavedTensors())
            if model.shares_kv:  # gradients of one product, as key and as value, are added up
                added = self._sum(path, self.tokens, model.head_dim * self.kv_heads).bwd
                norm = replace(norm, work=(*norm.work, *added))
            yield norm

        if model.value_multiplier != 1 and layer.has_kv:
            yield self._scaled("attention.value_scale", self.tokens, self.kv_heads * model.d_v)

    def _scores(self, layer: Layer) -> Iterator[Module]:
        """Yield rotary positions, and softmax(q k.T) v.

        Under context parallelism each rank has a chunk of the head and one of the tail of a
        sequence. Together they have as many pairs of queries and keys as seq_len / cp queries
        with seq_len / 2 keys each: the count is exact, the shape stands for the two chunks.
        """
        model = self.model
        inputs = self.inputs
        cp = self.layout.axes.cp
        kv_heads = self.kv_heads
        if not model.max_positions and layer.has_rope:
            mla = model.mla
            heads = model.num_heads // self._tp
            if not layer.has_kv:  # queries alone, of which one stands for the key
                heads = max(1, heads - 1)
            rope = Rope(
                batch=inputs.mbs,
                seq=inputs.seq_len // cp,
                heads=heads,
                kv_heads=1 if mla or not layer.has_kv else kv_heads,
                head_dim=mla.qk_rope_head_dim if mla else model.rotary_dim or model.head_dim,
                dtype=inputs.plain_dtype,
            )
            num_rotated = model.num_heads + kv_heads * self._tp * layer.has_kv
            rope_width = num_rotated * model.d_qk
            rope_width = model.num_heads * mla.qk_nope_head_dim if mla else rope_width
            yield replace(
                between("attention.rope", *both(rope)), keeps=SavedTensors(divided=rope_width)
            )
        core = attention_core(model, layer, inputs, self.layout.axes)
        if self.kernels.stores_scores:
            kv_heads = core.kv_heads * self._tp
            for part in stored_scores(core, self.kernels, model.num_heads, kv_heads):
                is_softmax = part.role == "attention.softmax"
                yield self._with_sinks(part) if is_softmax else part
            return
        # Keys and values of all ranks of cp.
        keys = cp * kv_heads * self._tp * (model.d_qk + model.d_v) * layer.has_kv
        keeps = SavedTensors(
            divided=model.num_heads * model.d_qk + keys, statistics=model.num_heads
        )
        fused = replace(between("attention.core", *both(core)), keeps=keeps)
        if inputs.products is not None and inputs.products.attention is not None:
            fused = in_fp8(fused, core, inputs.products)
        fused = self._with_sinks(fused)
        if not layer.has_kv:  # gradients of keys and values are added to the earlier layer's
            width = kv_heads * (model.d_qk + model.d_v)
            added = self._sum("attention.core", self.tokens, width).bwd
            fused = replace(fused, work=(*fused.work, *added))
        yield with_copies(fused, core, self.kernels, cp)

    def _with_sinks(self, module: Module) -> Module:
        """Return a module with the logit of each head that the softmax adds."""
        if not self.model.has_sinks:
            return module
        shape = (self.model.num_heads // self._tp,)
        return replace(
            module, params=(Param(name="attention.sinks", shape=shape, part=module.role),)
        )

    def _mlp(self, linears: list[Linear], *, is_shared: bool = False) -> tuple[Module, ...]:
        *ups, down = (self.linear(linear, role_of(linear.name)) for linear in linears)
        width = linears[-1].width
        if not is_shared:  # shared experts have the router's input
            ups[0] = replace(ups[0], keeps=SavedTensors(whole=self.model.hidden_size))
        name = down.role.replace("down", "activation")
        activation = self._activation(name, self.tokens, width // self._tp, width)
        keeps = SavedTensors(divided=width)
        if not is_shared:
            numbers = (
                Param(name=vector.name, shape=vector.shape, part=name, is_partial=True)
                for vector in self.model.activation_vectors
            )
            activation = replace(activation, params=tuple(numbers))
        return (*self._with_grad_sum(ups, self.tokens), activation, replace(down, keeps=keeps))

    def _activation(self, role: str, rows: int, width: int, kept_width: int) -> Module:
        """kept_width: per token over all tp ranks.

        Eager SwiGLU keeps silu(gate), too; gpt-oss's the clamped gate, up + 1, their product
        and the sigmoid; xIELU 4.5 tensors in all.
        """
        is_gated = self.model.is_gated
        kind = self.model.activation
        dtype = self.inputs.plain_dtype
        op = Activation(tokens=rows, width=width, kind=kind, dtype=dtype)
        between_kernels = 4 if kind == "clamped_swiglu" else 1
        gated = SavedTensors(divided=2 * kept_width, eager=between_kernels * kept_width)
        between_one = kept_width * 7 // 2 if kind == "xielu" else 0
        alone = SavedTensors(divided=kept_width, eager=between_one)
        keeps = gated if is_gated else alone
        if is_gated and not self.kernels.fused_swiglu:
            return replace(
                gated_kernels(role, op),
                keeps=replace(gated, divided=(2 + between_kernels) * kept_width, eager=0),
            )
        return replace(between(role, *both(op)), keeps=keeps)

    def _experts(self, linears: list[Linear]) -> Module:
        """Return router, routed experts and shared ones."""
        model = self.model
        moe = self.model.moe
        assert moe is not None
        by_part: dict[str, list[Linear]] = {"held": [], "shared": []}
        apart = {}
        for linear in linears:
            part = linear.name.split(".")[1]
            by_part.get(part, []).append(linear)
            if part not in by_part:
                apart[part] = self.linear(linear, role_of(linear.name))
        keeps = SavedTensors(whole=model.hidden_size, divided=4 * moe.num_experts)
        rows = self.expert_rows
        # Without sequence parallelism every tp rank has all rows; ranks of another part of the
        # width do other work.
        num_replicas = max(1, self.own_replicas // self.layout.expert_tp)
        *ups, down = (
            replace(
                grouped_linear(linear, rows, self.layout, self.inputs, self.kernels),
                num_replicas=num_replicas,
            )
            for linear in by_part["held"]
        )
        width = moe.ffn_hidden_size // self.layout.expert_tp
        outer = moe.latent_size or model.hidden_size
        copies = self.inputs.fullest(moe.top_k * outer)
        inner = self.inputs.fullest(moe.top_k * moe.ffn_hidden_size)
        ups[0] = replace(ups[0], keeps=SavedTensors(divided=copies))
        expert_modules = (
            *self._with_grad_sum(ups, rows, outer),
            self._activation("mlp.experts_activation", rows, width, inner),
            replace(down, keeps=SavedTensors(divided=inner + copies)),
        )
        (router,) = (linear for linear in linears if linear.name == "ffn.router")
        norms = self._expert_norms()
        inside = [replace(self.without_products.linear(router, "mlp.router"), keeps=keeps)]
        inside[:0] = norms[:2]
        if "to_latent" in apart:
            inside.append(apart["to_latent"])
        inside.append(Module(name="ffn.held", inside=expert_modules))
        if "from_latent" in apart:
            kept = SavedTensors(divided=moe.latent_size)
            inside.append(replace(apart["from_latent"], keeps=kept))
        inside += norms[2:3]
        if shared := by_part["shared"]:
            shared_modules = self._mlp(shared, is_shared=not moe.has_norms)
            inside.append(Module(name="ffn.shared", inside=shared_modules))
        if "shared_weight" in apart:
            inside += [apart["shared_weight"], self._shared_gate()]
        inside += norms[3:]
        bias: tuple[Param, ...] = ()
        if moe.router_bias:
            param = Param(name="ffn.router_bias", shape=(moe.num_experts,), part="mlp.router")
            bias = (replace(param, is_trained=False),)
        return Module(name="ffn", params=bias, inside=tuple(inside))

    def _expert_norms(self) -> tuple[Module, ...]:
        """Return the norms of the router, of routed experts (before, after) and of shared ones.

        The scale of the router's input is the weight of its norm. The one of experts' weights
        is a number per expert.
        """
        moe = self.model.moe
        if moe is None or not moe.has_norms:
            return ()
        path = "mlp.router_norm"
        norm = self._norm("ffn.router_norm", path, self.model.hidden_size)
        scale = replace(norm.params[0], name="ffn.router_scale")
        per_expert = replace(scale, name="ffn.expert_scale", shape=(moe.num_experts,))
        return (
            replace(norm, params=(scale, per_expert)),
            *(self._residual_norm(f"ffn.{name}", f"mlp.{name}") for name in EXPERT_NORMS),
        )

    def _shared_gate(self) -> Module:
        """Return the product of the shared experts' result with each token's sigmoid."""
        width = self.model.hidden_size
        size = self.own_tokens * width * self.inputs.plain_dtype.itemsize
        fwd = memory_kernel(GATE, 2 * size)
        bwd = memory_kernel("gate_backward", 3 * size)
        gated = between("mlp.shared_gated", (Phase.FWD, fwd), (Phase.BWD, bwd))
        return replace(gated, keeps=SavedTensors(divided=width), num_replicas=self.own_replicas)

    @property
    def expert_rows(self) -> int:
        """Rows of one rank's experts."""
        moe = self.model.moe
        etp = self.layout.expert_tp
        assert moe is not None
        rows = max(1, self.tokens * moe.top_k * max(etp, self.own_replicas) // self._tp)
        return self.inputs.expert_rows or self.inputs.fullest(rows)

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
        if not linear.has_input_grad:
            products = (each for each in products if each[0] is not Phase.DGRAD)
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
            has_input_grad=linear.has_input_grad,
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
        kind = "rmsnorm" if model.norm == "rmsnorm" else "layernorm"
        norm = self._norm(name, role, model.hidden_size, kind=kind)
        weight = replace(norm.params[0], is_norm=True)
        bias = replace(weight, name=f"{name}.bias")
        return replace(
            norm,
            params=(weight, bias)[: NORM_VECTORS[model.norm]],
            keeps=SavedTensors(divided=model.hidden_size, statistics=1 + (kind == "layernorm")),
        )

    def _residual(self, role: str) -> Module:
        """Return x + f(x), or x + c f(x)."""
        residual = replace(self._sum(role, self.own_tokens), num_replicas=self.own_replicas)
        if self.model.residual_multiplier != 1:
            scaled = self._scaled(role, self.own_tokens)
            work = (*scaled.fwd, *residual.work, *scaled.bwd)
            residual = replace(residual, work=work)
        if not self.kernels.dropout_of_rows:
            return residual
        width = self.model.hidden_size
        size = self.inputs.plain_dtype.itemsize
        return with_dropout(residual, self.own_tokens * width, width, size)

    def _scaled(self, role: str, rows: int, width: int = 0) -> Module:
        """Return the product of rows with a number. width: 0: the hidden width."""
        width = width or self.model.hidden_size
        size = rows * width * self.inputs.plain_dtype.itemsize
        op = memory_kernel("scale", 2 * size)
        return between(role, (Phase.FWD, op), (Phase.BWD, op))

    def _sum(self, role: str, rows: int, width: int = 0) -> Module:
        """width: of a row; 0: the hidden width."""
        width = width or self.model.hidden_size
        return tensor_sum(role, rows * width * self.inputs.plain_dtype.itemsize)

    def _with_grad_sum(self, ups: list[Module], rows: int, width: int = 0) -> list[Module]:
        """Add up the input's gradients of gate and up, two products of it, after gate's."""
        if len(ups) == 1:
            return ups
        gate, up = ups
        return [replace(gate, work=(*gate.work, *self._sum(gate.role, rows, width).bwd)), up]


_NORM_NAMES = {"attention": "attention_norm", "mlp": "ffn_norm"}
_SSM = "attention.ssm_"


def _in_output(leaf: Module) -> Module:
    """Return a module as part of the output, outside of all layers."""
    params = tuple(replace(param, name=f"output.{param.name}") for param in leaf.params)
    inside = tuple(map(_in_output, leaf.inside))
    return replace(outside_layers(leaf), params=params, inside=inside)
