"""What a forward pass of a transformers class computes, as one process tells another."""

import msgspec

from stepmark.step.native import OpFields

ELEMENTWISE = "elementwise"  # name of the kernels of a layer that are no products


def transformers_version() -> str:
    """Return the version of transformers; empty: it is not installed. It is not imported."""
    from importlib import metadata  # noqa: PLC0415 - 10 ms

    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return ""


class TracedCall(msgspec.Struct):
    """One operation of the forward pass; its module is a path from the whole model.

    has_grad: autograd differentiates it. is_linear: it is an nn.Linear's product.
    """

    op: OpFields
    has_grad: bool = True
    is_linear: bool = False


class TracedParam(msgspec.Struct):
    """A parameter of a module. tied: the earlier name of the same tensor."""

    name: str
    module: str
    shape: tuple[int, ...]
    is_norm: bool = False
    is_trained: bool = True
    tied: str = ""


class Trace(msgspec.Struct):
    """A class's parameters, as registered, and the operations of one micro-batch.

    layers: path of the list of its layers; empty: it has none. unread: keys of the config that
    the class does not declare. loops: modules that issue an operation for each token. masked:
    modules with attention whose mask is unknown.
    """

    version: str
    name: str
    vocab_size: int
    layers: str
    params: list[TracedParam]
    calls: list[TracedCall]
    unread: list[str] = []
    loops: list[str] = []
    masked: list[str] = []


class TraceRequest(msgspec.Struct):
    """A config and the micro-batch that its class is called with."""

    config: dict[str, object]
    mbs: int
    seq_len: int
    dtype: str


class TraceRefusal(msgspec.Struct):
    """Why a class cannot be traced, as the arguments of a ConfigError."""

    field: str
    value: str
    allowed: str


class TraceAnswer(msgspec.Struct):
    """Either a trace, or why there is none."""

    trace: Trace | None = None
    refusal: TraceRefusal | None = None
