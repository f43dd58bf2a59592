"""The options of `stepmark run`, the main job."""

from dataclasses import dataclass

from stepmark.ground.option_groups import Budget, Device, RunFolder
from stepmark.ground.options import flag
from stepmark.training.train_options import CaseOptions


@dataclass(frozen=True, kw_only=True)
class RunOptions(CaseOptions, RunFolder, Budget, Device):
    """stepmark run."""

    models: tuple[str, ...] = flag(
        "model name, config.json, or a framework's file [sized for the device]",
        default=(),
        argument=True,
        metavar="MODEL",
        names="model",
    )
