"""torchao's FP8 layer with its bias fused into the product.

torchao adds a bias afterwards. Where no kernel of Inductor follows, as before attention, that
reads and writes the whole output once more.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torchao.float8 import float8_linear
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import GemmInputRole


@torch._dynamo.allow_in_graph
class _BiasedProduct(Function):
    """x @ weight_t + bias, x and weight scaled as tensors; backward is torchao's."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_t: Tensor, bias: Tensor, mm_config: Any, config: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight_t)
        ctx.linear_mm_config = mm_config
        ctx.config = config
        operands = [
            tensor
            if float8_linear.tensor_already_casted_to_fp8(tensor)
            else hp_tensor_to_float8_dynamic(
                tensor,
                cast.target_dtype,
                mm_config,
                gemm_input_role=role,
                round_scales_to_power_of_2=config.round_scales_to_power_of_2,
            )
            for tensor, cast, role in (
                (x, config.cast_config_input, GemmInputRole.INPUT),
                (weight_t, config.cast_config_weight, GemmInputRole.WEIGHT),
            )
        ]
        return torch.addmm(bias, *operands)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_t, *_ = float8_linear.matmul_with_hp_or_float8_args.backward(ctx, *grads)
        return x, weight_t, grads[0].sum(0), None, None


_product: Callable[[Tensor, Tensor, Tensor, Any, Any], Tensor] = _BiasedProduct.apply


def multiply(layer: Any, x: Tensor) -> Tensor:
    """Return layer(x) of a Float8Linear with a bias; x is a matrix."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    return _product(
        x, layer.weight.t(), layer.bias.to(x.dtype), layer.linear_mm_config, layer.config
    )
