"""y_BMN = a_BMK @ b_BKN by torch.bmm."""

import torch
from torch import Tensor

from stepmark.bench.operators.call import Call, Impl
from stepmark.bench.operators.dtypes import TORCH_DTYPE, set_matmul_precision
from stepmark.bench.operators.gemm import operands
from stepmark.bench.verify import finite, merge, poison, product_check, sample, tolerance
from stepmark.core.ops import Bmm, backends
from stepmark.core.record import Check

NUM_CHECKED = 4  # products compared; of the others only that they are finite


def make(op: Bmm, device: torch.device) -> Call:
    set_matmul_precision(op.dtype)
    a_BMK, b_BKN = operands(op.layout, op.m, op.n, op.k, op.dtype, device, op.batch)
    y_BMN = torch.empty(op.batch, op.m, op.n, dtype=TORCH_DTYPE[op.dtype], device=device)

    def run() -> Tensor:
        return torch.bmm(a_BMK, b_BKN, out=y_BMN)

    def verify() -> Check:
        poison(y_BMN)
        run()
        allowed = tolerance(op.dtype, length=op.k)
        checks = [
            product_check(a_BMK[i], b_BKN[i], y_BMN[i], allowed)
            for i in sample(op.batch, torch.device("cpu"), NUM_CHECKED).tolist()
        ]
        return merge([*checks, finite(y_BMN, allowed)])

    return Call(run=run, verify=verify, backend_run="torch.bmm")


TORCH = Impl(make=make, unsupported=backends.tf32)
