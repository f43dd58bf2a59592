"""PARAM's built-in datasets. Source: facebookresearch/param, train/compute/pt/dataset.py."""

from collections.abc import Callable, Mapping
from itertools import product

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.model.ops import EmbeddingBag, Gemm, Layout, Mlp, Op, Phase

_BATCHES = (128, 256, 512, 1024)

# Tuples of m, n, k.
_GEMM = {
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
# Tuples of rows, dim, pooling, batch.
_EMBEDDING_BAG = {
    "A": [
        (rows, 128, 30, 512 * 2**i) for rows, i in product((14_000_000, 26_000_000), range(8))
    ],
    "B": [(4_800_000, 56, 34, 2048 * 2**i) for i in range(6)],
}
# Tuples of layers, width, batch.
_MLP = {"A": [(18, width, 128 * 2**i) for width, i in product((1024, 4096), range(6))]}


def _gemms(name: str, dtype: DType) -> list[Op]:
    """torch.mm of two row-major matrices, as PARAM calls it."""
    return [
        Gemm(m=m, n=n, k=k, dtype=dtype, layout=Layout.NT if dtype.is_narrow else Layout.NN)
        for m, n, k in _GEMM[name]
    ]


def _embedding_bags(name: str, dtype: DType) -> list[Op]:
    return [
        EmbeddingBag(rows=r, dim=d, pooling=p, batch=b, dtype=dtype, phase=phase)
        for r, d, p, b in _EMBEDDING_BAG[name]
        for phase in (Phase.FWD, Phase.BWD)
    ]


def _mlps(name: str, dtype: DType) -> list[Op]:
    return [
        Mlp(
            layers=layers,
            input=width,
            hidden=width,
            output=width,
            batch=batch,
            dtype=dtype,
            phase=phase,
        )
        for layers, width, batch in _MLP[name]
        for phase in (Phase.FWD, Phase.BWD, Phase.STEP)
    ]


_FAMILIES: dict[str, tuple[Mapping[str, object], Callable[[str, DType], list[Op]]]] = {
    "gemm": (_GEMM, _gemms),
    "embedding-bag": (_EMBEDDING_BAG, _embedding_bags),
    "mlp": (_MLP, _mlps),
}


def dataset(family: str, name: str, dtype: DType) -> list[Op]:
    """Return PARAM's dataset of a family. Raises ConfigError for an unknown one."""
    if family not in _FAMILIES:
        raise ConfigError("dataset", name, f"only for {', '.join(_FAMILIES)}")
    names, build = _FAMILIES[family]
    if name.upper() not in names:
        raise not_one_of("dataset", name, names, f" for {family}")
    return build(name.upper(), dtype)
