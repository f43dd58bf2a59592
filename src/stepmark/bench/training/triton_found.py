"""Whether Triton is there, without importing it: that is slow, and fails without a driver."""

import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None
