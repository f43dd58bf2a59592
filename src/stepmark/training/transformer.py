"""One decoder for all patterns of layers, from GPT-2 to Qwen3-Next, written for one device.

Parallelism, compilation and recomputation are applied from outside: linear layers are plain
nn.Linear, blocks are named by their global index, and a range of them is a pipeline stage.
Weights depend on a seed and their name alone, not on how they are sharded.

B batch, T tokens, N = B * T, C hidden width, D rotary width of a head, V vocabulary.
"""

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional

from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.model.layers import Layer
from stepmark.model.model import ModelConfig
from stepmark.training.attention import KERNELS, Attention, LatentAttention, rope_tables
from stepmark.training.layers import Experts, FeedForward, Norm
from stepmark.training.scans import AttentionWithMamba, DeltaNet, Lightning, Mamba

# (logits_NV, labels_N) -> the mean cross-entropy over the labels that count, in fp32
Loss = Callable[[Tensor, Tensor], Tensor]
# Selects a table's rows for this rank's tokens: context parallelism gives each rank its own.
Rows = Callable[[Tensor], Tensor]


def _all_rows(table: Tensor) -> Tensor:
    return table


class Embedding(nn.Module):
    """x_BTC of tokens_BT in the dtype of the computation, with learned positions added.

    Rows may be scaled, and normed.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.positions_T: Tensor
        self.tokens = nn.Embedding(model.vocab_size, model.hidden_size)
        self.positions: nn.Embedding | None = None
        self.own_rows: Rows = _all_rows
        if model.max_positions:
            self.positions = nn.Embedding(model.max_positions, model.hidden_size)
            self.register_buffer("positions_T", torch.empty(0), persistent=False)
            self.seq_len = model.seq_len
            self.fill_tables()
        self.multiplier = model.embedding_multiplier
        self.norm = Norm(model.norm, model.hidden_size) if model.embedding_norm else None

    def fill_tables(self) -> None:
        """Write the tables, which are empty after creation on the meta device."""
        if self.positions is not None:
            device = self.positions_T.device
            self.positions_T = self.own_rows(torch.arange(self.seq_len, device=device))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC: Tensor = self.tokens(tokens_BT)
        if self.positions is not None:
            x_BTC = x_BTC + self.positions(self.positions_T[: tokens_BT.shape[1]])
        device = x_BTC.device.type
        # fp32 tables would make the residual stream of all blocks fp32.
        if torch.is_autocast_enabled(device):
            x_BTC = x_BTC.to(torch.get_autocast_dtype(device))
        if self.multiplier != 1:
            x_BTC = x_BTC * self.multiplier
        return x_BTC if self.norm is None else self.norm(x_BTC)


class RotaryTables(nn.Module):
    """Cosines and sines of positions, for one width, in fp32 for any dtype of weights."""

    def __init__(self, seq_len: int, width: int) -> None:
        super().__init__()
        self.cos_TD: Tensor
        self.sin_TD: Tensor
        self.seq_len = seq_len
        self.width = width
        self.own_rows: Rows = _all_rows
        self.register_buffer("cos_TD", torch.empty(0), persistent=False)
        self.register_buffer("sin_TD", torch.empty(0), persistent=False)
        self.fill_tables()

    def fill_tables(self) -> None:
        """Write the tables, which are empty after creation on the meta device."""
        cos_TD, sin_TD = rope_tables(self.seq_len, self.width, self.cos_TD.device)
        self.cos_TD, self.sin_TD = self.own_rows(cos_TD), self.own_rows(sin_TD)


def rotary_width(model: ModelConfig, layer: Layer) -> int:
    """Return how much of a layer's heads is rotated; 0: nothing."""
    if model.max_positions or not layer.has_attention or not layer.has_rope:
        return 0
    if model.mla:
        return model.mla.qk_rope_head_dim
    own = model.of_layer(layer)
    return own.rotary_dim or own.d_qk


