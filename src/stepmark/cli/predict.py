"""stepmark predict: of a model as `train` runs it, of a workload, or of a framework's job."""

from collections.abc import Callable
from typing import Any

from stepmark.cli.commands import Command, UnknownOptionError, Values
from stepmark.cli.workload import file_framework, framework_of
from stepmark.ground import options
from stepmark.ground.errors import ConfigError
from stepmark.ground.option_grid import Grid, read_grid

_DOC = "Predict a step by measured parts or data sheet"


class _Command(Command):
    """A command whose options may have lists, of which it predicts each combination.

    With Megatron-LM's rules it accepts that framework's arguments, too.
    """

    framework = ""

    def parse(self, name: str, words: list[str]) -> Values:
        if self.framework == "megatron":
            rest, arguments = _of_flags("without_arguments")(words, self.words)
            values: Values = _of_flags("add_arguments")(super().parse(name, rest), arguments)
            return values
        try:
            return super().parse(name, words)
        except UnknownOptionError as error:
            _of_flags("refuse_arguments")(error.option)
            raise

    def read(self, values: Values) -> Grid[Any]:
        from stepmark.predictions.predict_options import LISTED  # noqa: PLC0415

        return read_grid(self.cls, values, LISTED)

    def call(self, given: Grid[Any], spell: Callable[[ConfigError], ConfigError]) -> int | None:
        if not given.axes:
            return super().call(given.options, spell)
        code: int = options.load("stepmark.predictions.prediction_grid:run")(given, spell)
        return code


def _of_flags(name: str) -> Callable[..., Any]:
    """Return a function of the module of the frameworks' settings, which --help never needs."""
    function: Callable[..., Any] = options.load(f"stepmark.workloads.workload_flags:{name}")
    return function


def command(words: list[str]) -> Command:
    """Return the command, with the settings of the framework that the words name."""
    framework = framework_of(words) or file_framework(words)
    if not framework:
        from stepmark.predictions.predict_options import PredictOptions  # noqa: PLC0415

        return _Command(
            PredictOptions,
            "stepmark.predictions.predict:run",
            f"{_DOC}; --framework NAME: its flags.",
            "predict llama-3.1-70b --nproc 64 --tp 2,4,8 --device h200  # a table",
            "predict --from-run latest --what-if link=2x",
            "predict workload.json --device h100-sxm",
            "predict torchtitan.toml --nproc 256 --device h100-sxm",
        )
    from stepmark.predictions import framework_job  # noqa: PLC0415
    from stepmark.workloads.rules import find_rule  # noqa: PLC0415

    try:
        name = find_rule(framework)
    except ConfigError as error:
        raise ConfigError("--framework", error.value, error.allowed) from None
    framework_command = _Command(
        framework_job.options_class(name),
        "stepmark.predictions.predict:run",
        f"{_DOC}, for a job of `workload generate` with {name}'s settings.",
        "predict gpt-7b --framework megatron --nproc 64 --tp 2,4 --device h100",
        "predict gpt-7b --framework deepspeed --nproc 8 --device a100",
        "predict gpt-7b --framework pytorch --nproc 64 --tp 2 --device h100",
    )
    framework_command.framework = name
    return framework_command
