"""Element types and their names in fields, flags and files."""

from enum import StrEnum

from stepmark.ground.errors import ConfigError, not_one_of


class DType(StrEnum):
    """Element type of an operator's inputs or of a message.

    TF32 is fp32 storage on tf32 matrix units. Integers are types of messages, not of operators.
    Block formats have the scale factors of their blocks beside the elements, and are types of
    matrix products alone. MXFP8: e4m3, a one-byte power of two (e8m0) per 32 elements along a
    row (OCP Microscaling Formats, version 1.0, section 5.2). NVFP4: e2m1, an e4m3 factor per 16
    elements and an fp32 one per tensor (TransformerEngine, common/recipe, NVFP4BlockScaling).
    """

    FP64 = "fp64"
    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    INT8 = "int8"
    UINT8 = "uint8"
    INT32 = "int32"
    UINT32 = "uint32"
    INT64 = "int64"
    UINT64 = "uint64"

    @property
    def itemsize(self) -> int:
        """Return the bytes of one stored element, which a block format does not have."""
        return _ITEMSIZE[self]

    def num_bytes(self, numel: int) -> int:
        """Return the bytes of a tensor, with the scale factors of a block format."""
        if self not in _BLOCK:
            return numel * self.itemsize
        bits, block, tensor_bytes = _BLOCK[self]
        return -(-numel * bits // 8) + -(-numel // block) + tensor_bytes

    @property
    def is_fp8(self) -> bool:
        return self in (DType.FP8_E4M3, DType.FP8_E5M2)

    @property
    def is_block_format(self) -> bool:
        return self in _BLOCK

    @property
    def is_narrow(self) -> bool:
        """Return whether operands of products are cast to the type from a 16-bit one."""
        return self.is_fp8 or self.is_block_format

    @property
    def is_integer(self) -> bool:
        return "int" in self


_ITEMSIZE = {
    DType.FP64: 8,
    DType.FP32: 4,
    DType.TF32: 4,
    DType.BF16: 2,
    DType.FP16: 2,
    DType.FP8_E4M3: 1,
    DType.FP8_E5M2: 1,
    DType.INT8: 1,
    DType.UINT8: 1,
    DType.INT32: 4,
    DType.UINT32: 4,
    DType.INT64: 8,
    DType.UINT64: 8,
}

# Bits of an element, elements of a block with a factor of one byte, bytes of a tensor's factor.
_BLOCK = {DType.MXFP8: (8, 32, 0), DType.NVFP4: (4, 16, 4)}

# Types of operators, and types of messages.
OPERATOR_DTYPES = tuple(dtype for dtype in DType if not dtype.is_integer)
MESSAGE_DTYPES = tuple(
    dtype for dtype in DType if dtype is not DType.TF32 and not dtype.is_block_format
)

# Spellings of PyTorch, Hugging Face, PARAM, Primus, nccl-tests and rccl-tests.
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
    "f8e4m3": DType.FP8_E4M3,
    "f8e5m2": DType.FP8_E5M2,
    "char": DType.INT8,
    "byte": DType.UINT8,
    "int": DType.INT32,
    "long": DType.INT64,
}


def parse_dtype(
    text: str, field: str = "dtype", allowed: tuple[DType, ...] = OPERATOR_DTYPES
) -> DType:
    """Parse a dtype by its name or a common alias. Raise ConfigError."""
    name = text.strip().lower().removeprefix("torch.")
    dtype = DTYPE_ALIASES.get(name, name)
    if dtype not in allowed:
        alias = " or fp8" if DType.FP8_E4M3 in allowed else ""
        raise not_one_of(field, text, allowed, alias)
    return DType(dtype)


# Element size of types that NCCL does not name; torch sends them as bytes or pairs.
_OTHER_TYPES = {
    "bool": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "short": 2,
    "uint16": 2,
    "complexhalf": 4,
    "complexfloat": 8,
    "complexdouble": 16,
}
# Types of C++, as torch's profiler writes them.
_CXX = {
    "unsigned char": "uint8",
    "signed char": "int8",
    "long int": "int64",
    "short int": "short",
    "complex<half>": "complexhalf",
    "complex<float>": "complexfloat",
    "complex<double>": "complexdouble",
}


def message_dtype(name: str) -> tuple[str, int] | None:
    """Return (our name, bytes of an element) of torch's name of a type; None if unknown."""
    plain = name.lower().replace("c10::", "")
    plain = _CXX.get(plain, plain)
    if plain in _OTHER_TYPES:
        return plain, _OTHER_TYPES[plain]
    try:
        dtype = parse_dtype(plain, allowed=MESSAGE_DTYPES)
    except ConfigError:
        return None
    return dtype.value, dtype.itemsize
