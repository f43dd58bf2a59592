"""GEMM is wrong or breaks, as the variable BAD_GEMM says. Ranks import this first."""

import dataclasses
import os
from typing import Any

from stepmark.cases.record import Check
from stepmark.operators.bench import IMPLS

_impl = IMPLS["gemm"]["torch"]
_WRONG = Check(max_rel_err=9, tolerance=0, num_wrong=1, num_compared=1, reference="fake")


def make(op: Any, device: Any) -> Any:
    if os.environ["BAD_GEMM"] == "raises":
        raise RuntimeError("broken on purpose")
    return dataclasses.replace(_impl.make(op, device), verify=lambda: _WRONG)


IMPLS["gemm"]["torch"] = dataclasses.replace(_impl, make=make)
