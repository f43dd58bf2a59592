"""What a machine cannot run."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from stepmark.cases.training import CompileScope, Fp8, Precision
from stepmark.model.parallel import ParallelConfig
from stepmark.training.bench import refusal

from .curves import LLAMA, case

CP = ParallelConfig(cp=2)


def h200() -> Any:
    return SimpleNamespace(
        capabilities=SimpleNamespace(is_rocm=False, capability=(9, 0), has_compiler=True)
    )


@pytest.mark.parametrize(
    ("device", "fp8", "scope", "parallel", "is_refused"),
    [
        ("cuda", Fp8.ROWWISE, CompileScope.BLOCK, CP, True),
        ("cuda", Fp8.ROWWISE, CompileScope.MODEL, CP, True),
        ("cuda", Fp8.ROWWISE, CompileScope.NONE, CP, False),
        ("cuda", Fp8.TENSORWISE, CompileScope.BLOCK, CP, False),
        ("cuda", Fp8.ROWWISE, CompileScope.BLOCK, ParallelConfig(), False),
        ("cpu", Fp8.ROWWISE, CompileScope.BLOCK, CP, False),
    ],
)
def test_what_gave_wrong_gradients_is_refused(
    device: str, fp8: Fp8, scope: CompileScope, parallel: ParallelConfig, is_refused: bool
) -> None:
    pytest.importorskip("torchao")
    of = replace(
        case(LLAMA),
        device=device,
        fp8=fp8,
        compile=scope,
        parallel=parallel,
        precision=Precision.AMP,
    )

    reason = refusal(of, h200())

    assert ("wrong gradients" in (reason or "")) is is_refused


@pytest.mark.parametrize(
    ("device", "fp8", "words"),
    [
        ("cuda", Fp8.MXFP8, "mxfp8 products need a Blackwell GPU: --precision fp8"),
        ("cuda", Fp8.NVFP4, "nvfp4 products need a Blackwell GPU: --precision fp8"),
        ("cpu", Fp8.MXFP8, None),  # emulated
        ("cpu", Fp8.NVFP4, "transformer_engine is not installed: --precision fp8 uses torchao"),
    ],
)
def test_block_formats_need_a_device_that_multiplies_them(
    device: str, fp8: Fp8, words: str | None
) -> None:
    pytest.importorskip("torchao")
    of = replace(case(LLAMA), device=device, fp8=fp8, precision=Precision.AMP)
    assert refusal(of, h200()) == words
