"""Device-to-device copy of 4-byte words."""

import torch

from stepmark.bench.operators.call import Call, Impl
from stepmark.bench.operators.dtypes import normal
from stepmark.bench.verify import compare, merge, poison
from stepmark.core.ops import Copy, backends
from stepmark.core.record import Check


def make(op: Copy, device: torch.device) -> Call:
    x = normal(op.num_bytes // 4, dtype=op.dtype, device=device)
    y = torch.empty_like(x)

    def verify() -> Check:
        poison(y)
        y.copy_(x)
        pairs = zip(y.split(2**24), x.split(2**24), strict=True)
        return merge(compare(out, ref, 0.0, "the source") for out, ref in pairs)

    return Call(run=lambda: y.copy_(x), verify=verify, backend_run="torch copy_")


TORCH = Impl(make=make, unsupported=backends.copy)