def mixer(model: ModelConfig, index: int, kernel: str) -> nn.Module | None:
    """Return what mixes the tokens of a layer."""
    layer = model.layers[index]
    own = model.of_layer(layer)
    module: nn.Module | None = None
    if layer.scan == "mamba" and model.mamba:
        module = (
            AttentionWithMamba(own, model.mamba, layer, kernel)
            if layer.has_attention
            else Mamba(own, model.mamba, layer)
        )
    elif layer.scan == "delta" and model.delta:
        module = DeltaNet(own, model.delta, layer)
    elif layer.scan == "lightning":
        module = Lightning(own, index, layer)
    elif layer.has_attention and model.mla:
        module = LatentAttention(own, model.mla, kernel, layer)
    elif layer.has_attention:
        module = Attention(own, layer, kernel)
    return module


def feed_forward(model: ModelConfig, layer: Layer) -> nn.Module | None:
    """Return the MLP or the experts of a layer."""
    if layer.has_experts and model.moe:
        return Experts(model, model.moe)
    if not layer.ffn:
        return None
    own = model.of_layer(layer)
    return FeedForward(
        own.hidden_size,
        own.ffn_hidden_size,
        activation=own.activation,
        bias=own.linear_bias or "mlp" in own.biases,
    )


class Block(nn.Module):
    """Attention and MLP or experts, each with its norms and added to the residual stream.

    A layer may lack either, or mix tokens otherwise. Parallel parts have the same input.
    """

    def __init__(self, model: ModelConfig, index: int, attention: str) -> None:
        super().__init__()
        layer = model.layers[index]
        norm = functools.partial(Norm, model.norm, model.hidden_size)
        placement = model.norm_placement
        has_after = placement == "both"
        self.has_norms_before = placement != "post"
        self.shares_norm = placement == "shared" and bool(layer.mixer)
        self.is_parallel = model.is_parallel
        self.multiplier = model.residual_multiplier
        self.attention_norm = norm() if layer.mixer else None
        self.attention = mixer(model, index, attention)
        self.attention_norm_after = norm() if layer.mixer and has_after else None
        self.ffn_norm = norm() if layer.ffn and not self.shares_norm else None
        self.ffn = feed_forward(model, layer)
        self.ffn_norm_after = norm() if layer.ffn and has_after else None

    def forward(
        self, x_BTC: Tensor, cos_TD: Tensor | None = None, sin_TD: Tensor | None = None
    ) -> Tensor:
        sum_BTC = h_BTC = x_BTC
        if self.attention is not None:
            h_BTC = self._before(self.attention_norm, x_BTC)
            y_BTC = self.attention(h_BTC, cos_TD, sin_TD)
            sum_BTC = x_BTC + self._after(self.attention_norm, self.attention_norm_after, y_BTC)
        if self.ffn is not None:
            if not self.shares_norm:
                h_BTC = self._before(self.ffn_norm, x_BTC if self.is_parallel else sum_BTC)
            y_BTC = self.ffn(h_BTC)
            sum_BTC = sum_BTC + self._after(self.ffn_norm, self.ffn_norm_after, y_BTC)
        return sum_BTC

    def _before(self, norm: nn.Module | None, x_BTC: Tensor) -> Tensor:
        return norm(x_BTC) if norm is not None and self.has_norms_before else x_BTC

    def _after(self, norm: nn.Module | None, after: nn.Module | None, y_BTC: Tensor) -> Tensor:
        """Return what a part adds to the residual stream."""
        last = after if self.has_norms_before else norm
        y_BTC = y_BTC if last is None else last(y_BTC)
        return y_BTC if self.multiplier == 1 else y_BTC * self.multiplier


