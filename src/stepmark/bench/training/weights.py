"""Weights by a seed and their name alone, whoever holds which part of them."""

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from stepmark.bench.training.transformer import Embedding, Transformer

STD = 0.02

# What wrappers put into a parameter's name.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module")
_HEAD, _TABLE = "output.head.weight", "embedding.tokens.weight"


@torch.no_grad()
def init_weights(module: nn.Module, seed: int) -> None:
    """Fills all parameters and tables: matrices normal with std 0.02, norms 1, biases 0.

    The same values however the model is split or sharded, on one kind of device; every rank
    draws a whole parameter on its device, one at a time, and keeps its part.
    """
    is_tied = any(part.model.tied_embeddings for part in _transformers(module))
    for wrapped, parameter in module.named_parameters():
        name = canonical_name(wrapped)
        if is_tied and name == _HEAD:  # of a stage without the table
            name = _TABLE
        _fill(parameter, name, seed)
    for part in module.modules():
        if isinstance(part, Transformer | Embedding):
            part.fill_tables()


def tie(module: nn.Module) -> None:
    """Ties the head to the token table where the model has it so and both are here."""
    for part in _transformers(module):
        part.tie()


def canonical_name(name: str) -> str:
    """A parameter's name in the bare Transformer."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _transformers(module: nn.Module) -> list[Transformer]:
    return [part for part in module.modules() if isinstance(part, Transformer)]


def _fill(parameter: Tensor, name: str, seed: int) -> None:
    *_, owner, kind = name.split(".")
    if kind in ("bias", "router_bias"):
        parameter.zero_()
    elif owner.endswith("norm"):
        parameter.fill_(1)
    else:
        _fill_normal(parameter, _seed_of(name, seed))


def _seed_of(name: str, seed: int) -> int:
    """63 bits that stay the same from process to process, unlike hash()."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _fill_normal(parameter: Tensor, seed: int) -> None:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    generator = torch.Generator(local.device).manual_seed(seed)
    full = torch.empty(parameter.shape, device=local.device)  # fp32, whatever is kept
    full.normal_(std=STD, generator=generator)
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        # src_data_rank=None: every rank has the same tensor already.
        full = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
    local.copy_(full)
