"""A user's training script: a Llama-like decoder of 70B parameters under FSDP2 x TP with
sequence parallelism and AdamW, in plain PyTorch. It knows nothing of stepmark.

    stepmark workload capture examples/capture_fsdp_tp.py:build --world-size 1024 -o c.json
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    num_layers: int = 80
    hidden_size: int = 8192
    ffn_hidden_size: int = 28672
    num_heads: int = 64
    num_kv_heads: int = 8
    vocab_size: int = 128256
    seq_len: int = 4096
    tp: int = 8
    num_microbatches: int = 1


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_heads
        kv_width = config.num_kv_heads * self.head_dim
        self.wq = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.wk = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.wv = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq = x.shape[:2]
        q = rotated(self.wq(x).view(batch, seq, -1, self.head_dim).transpose(1, 2), cos, sin)
        k = rotated(self.wk(x).view(batch, seq, -1, self.head_dim).transpose(1, 2), cos, sin)
        v = self.wv(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(batch, seq, -1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.ffn_hidden_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.ffn_hidden_size, bias=False)
        self.down = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden_size)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        head_dim = config.hidden_size // config.num_heads
        frequency = 500000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angle = torch.outer(torch.arange(config.seq_len), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.output(self.norm(x))  # type: ignore[no-any-return]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.float().chunk(2, dim=-1)
    return torch.cat((even * cos - odd * sin, even * sin + odd * cos), dim=-1).type_as(x)


def tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Between blocks the sequence is divided; inside, heads and widths are."""
    for layer in model.layers:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None),
                desired_input_layouts=(Replicate(), None, None),
            ),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "ffn": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "ffn.gate": ColwiseParallel(),
            "ffn.up": ColwiseParallel(),
            "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def build(config: Config = Config()) -> Callable[[], None]:
    """Returns one training step of this rank."""
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // config.tp, config.tp), mesh_dim_names=("dp", "tp")
    )
    model = Llama(config)
    tensor_parallel(model, mesh["tp"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step() -> None:
        for _ in range(config.num_microbatches):
            tokens = torch.randint(config.vocab_size, (1, config.seq_len + 1))
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
            )
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
