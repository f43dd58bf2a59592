"""The options of `stepmark run`, the main job."""

from dataclasses import dataclass

from stepmark.ground.option_groups import Budget, Device, RunFolder
from stepmark.ground.options import flag
from stepmark.training.train_options import CaseOptions


@dataclass(frozen=True, kw_only=True)
class RunOptions(CaseOptions, RunFolder, Budget, Device):
    """stepmark run."""

    models: tuple[str, ...] = flag(
        "model name, or a file such as config.json [sized for the device]",
        default=(),
        argument=True,
        metavar="MODEL",
        names="model",
    )
    compile: bool | None = flag(  # type: ignore[assignment]
        "torch.compile [on accelerators]", "--compile/--no-compile"
    )
