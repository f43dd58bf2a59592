"""stepmark predict: of a model as `train` runs it, of a workload, or of a framework's job."""

from collections.abc import Callable

from stepmark.cli.commands import Command, Values
from stepmark.cli.workload import framework_of
from stepmark.ground import options
from stepmark.ground.errors import ConfigError
from stepmark.ground.option_grid import read_grid

_DOC = "Predict a training step from measured parts or a data sheet"


class _Command(Command):
    """A command whose options may have lists, of which it predicts each combination."""

    def call(self, values: Values, spell: Callable[[ConfigError], ConfigError]) -> int | None:
        from stepmark.predictions.predict_options import LISTED  # noqa: PLC0415

        grid = read_grid(self.cls, values, LISTED)
        name = "prediction_grid:run" if grid.axes else "predict:run"
        handler = options.load(f"stepmark.predictions.{name}")
        code: int = handler(grid, spell) if grid.axes else handler(grid.options)
        return code


def command(words: list[str]) -> Command:
    """Return the command, with the settings of the framework that the words name."""
    framework = framework_of(words)
    if not framework:
        from stepmark.predictions.predict_options import PredictOptions  # noqa: PLC0415

        return _Command(
            PredictOptions,
            "stepmark.predictions.predict:run",
            f"{_DOC}; --framework NAME: by its flags.",
            "predict llama-3.1-70b --nproc 1024 --tp 8 --device h200",
            "predict --from-run latest --what-if link=2x",
            "predict workload.json --device h100-sxm",
            "predict gpt-175b --framework megatron --nproc 1024 --tp 8 --pp 8 --device h100",
        )
    from stepmark.predictions import framework_job  # noqa: PLC0415
    from stepmark.workloads.rules import find_rule  # noqa: PLC0415

    try:
        name = find_rule(framework)
    except ConfigError as error:
        raise ConfigError("--framework", error.value, error.allowed) from None
    return _Command(
        framework_job.options_class(name),
        "stepmark.predictions.predict:run",
        f"{_DOC}. The job is described as in `workload generate`; these are {name}'s settings.",
        "predict llama-3.1-70b --framework megatron --nproc 256 --tp 4 --pp 4 --device h100",
        "predict llama-3.1-8b --framework deepspeed --zero-stage 3 --nproc 64 --device a100",
        "predict llama-3.1-8b --framework pytorch --nproc 64 --tp 2 --device h100",
    )
