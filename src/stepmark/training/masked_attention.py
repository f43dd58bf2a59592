"""Causal attention with windows, chunks, capped scores and sinks.

A sink is a logit of each head that takes part in the softmax and has no value: the result is
that of the keys times sigmoid(log sum of their exponentials - sink).

B batch, T tokens, H query heads, K key and value heads, D head width, E head width of values.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from stepmark.training.scores import Scores


def masked_attention(
    q_BTHD: Tensor,
    k_BTKD: Tensor,
    v_BTKE: Tensor,
    scores: Scores,
    sinks_H: Tensor | None,
    kernel: str,
) -> Tensor:
    """Return y_BTHE, by FlexAttention on a GPU unless the kernel is "math"."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKE))
    if kernel == "auto" and masked_kernel(q.device.type) == "flex":
        return by_flex(q, k, v, scores, sinks_H, _compiled()).transpose(1, 2)
    return by_products(q, k, v, scores, sinks_H).transpose(1, 2)


def masked_kernel(device_type: str) -> str:
    """Return the name of what "auto" is on a device."""
    return "flex" if device_type == "cuda" else "math"


def is_visible(scores: Scores, query: Tensor, key: Tensor) -> Tensor:
    """Return whether queries see keys, of positions that broadcast."""
    visible = query >= key
    if scores.window:
        visible = visible & (query - key < scores.window)
    if scores.chunk:
        visible = visible & (query // scores.chunk == key // scores.chunk)
    return visible


def by_products(
    q_BHTD: Tensor, k_BKTD: Tensor, v_BKTE: Tensor, scores: Scores, sinks_H: Tensor | None
) -> Tensor:
    """Return y_BHTE by its definition, with all scores in memory, in fp32."""
    group = q_BHTD.shape[1] // k_BKTD.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k_BKTD, v_BKTE))
    scale = scores.scale or q_BHTD.shape[-1] ** -0.5
    logits_BHTT = (q_BHTD @ k.mT).float() * scale
    if scores.softcap:
        logits_BHTT = scores.softcap * (logits_BHTT / scores.softcap).tanh()
    at_T = torch.arange(q_BHTD.shape[2], device=q_BHTD.device)
    visible_TT = is_visible(scores, at_T[:, None], at_T)
    logits_BHTT = logits_BHTT.masked_fill(~visible_TT, float("-inf"))
    if sinks_H is not None:
        column = sinks_H.float()[:, None, None].expand(*logits_BHTT.shape[:3], 1)
        logits_BHTT = torch.cat((logits_BHTT, column), dim=-1)
    weights_BHTT = logits_BHTT.softmax(dim=-1)[..., : v.shape[2]]
    return weights_BHTT.to(v.dtype) @ v


def by_flex(
    q_BHTD: Tensor,
    k_BKTD: Tensor,
    v_BKTE: Tensor,
    scores: Scores,
    sinks_H: Tensor | None,
    attend: Callable[..., Any] = flex_attention,
) -> Tensor:
    """Return y_BHTE by FlexAttention, which skips blocks that no query sees."""
    softcap = scores.softcap

    def capped(score: Tensor, *_at: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    y_BHTE, more = attend(
        *(q_BHTD, k_BKTD, v_BKTE),
        score_mod=capped if softcap else None,
        block_mask=_block_mask(scores, q_BHTD.shape[2], q_BHTD.device),
        scale=scores.scale,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    if sinks_H is None:
        result: Tensor = y_BHTE
        return result
    share_BHT = (more.lse.float() - sinks_H.float()[:, None]).sigmoid()
    weighted: Tensor = y_BHTE * share_BHT.unsqueeze(-1).to(y_BHTE.dtype)
    return weighted


@functools.cache
def _compiled() -> Callable[..., Any]:
    """Return FlexAttention as a kernel: uncompiled it would have all scores in memory."""
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return compiled


@functools.lru_cache(maxsize=16)
def _block_mask(scores: Scores, length: int, device: torch.device) -> BlockMask:
    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return is_visible(scores, query, key)

    return create_block_mask(visible, None, None, length, length, device=str(device))