class LaterTokens(Block):
    """A module of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    A hidden state and the embedding of a later token, each normed, are joined and projected;
    then come a layer like the model's last and a norm. Table and head are the model's.
    """

    def __init__(self, model: ModelConfig, attention: str) -> None:
        super().__init__(model, model.num_layers - 1, attention)
        projection = model.mtp_projection
        self.embedding_norm = Norm(model.norm, model.hidden_size)
        self.hidden_norm = Norm(model.norm, model.hidden_size)
        self.projection = nn.Linear(projection.width, projection.out, bias=False)
        self.norm = Norm(model.norm, model.hidden_size)

    def forward(  # type: ignore[override]
        self,
        h_BTC: Tensor,
        later_BTC: Tensor,
        cos_TD: Tensor | None = None,
        sin_TD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden state for the next module, and the head's input."""
        joined = torch.cat((self.hidden_norm(h_BTC), self.embedding_norm(later_BTC)), dim=-1)
        h_BTC = super().forward(self.projection(joined), cos_TD, sin_TD)
        return h_BTC, self.norm(h_BTC)


class Output(nn.Module):
    """Last norm and head: logits, or with labels the loss."""

    def __init__(self, model: ModelConfig, loss_chunks: int) -> None:
        super().__init__()
        self.norm = Norm(model.norm, model.hidden_size)
        head = model.head
        self.head = nn.Linear(head.width, head.out, bias=head.has_bias)
        self.loss_chunks = loss_chunks
        self.adapt_logits: Logits | None = None
        self.summed_loss: SummedLoss = summed_loss
        if model.logit_multiplier != 1 or model.logit_softcap:
            self.adapt_logits = functools.partial(
                adapted_logits,
                multiplier=model.logit_multiplier,
                softcap=model.logit_softcap,
            )
            self.summed_loss = functools.partial(summed_loss, adapt=self.adapt_logits)
        self.mean_loss: Loss = mean_loss  # of logits that tensor parallelism may divide

    def forward(
        self, x_BTC: Tensor, labels_BT: Tensor | None = None, *, is_normed: bool = False
    ) -> Tensor:
        """Return logits_BTV, or the mean cross-entropy over labels other than -100, in fp32."""
        h_BTC: Tensor = x_BTC if is_normed else self.norm(x_BTC)
        if labels_BT is not None and self.loss_chunks > 1:
            return chunked_loss(
                self.head,
                h_BTC.flatten(0, 1),
                labels_BT.flatten(),
                num_chunks=self.loss_chunks,
                summed=self.summed_loss,
            )
        logits_BTV: Tensor = self.head(h_BTC)
        if self.adapt_logits is not None:
            logits_BTV = self.adapt_logits(logits_BTV)
        if labels_BT is None:
            return logits_BTV
        return self.mean_loss(logits_BTV.flatten(0, 1), labels_BT.flatten())

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile it as one graph; with chunks the loss of a chunk, which takes gradients."""
        if self.loss_chunks == 1:
            super().compile(*args, **kwargs)
            return
        self.norm.compile(*args, **kwargs)
        self.summed_loss = torch.compile(self.summed_loss, *args, **kwargs)


class Transformer(nn.Module):
    """The blocks of `layers`, by global index, with embedding and output where asked for.

    Weights and tables have values only after init_weights.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        layers: range | None = None,
        has_embedding: bool = True,
        has_output: bool = True,
        attention: str = "auto",
        loss_chunks: int = 1,
    ) -> None:
        super().__init__()
        layers = range(model.num_layers) if layers is None else layers
        _check(model, layers, attention, loss_chunks)
        self.model = model
        self.embedding = Embedding(model) if has_embedding else None
        self.blocks = nn.ModuleDict(
            {str(index): Block(model, index, attention) for index in layers}
        )
        num_mtp = model.num_mtp_layers if has_output else 0
        self.mtp = nn.ModuleDict(
            {str(index): LaterTokens(model, attention) for index in range(num_mtp)}
        )
        self.output = Output(model, loss_chunks) if has_output else None
        every = model.layers
        self.rotary_widths = {
            str(index): str(rotary_width(model, every[index]) or "") for index in layers
        }
        self.tables = nn.ModuleDict(
            {
                width: RotaryTables(model.seq_len, int(width))
                for width in dict.fromkeys(self.rotary_widths.values())
                if width
            }
        )
        self.tie()

    def forward(self, x: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        """Return x_BTC where there is no output; else logits_BTV, or with labels the loss.

        x is tokens_BT where there is an embedding, else x_BTC of the previous stage.
        """
        tokens_BT = x
        if self.embedding is not None:
            x = self.embedding(x)
        for index, block in self.blocks.items():
            x = block(x, *self.rotary_tables(index))
        if self.output is None:
            return x
        out: Tensor = self.output(x, labels_BT)
        if labels_BT is not None and self.mtp:
            out = out + MTP_WEIGHT * self._loss_of_later_tokens(tokens_BT, x, labels_BT)
        return out

    def _loss_of_later_tokens(
        self, tokens_BT: Tensor, h_BTC: Tensor, labels_BT: Tensor
    ) -> Tensor:
        """Return the mean loss of the modules of multi-token prediction."""
        assert self.embedding is not None
        assert self.output is not None
        losses: list[Tensor] = []
        tables = self.rotary_tables(str(self.model.num_layers - 1))
        for module in self.mtp.values():
            tokens_BT = _next_tokens(tokens_BT, 0)
            labels_BT = _next_tokens(labels_BT, IGNORED)
            h_BTC, normed_BTC = module(h_BTC, self.embedding(tokens_BT), *tables)
            losses.append(self.output(normed_BTC, labels_BT, is_normed=True))
        return torch.stack(losses).mean()

    def rotary_tables(self, index: str) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return the tables of a block; None where it does not rotate."""
        width = self.rotary_widths[index]
        if not width:
            return None, None
        tables: Any = self.tables[width]
        return tables.cos_TD, tables.sin_TD

    def tie(self) -> None:
        """Tie the head's weight to the token table again, after it was moved or emptied."""
        embedding = self.embedding
        output = self.output
        if self.model.tied_embeddings and embedding is not None and output is not None:
            output.head.weight = embedding.tokens.weight


def _check(model: ModelConfig, layers: range, attention: str, loss_chunks: int) -> None:
    inside = 0 <= layers.start <= layers.stop <= model.num_layers
    if not inside or layers.step != 1:
        raise ConfigError("layers", layers, f"a part of the {model.num_layers} layers")
    if attention not in KERNELS:
        raise not_one_of("attention", attention, KERNELS)
    if loss_chunks < 1:
        raise ConfigError("loss_chunks", loss_chunks, "an integer from 1")


IGNORED = -100  # label of a token that does not count
MTP_WEIGHT = 0.3  # DeepSeek-V3's for its first 10 trillion tokens (section 4.2)


def _next_tokens(tokens_BT: Tensor, last: int) -> Tensor:
    """Return what follows each token; nothing follows the last."""
    return torch.cat((tokens_BT[:, 1:], torch.full_like(tokens_BT[:, :1], last)), dim=1)


# (head, x_NC, labels_N) -> fp32 sum over the labels that count
SummedLoss = Callable[[nn.Module, Tensor, Tensor], Tensor]
Logits = Callable[[Tensor], Tensor]


def adapted_logits(logits: Tensor, *, multiplier: float, softcap: float) -> Tensor:
    """Return logits times a number, and capped: c tanh(logits / c); softcap 0: not capped."""
    if multiplier != 1:
        logits = logits * multiplier
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def mean_loss(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Return the mean cross-entropy over the labels that count, in fp32."""
    return functional.cross_entropy(logits_NV.float(), labels_N, ignore_index=IGNORED)


def summed_loss(
    head: nn.Module, x_NC: Tensor, labels_N: Tensor, *, adapt: Logits | None = None
) -> Tensor:
    logits_NV: Tensor = head(x_NC)
    if adapt is not None:
        logits_NV = adapt(logits_NV)
    return functional.cross_entropy(
        logits_NV.float(), labels_N, ignore_index=IGNORED, reduction="sum"
    )


def chunked_loss(
    head: nn.Module,
    x_NC: Tensor,
    labels_N: Tensor,
    *,
    num_chunks: int,
    summed: SummedLoss = summed_loss,
) -> Tensor:
    """Return mean_loss(head(x_NC), labels_N), chunk by chunk; the head must map rows to rows.

    Gradients are taken in the forward pass, while a chunk's logits exist, so that the head is
    multiplied as often as without chunks. Those of the head's parameters are summed over chunks
    in the parameters' own dtype.
    """
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    return _in_chunks(head, summed, num_chunks, x_NC, labels_N, *weights)


class _ChunkedLoss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: nn.Module,
        summed: SummedLoss,
        num_chunks: int,
        x_NC: Tensor,
        labels_N: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        num_labels = (labels_N != IGNORED).sum()
        total = torch.zeros((), device=x_NC.device)
        grad_x_NC = torch.empty_like(x_NC)
        sums: list[Tensor] = []
        rows = zip(x_NC.chunk(num_chunks), grad_x_NC.chunk(num_chunks), strict=True)
        for (part, grad_part), labels in zip(rows, labels_N.chunk(num_chunks), strict=True):
            with torch.enable_grad():
                leaf = part.detach().requires_grad_()
                loss = summed(head, leaf, labels) / num_labels
            grad_leaf, *grads = torch.autograd.grad(loss, (leaf, *weights))
            total += loss.detach()
            grad_part.copy_(grad_leaf)
            if sums:
                torch._foreach_add_(sums, grads)
            else:
                sums = [grad.clone() for grad in grads]
        ctx.save_for_backward(grad_x_NC, *sums)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_NC, *sums = ctx.saved_tensors
        scaled = (total * grad.to(total.dtype) for total in sums)
        return None, None, None, grad_x_NC * grad.to(grad_x_NC.dtype), None, *scaled


# It takes gradients inside, which a graph cannot contain; functions that it calls may compile.
_in_chunks: Callable[..., Tensor] = torch.compiler.disable(_ChunkedLoss.apply)


STD = 0.02

# Wrappers insert these into a parameter's name.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module")
_HEAD = "output.head.weight"
_TABLE = "embedding.tokens.weight"
# Of layers with a state: heads step by softplus(-4.6) = 0.01 and decay by exp(-0.01) a token,
# both within the ranges from which Mamba-2 draws them.
_FILLS = {"dt_bias": -4.6, "A_log": 0.0, "D": 1.0}


@torch.no_grad()
def init_weights(module: nn.Module, seed: int) -> None:
    """Fill all parameters and tables: matrices normal with std 0.02, norms 1, biases 0.

    Vectors of layers with a state have the values of _FILLS.

    Values do not depend on how the model is split or sharded, on one kind of device: every rank
    draws a whole parameter on its device, one at a time, and keeps its part.
    """
    is_tied = any(part.model.tied_embeddings for part in _transformers(module))
    for wrapped, parameter in module.named_parameters():
        name = canonical_name(wrapped)
        if is_tied and name == _HEAD:  # in a stage without the table
            name = _TABLE
        _fill_parameter(parameter, name, seed)
    for part in module.modules():
        if isinstance(part, RotaryTables | Embedding):
            part.fill_tables()


def tie(module: nn.Module) -> None:
    """Tie the head to the token table where the model does and both are in this stage."""
    for part in _transformers(module):
        part.tie()


def canonical_name(name: str) -> str:
    """Return a parameter's name in the bare Transformer."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _transformers(module: nn.Module) -> list[Transformer]:
    return [part for part in module.modules() if isinstance(part, Transformer)]


def _fill_parameter(parameter: Tensor, name: str, seed: int) -> None:
    *_, owner, kind = name.split(".")
    if kind in _FILLS:
        parameter.fill_(_FILLS[kind])
    elif kind.endswith("bias"):
        parameter.zero_()
    elif owner.endswith(("norm", "norm_after")):
        parameter.fill_(1)
    else:
        _fill_normal(parameter, _seed_of(name, seed))


def _seed_of(name: str, seed: int) -> int:
    """Return 63 bits that are equal in all processes, unlike hash()."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _fill_normal(parameter: Tensor, seed: int) -> None:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    generator = torch.Generator(local.device).manual_seed(seed)
    full = torch.empty(parameter.shape, device=local.device)  # fp32 for any dtype of weights
    full.normal_(std=STD, generator=generator)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        placements = parameter.placements
        # src_data_rank=None: every rank has the same tensor already.
        full = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
    local.copy_(full)
