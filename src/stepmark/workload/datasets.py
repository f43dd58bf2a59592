"""PARAM's built-in datasets. Source: facebookresearch/param, train/compute/pt/dataset.py."""

from collections.abc import Callable
from itertools import product

from stepmark.core.dtypes import DType
from stepmark.core.errors import ConfigError
from stepmark.core.ops import EmbeddingBag, Gemm, Layout, Mlp, Op, Phase

_BATCHES = (128, 256, 512, 1024)

# Each is m, n, k.
GEMM = {
    "A": [
        *((b, 4096, 4096) for b in _BATCHES),
        *((b, 1024, 1024) for b in _BATCHES),
        *((4096, 4096, b) for b in _BATCHES),
        *((1024, 1024, b) for b in _BATCHES[:3]),
    ],
    "B": [
        *((b, 4096, 40928) for b in _BATCHES),
        *((b, 40928, 4096) for b in _BATCHES),
        *((b, 1024, 2000) for b in _BATCHES),
        *((1024, 2000, b) for b in _BATCHES),
        *((4096, 40928, b) for b in _BATCHES),
    ],
    "C": [(1024, 1024, 64), (1024, 64, 1024), (1024, 4096, 1024), (1024, 1024, 4096)],
}
# Each is rows, dim, pooling, batch.
EMBEDDING_BAG = {
    "A": [
        (rows, 128, 30, 512 * 2**i) for rows, i in product((14_000_000, 26_000_000), range(8))
    ],
    "B": [(4_800_000, 56, 34, 2048 * 2**i) for i in range(6)],
}
# Each is layers, input, hidden, output, batch.
MLP = {
    "A": [(18, width, width, width, 128 * 2**i) for width, i in product((1024, 4096), range(6))]
}


def gemms(name: str, dtype: DType) -> list[Op]:
    """torch.mm of two row-major matrices, as PARAM calls it."""
    return [
        Gemm(m=m, n=n, k=k, dtype=dtype, layout=Layout.NT if dtype.is_fp8 else Layout.NN)
        for m, n, k in GEMM[name]
    ]


def embedding_bags(name: str, dtype: DType, alpha: float = 0.0) -> list[Op]:
    return [
        EmbeddingBag(rows=r, dim=d, pooling=p, batch=b, alpha=alpha, dtype=dtype, phase=phase)
        for r, d, p, b in EMBEDDING_BAG[name]
        for phase in (Phase.FWD, Phase.BWD)
    ]


def mlps(name: str, dtype: DType, optimizer: str = "sgd") -> list[Op]:
    return [
        Mlp(
            layers=layers,
            input=width_in,
            hidden=hidden,
            output=width_out,
            batch=batch,
            optimizer=optimizer,
            dtype=dtype,
            phase=phase,
        )
        for layers, width_in, hidden, width_out, batch in MLP[name]
        for phase in (Phase.FWD, Phase.BWD, Phase.STEP)
    ]


_OF_FAMILY: dict[str, tuple[dict[str, list[tuple[int, ...]]], Callable[[str, DType], list[Op]]]]
_OF_FAMILY = {
    "gemm": (GEMM, gemms),  # type: ignore[dict-item]
    "embedding-bag": (EMBEDDING_BAG, embedding_bags),  # type: ignore[dict-item]
    "mlp": (MLP, mlps),  # type: ignore[dict-item]
}


def dataset(family: str, name: str, dtype: DType) -> list[Op]:
    """PARAM's dataset of a family. Raises ConfigError for an unknown one."""
    if family not in _OF_FAMILY:
        raise ConfigError("dataset", name, f"only for {', '.join(_OF_FAMILY)}")
    names, build = _OF_FAMILY[family]
    if name.upper() not in names:
        raise ConfigError("dataset", name, f"one of {', '.join(names)} for {family}")
    return build(name.upper(), dtype)
