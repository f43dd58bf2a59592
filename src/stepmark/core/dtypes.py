"""Element types, and how a type is named in fields, flags and files."""

from enum import StrEnum

from stepmark.core.errors import ConfigError


class DType(StrEnum):
    """Element type of an operator's inputs. TF32 is fp32 storage on tf32 matrix units."""

    FP64 = "fp64"
    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"

    @property
    def itemsize(self) -> int:
        """Bytes of one stored element."""
        return _ITEMSIZE[self]

    @property
    def is_fp8(self) -> bool:
        return self in (DType.FP8_E4M3, DType.FP8_E5M2)


_ITEMSIZE = {
    DType.FP64: 8,
    DType.FP32: 4,
    DType.TF32: 4,
    DType.BF16: 2,
    DType.FP16: 2,
    DType.FP8_E4M3: 1,
    DType.FP8_E5M2: 1,
}

# Spellings of PyTorch, Hugging Face, PARAM and Primus.
DTYPE_ALIASES = {
    "float64": DType.FP64,
    "double": DType.FP64,
    "float32": DType.FP32,
    "float": DType.FP32,
    "bfloat16": DType.BF16,
    "float16": DType.FP16,
    "half": DType.FP16,
    "fp8": DType.FP8_E4M3,
    "float8_e4m3fn": DType.FP8_E4M3,
    "float8_e5m2": DType.FP8_E5M2,
}


def parse_dtype(text: str, field: str = "dtype") -> DType:
    """Read a dtype by our name or a common alias. Raises ConfigError."""
    name = text.strip().lower().removeprefix("torch.")
    if name in DTYPE_ALIASES:
        return DTYPE_ALIASES[name]
    try:
        return DType(name)
    except ValueError:
        raise ConfigError(field, text, f"one of {', '.join(DType)} or fp8") from None
