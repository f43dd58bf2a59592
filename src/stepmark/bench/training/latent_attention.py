"""Multi-head latent attention of DeepSeek-V2 (arXiv:2405.04434, section 2.1).

B batch, T tokens, C hidden width, H heads, D = N + R width of a query or key: N without,
R with rotary positions; E width of a value, L width of the latent vector.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from stepmark.bench.training.attention import Attend, causal_attention, rotate
from stepmark.bench.training.norm import Norm
from stepmark.core.model import MlaConfig, ModelConfig


class LatentAttention(nn.Module):
    """Keys and values are projected up from a latent; one rotary key serves all heads."""

    def __init__(self, model: ModelConfig, mla: MlaConfig, kernel: str) -> None:
        super().__init__()
        self.mla = mla
        self.kernel = kernel
        self.attend: Attend = causal_attention  # of context parallelism another one
        hidden, heads = model.hidden_size, model.num_heads
        q_width = heads * model.d_qk
        self.q: nn.Module = (
            _compressed_query(hidden, mla.q_lora_rank, q_width)
            if mla.q_lora_rank
            else nn.Linear(hidden, q_width, bias=False)
        )
        kv_width = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        down = mla.kv_lora_rank + mla.qk_rope_head_dim
        self.kv_down = nn.Linear(hidden, down, bias=False)
        self.kv_norm = Norm("rmsnorm", mla.kv_lora_rank)
        self.kv_up = nn.Linear(mla.kv_lora_rank, kv_width, bias=False)
        self.out = nn.Linear(heads * mla.v_head_dim, hidden, bias=False)

    def forward(self, x_BTC: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        nope, rope = self.mla.qk_nope_head_dim, self.mla.qk_rope_head_dim
        value = self.mla.v_head_dim
        q_BTHD = self.q(x_BTC).unflatten(-1, (-1, nope + rope))
        q_BTHN, q_BTHR = q_BTHD.split((nope, rope), dim=-1)
        q_BTHD = torch.cat((q_BTHN, rotate(q_BTHR, cos_TR, sin_TR)), dim=-1)

        latent_BTL, k_BTR = self.kv_down(x_BTC).split((self.mla.kv_lora_rank, rope), dim=-1)
        kv = self.kv_up(self.kv_norm(latent_BTL)).unflatten(-1, (-1, nope + value))
        k_BTHN, v_BTHE = kv.split((nope, value), dim=-1)
        k_BT1R = rotate(k_BTR, cos_TR, sin_TR).unsqueeze(2)
        k_BTHD = torch.cat((k_BTHN, k_BT1R.expand(-1, -1, k_BTHN.shape[2], -1)), dim=-1)

        y_BTHE = self.attend(q_BTHD, k_BTHD, v_BTHE, self.kernel)
        out_BTC: Tensor = self.out(y_BTHE.flatten(2))
        return out_BTC


def _compressed_query(hidden_size: int, rank: int, width: int) -> nn.Sequential:
    """Queries through a latent vector of their own."""
    return nn.Sequential(
        OrderedDict(
            down=nn.Linear(hidden_size, rank, bias=False),
            norm=Norm("rmsnorm", rank),
            up=nn.Linear(rank, width, bias=False),
        )
    )
