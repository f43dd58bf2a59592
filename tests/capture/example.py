"""The example, which lies outside of the tests' packages."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
from examples.capture_fsdp_tp import Config, Llama, build

__all__ = ["Config", "Llama", "build"]
