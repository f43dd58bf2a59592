"""stepmark workload: generate, show, convert, fill and capture what a training step does."""

from collections.abc import Container, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stepmark.cli.commands import Command, Group, UnknownOptionError, Values, builder
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import options
from stepmark.workloads.workload_options import (
    CaptureOptions,
    ConvertOptions,
    FillOptions,
    GenerateOptions,
    ShowOptions,
)

_HANDLERS = "stepmark.workloads.workload"
_SPELLINGS = {option.name: option.spellings for option in options(GenerateOptions)}
_YES = ("true", "1", "yes", "on")
_NO = ("false", "0", "no", "off", "none")


def _flags() -> Any:
    """Return the module of the frameworks' settings, which --help of `workload` never needs."""
    from stepmark.workloads import workload_flags  # noqa: PLC0415

    return workload_flags


def _generate(args: list[str]) -> Command:
    """Return the command with the options of the framework that the arguments name."""
    flags = _flags()
    try:
        framework = flags.find_rule(framework_of(args) or file_framework(args) or "megatron")
    except ConfigError as error:
        raise ConfigError("--framework", error.value, error.allowed) from None
    own = {name: rule.help for name, rule in flags.RULES.items() if not rule.alias}
    aliases = ", ".join(name for name, rule in flags.RULES.items() if rule.alias)
    own["pytorch"] += f"; {aliases}: parts of it"
    frameworks = "; ".join(f"{name} ({text})" for name, text in own.items())
    doc = (
        "Generate what one training step computes and communicates. Frameworks: "
        f"{frameworks}. --framework NAME --help shows its settings; these are {framework}'s. "
        "Flags may have _ for -."
    )
    examples = (
        "workload generate --model gpt-7b --framework fsdp --world-size 8",
        "workload generate --model gpt-7b --world-size 64 --tp 8 -o w.json",
        "workload generate --model deepseek-v3 --ep 8 --distinct",
    )
    cls = flags.options_class(framework)
    handler = f"{_HANDLERS}:run_generate"
    command = _Command(cls, handler, doc, *examples)
    command.framework = framework
    return command


class _Command(Command):
    """A command that also accepts AICB's spellings, --seq_len and --aiob_enable=True.

    With Megatron-LM's rules it accepts that framework's arguments, too.
    """

    framework = ""

    def parse(self, name: str, words: list[str]) -> Values:
        declared = [option for option in self.options if not option.argument]
        switches = {word for option in declared if option.is_switch for word in option.words}
        valued = {word for option in declared if not option.is_switch for word in option.words}
        if "--recompute" not in valued:
            words = with_bare_recompute(words)
        elif with_bare_recompute(words) != words:
            _flags().refuse_bare_recompute(framework_of(words))
        words = [spelled(word, switches) for word in words]
        refuse_two_formats(words)
        words = [word for word in words if word]
        arguments = {}
        if self.framework == "megatron":
            words, arguments = _flags().without_arguments(words, self.words)
        try:
            values: Values = _flags().add_arguments(super().parse(name, words), arguments)
            return values
        except UnknownOptionError as error:
            _flags().refuse_other_framework(error.option)
            raise


def spelled(word: str, switches: Container[str]) -> str:
    """Return an option as it is declared: --seq_len=4 is --seq-len=4. Other words stay.

    switches: options without a value, and their opposites; --aiob_enable=True is --aiob-enable,
    =False the opposite, or "" where there is none.
    """
    if not word.startswith("--"):
        return word
    name, is_, value = word.partition("=")
    name = name.replace("_", "-")
    if is_ and name in switches and value.lower() in _YES:
        return name
    if is_ and name in switches and value.lower() in _NO:
        opposite = "--no-" + name.removeprefix("--")
        return opposite if opposite in switches else ""
    return name + is_ + value


def framework_of(args: Sequence[str]) -> str:
    """Return the value of --framework before the command line is parsed; "" for none."""
    return ["", *(value for _, value in _values("framework", args))][-1]


# Options whose values are files to write, or of measured values: none says what a job is.
_NOT_A_JOB = (
    *("--json", "--csv", "--html", "--timeline", "--out", "-o", "--anchor", "--curve"),
    *("--calibration", "--compute-from", "--comp-filepath", "--runs", "--from-run", "--host"),
)


def file_framework(args: Sequence[str]) -> str:
    """Return the framework whose file the words name; "" where they name none."""
    return next((framework for _, framework in framework_files(args)), "")


def framework_files(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each word that is a framework's file, with the framework."""
    for before, word in zip(["", *args], args, strict=False):
        name = word.partition("=")[2] if word.startswith("--") else word
        if (
            before in _NOT_A_JOB
            or word.partition("=")[0] in _NOT_A_JOB
            or not Path(name).is_file()
        ):
            continue
        from stepmark.framework_files import configuration  # noqa: PLC0415 - only with a file

        if configuration.is_framework_file(name):
            yield name, configuration.framework_of(name)


def _values(option: str, args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (spelling, value) of every occurrence of an option."""
    for word, after in zip(args, [*args[1:], ""], strict=False):
        name, is_, value = spelled(word, ()).partition("=")
        if name in _SPELLINGS[option]:
            yield name, value if is_ else after


def with_bare_recompute(args: list[str]) -> list[str]:
    """Replace AICB's --recompute, which has no value, by --recompute-activations."""
    return [
        "--recompute-activations" if word == "--recompute" and after.startswith("-") else word
        for word, after in zip(args, [*args[1:], "-"], strict=False)
    ]


def refuse_two_formats(args: Sequence[str]) -> None:
    """Refuse --to and --format that differ. Raises ConfigError.

    Of other flags that are given twice the last one wins.
    """
    formats = dict(_values("to", args)).values()
    if len(set(formats)) > 1:
        raise ConfigError("format", " and ".join(formats), "one format")


_builder = partial(builder, kind=_Command)
app = Group(
    "What one training step computes and communicates: generate, show, convert, fill, capture.",
    {
        "generate": (
            "What a step of any model x parallelism does; AICB's parameters are accepted.",
            _generate,
        ),
        "show": (
            "What is in a workload: messages, shapes, layers, pipeline.",
            _builder(
                ShowOptions,
                f"{_HANDLERS}:show",
                "Show what is in a workload file.",
                "workload show w.json",
                "workload show w.json --distinct --csv -",
            ),
        ),
        "convert": (
            "Between stepmark's, AICB's, SimAI's and others' files.",
            _builder(
                ConvertOptions,
                f"{_HANDLERS}:convert",
                "Write a workload in another format.",
                "workload convert w.json --to simai -o w.txt",
                "workload convert w.csv --to chakra -o folder/",
            ),
        ),
        "fill": (
            "Times of computation, measured on this device (--measure) or from sources.",
            _builder(
                FillOptions,
                "stepmark.replays.workload_fill:run",
                "Write a workload with times of its computation: measured on this device "
                "(--measure), else of --compute-from, else those that it has.",
                "workload fill w.json --measure -o timed.json",
                "workload fill w.json --compute-from roofline:h200 -o timed.json",
            ),
        ),
        "capture": (
            "From your own PyTorch code, run on fake tensors and fake ranks.",
            _builder(
                CaptureOptions,
                "stepmark.capture.workload_capture:run",
                "Record what PyTorch code does: fake tensors, fake ranks.",
                "workload capture job.py:build --world-size 8 -o w.json",
            ),
        ),
    },
)
