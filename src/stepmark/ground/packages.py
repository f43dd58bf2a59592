"""Packages that a plain install leaves out, and the commands that install them."""

import importlib
import importlib.util
from typing import Any

from stepmark.ground.errors import ConfigError

# Modules by their first name: the package, and the extra of pyproject.toml that installs it.
EXTRAS = {
    "torch": ("torch", "measure"),
    "pynvml": ("nvidia-ml-py", "measure"),
    "duckdb": ("duckdb", "sql"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow-skinny", "mlflow"),
    "torchao": ("torchao", "fp8"),
    "google": ("protobuf", "chakra"),
    "yaml": ("pyyaml", "yaml"),
    "transformers": ("transformers", "huggingface"),
    "pandas": ("pandas", "notebook"),
    "plotly": ("plotly", "notebook"),
}


def install_command(extra: str) -> str:
    """Return what installs an extra, from an index and from a checkout."""
    return f"pip install 'stepmark[{extra}]', or in a checkout pip install '.[{extra}]'"


def missing_package(module: str) -> ConfigError:
    """Return the error of a module of EXTRAS that cannot be imported."""
    package, extra = EXTRAS[module.partition(".")[0]]
    return ConfigError(package, None, f"use {install_command(extra)}")


def is_installed(module: str) -> bool:
    """Return whether a module of the first level is there, without importing it."""
    return importlib.util.find_spec(module) is not None


def require(module: str) -> None:
    """Raise ConfigError where a module of EXTRAS is not there. It is not imported."""
    if not is_installed(module):
        raise missing_package(module)


def load_package(module: str) -> Any:
    """Import a module of EXTRAS. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise missing_package(module) from None
