"""Products in MXFP8 and NVFP4: casts, layouts of factors, and what torch's product takes."""

from typing import Any

import pytest
import torch

from stepmark.ground.dtypes import DType
from stepmark.measuring.verify import TORCH_DTYPE
from stepmark.model.ops import Cast, Gemm, backends
from stepmark.operators.bench.block_formats import (
    cast_operand,
    decoded,
    in_tiles,
    product_arguments,
    tensor_factor,
    to_mxfp8,
    to_nvfp4,
)

DEVICE: dict[str, Any] = {"is_rocm": False, "has_compiler": False, "modules": frozenset()}
BLACKWELL = backends.Capabilities(device_type="cuda", capability=(10, 0), **DEVICE)
HOPPER = backends.Capabilities(device_type="cuda", capability=(9, 0), **DEVICE)
CPU = backends.Capabilities(device_type="cpu", capability=(0, 0), **DEVICE)
BLOCKS = pytest.mark.parametrize("dtype", [DType.MXFP8, DType.NVFP4])


def sample(rows: int, width: int) -> torch.Tensor:
    """Return numbers of many magnitudes, a block of zeros, and the largest at a tie."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
    x *= torch.logspace(-3, 3, width)
    x[0, :32] = 0
    x[1, 0] = 448
    return x.to(torch.bfloat16)


def test_mxfp8_is_torchaos() -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = sample(96, 256)
    factors, elements = mx.to_mx(x, torch.float8_e4m3fn, 32, mx.ScaleCalculationMode.RCEIL)
    own = to_mxfp8(x)
    assert torch.equal(own.elements.view(torch.uint8), elements.view(torch.uint8))
    assert torch.equal(own.of_blocks.view(torch.uint8), factors.view(torch.uint8))


def test_nvfp4_is_torchaos() -> None:
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = sample(96, 256)
    scale = nvfp4.per_tensor_amax_to_scale(x.abs().amax())
    assert torch.allclose(tensor_factor(x), scale, rtol=1e-6)
    factors, elements = nvfp4.nvfp4_quantize(x, per_tensor_scale=scale)
    own = to_nvfp4(x, scale)
    assert torch.equal(own.elements.view(torch.uint8), elements.view(torch.uint8))
    assert torch.equal(own.of_blocks.view(torch.uint8), factors.view(torch.uint8))


@pytest.mark.parametrize(("rows", "blocks"), [(128, 4), (256, 12), (130, 5), (1, 1)])
def test_factors_are_in_tiles_of_128_rows_and_4_blocks(rows: int, blocks: int) -> None:
    """cuBLAS, 1D Block Scaling Factors Layout; torchao has the same."""
    factors = torch.randint(0, 255, (rows, blocks), dtype=torch.uint8)
    tiled = in_tiles(factors)
    height, width = -(-rows // 128), -(-blocks // 4)
    assert tiled.numel() == height * 128 * width * 4
    for row, block in ((0, 0), (rows - 1, blocks - 1), (rows // 2, blocks // 2)):
        tile = row // 128 * width + block // 4
        place = 16 * (row % 32) + 4 * (row % 128 // 32) + block % 4
        assert tiled[512 * tile + place] == factors[row, block]
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    assert torch.equal(tiled, utils.to_blocked(factors))


@BLOCKS
def test_a_cast_is_near_its_source_and_exact_of_what_it_has(dtype: DType) -> None:
    """Half a unit in the last place of the largest element of a block, at most."""
    x = sample(64, 128).float()
    operand = cast_operand(x.to(torch.bfloat16), dtype)
    wide = decoded(operand.factors).double() * operand.of_tensor
    block, ulp = (32, 2.0**-3) if dtype is DType.MXFP8 else (16, 2.0**-1)
    largest = x.unflatten(1, (-1, block)).abs().amax(2, keepdim=True).double()
    error = (wide - x.double()).unflatten(1, (-1, block)).abs()
    # Smaller blocks of NVFP4 have the least factor of the tensor's.
    least = operand.of_tensor * 2.0**-6 if dtype is DType.NVFP4 else 1e-30
    assert bool((error <= largest * ulp * 0.6 + least).all())
    again = cast_operand(wide.to(torch.bfloat16), DType.MXFP8)
    if dtype is DType.MXFP8:
        assert torch.equal(decoded(again.factors).double(), wide)


@BLOCKS
@pytest.mark.parametrize(("m", "n", "k"), [(256, 128, 512), (48, 160, 96)])
def test_torch_takes_the_operands_of_a_blackwell_gpu(
    dtype: DType, m: int, n: int, k: int
) -> None:
    """torch's own checks of a product on CUDA, of types, sizes and layouts of factors."""
    a, b = (cast_operand(sample(rows, k), dtype) for rows in (m, n))
    # Tensors without memory count as a GPU's.
    arguments = [_without_memory(value) for value in product_arguments(a, b, dtype)]
    y = torch.ops.aten._scaled_mm_v2(*arguments, torch.bfloat16)
    assert (y.shape, y.dtype) == ((m, n), torch.bfloat16)
    tiles, *of_tensor = arguments[2]
    arguments[2] = [tiles[:-1], *of_tensor]
    with pytest.raises(RuntimeError, match="scale_a must have"):
        torch.ops.aten._scaled_mm_v2(*arguments, torch.bfloat16)


def _without_memory(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_memory(each) for each in value]
    return value.to("meta") if isinstance(value, torch.Tensor) else value


@BLOCKS
def test_where_they_run(dtype: DType) -> None:
    op = Gemm(m=64, n=64, k=64, dtype=dtype)
    assert backends.gemm(op, BLACKWELL) is None
    for device in (HOPPER, CPU):
        reason = backends.gemm(op, device)
        assert reason == f"{dtype} products need a GPU of compute capability 10.0 or later" + (
            " (Blackwell)"
        )
    cast = Gemm(m=64, n=64, k=64, dtype=dtype, cast=Cast.ONLY)
    assert "give --cast none" in str(backends.gemm(cast, BLACKWELL))


def test_nvfp4_rows_have_whole_16_bytes() -> None:
    op = Gemm(m=64, n=64, k=48, dtype=DType.NVFP4)
    assert "multiple of 32, not 48" in str(backends.gemm(op, BLACKWELL))


def test_types_of_results() -> None:
    op = Gemm(m=64, n=64, k=64, dtype=DType.MXFP8, out_dtype=DType.FP64)
    assert "no fp64 result" in str(backends.gemm(op, BLACKWELL))
    assert TORCH_DTYPE[Gemm(m=64, n=64, k=64, dtype=DType.MXFP8).result_dtype] is torch.bfloat16


def test_ties_of_e2m1_go_to_the_even_number() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    x = torch.tensor([[*ties, *(-tie for tie in ties)]])
    values = decoded(to_nvfp4(x, torch.tensor(1.0)))
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert values.tolist() == [[*even, *(-value for value in even)]]
