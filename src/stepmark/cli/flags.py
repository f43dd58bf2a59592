"""From options classes to commands: `verb(CommOptions, "stepmark.collectives.comm:run", doc)`.

A handler is named as text and imported when it is called, so --help reads no other folder.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import typer.core
import typer.main

from stepmark.cli import help_page
from stepmark.ground import options
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.options import Option

T = TypeVar("T")
Builder = Callable[[list[str]], Any]  # makes a command from its arguments
_WORDS = "stepmark.words"  # of the command line, for messages
_NAMES_OF = "stepmark.cli.completion:names_of"  # read only by a shell that completes
_ALL = "stepmark.all"  # whether help shows all options


class _Text:
    """The type of text and switches, which need no conversion."""

    def coerce(self, value: Any, *, param: Any, ctx: Any) -> Any:
        if param.multiple or param.nargs == -1:
            return list(value or ())
        return value


class _WithoutPydantic:
    """A command that does not import pydantic, which takes a tenth of a second.

    typer (0.29) converts every value but a bool with pydantic: also an unset --help, which is
    None, and text, which needs no conversion.
    """

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.default = False
        return option

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for parameter in self.params:  # type: ignore[attr-defined]
            descriptor = getattr(parameter, "type_descriptor", None)
            if descriptor is not None and descriptor.annotation in (str, bool, list[str]):
                parameter._runtime_param = _Text()
        parsed: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        return parsed


class Group(_WithoutPydantic, typer.core.TyperGroup):
    """A verb with commands of its own."""

    builders: Mapping[str, Builder] = {}
    topics: Mapping[str, Sequence[str]] = {}  # names of commands by heading

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            args = ["--help"]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not args[0].startswith("-") and args[0] not in self.builders:
            raise not_one_of("command", args[0], self.builders)
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name in self.builders:
            command = click_command(name, self.builders[name](rest))
        return name, command, rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.builders)) + 2
        for title, names in (self.topics or {"Commands": [*self.builders]}).items():
            with formatter.section(title):
                rows = [(name.ljust(width), self.commands[name].help) for name in names]
                formatter.write_dl(rows)
        formatter.write_paragraph()
        note = f"{ctx.command_path} COMMAND --help: the options of a command, with examples."
        formatter.write_text(note)


class Command(_WithoutPydantic, typer.core.TyperCommand):
    """A command whose help has a section per options class, and whose errors name flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = list(args)
        rest = super().parse_args(ctx, args)
        if rest and not ctx.resilient_parsing:
            most = len(help_page.usage(self._options)) - 1
            takes = f"at most {most} of them" if most else "none"
            rule = f"it must be left out, since {ctx.command_path} takes {takes}"
            raise ConfigError("argument", rest[0], rule)
        return rest

    @property
    def _options(self) -> type:
        callback: Any = self.callback
        cls: type = callback.options_class
        return cls

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise as_typed(error, ctx, ctx.meta[_WORDS]) from error.__cause__

    def format_options(self, ctx: Any, formatter: Any) -> None:
        callback: Any = self.callback
        name, everything = ctx.command_path, _ALL in ctx.meta
        help_page.write(
            formatter, name, self._options, callback.examples, everything=everything
        )

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return help_page.usage(self._options)


def _show_all(ctx: typer.Context, is_given: bool) -> None:
    if is_given:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit(0)


_HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option(
            "--help-all", is_eager=True, callback=_show_all, help="show all options and exit"
        ),
    ],
)


def verb(
    cls: type[Any],
    handler: str,
    doc: str,
    *examples: str,
    command: type[Any] = Command,
) -> Any:
    """Return a command for typer that passes its options to "module:function".

    examples: command lines without the program's name.
    """

    def call(**values: Any) -> int:
        code: int | None = options.load(handler)(options.build(cls, values))
        return code or 0

    parameters = [*(_parameter(option) for option in options.options(cls)), _HELP_ALL]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    call.__doc__ = doc
    call.options_class, call.examples = cls, examples  # type: ignore[attr-defined]
    call.command_class = command  # type: ignore[attr-defined]
    return call


def builder(
    cls: type[Any], handler: str, doc: str, *examples: str, command: type[Any] = Command
) -> Builder:
    """Return a function that makes the command of `verb`, for `group`."""
    return lambda arguments: verb(cls, handler, doc, *examples, command=command)


def group(
    doc: str,
    commands: Mapping[str, tuple[str, Builder]],
    topics: Mapping[str, Sequence[str]] | None = None,
) -> Any:
    """Return a typer application of commands.

    commands: by name a line of help, and a function that returns the command from its
    arguments. Only the command that is called is built: --help reads none of them. topics:
    names of commands by heading.
    """
    builders = {name: build for name, (_, build) in commands.items()}
    app = typer.Typer(
        cls=type("Group", (Group,), {"builders": builders, "topics": topics or {}}),
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        help=doc,
        context_settings={"max_content_width": help_page.WIDTH},
    )
    for name, (line, _) in commands.items():
        app.command(name, help=line)(_placeholder)
    return app


def _placeholder() -> None:
    raise AssertionError("a command is built before it is called")


def click_command(name: str, command: Any) -> Any:
    """Return the command, or group of commands, as typer runs it."""
    if isinstance(command, typer.Typer):
        return typer.main.get_command(command)
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    settings = {"allow_extra_args": True}  # refused by Command
    app.command(name, cls=command.command_class, context_settings=settings)(command)
    return typer.main.get_command(app)


def as_typed(error: ConfigError, ctx: Any, words: Sequence[str]) -> ConfigError:
    """Return the error with its field spelled as the user typed it, else as in --help."""
    name = error.field.lstrip("-").replace("_", "-")
    typed = {word.partition("=")[0] for word in words}
    arguments: list[str | None] = []
    for parameter in ctx.command.params:
        if parameter.param_type_name == "argument":
            value = ctx.params[parameter.name]
            arguments += value if isinstance(value, list) else [value]
    for parameter in ctx.command.params:
        spellings = [*parameter.opts, *parameter.secondary_opts]
        names = {parameter.name.replace("_", "-"), *(word.lstrip("-") for word in spellings)}
        if parameter.param_type_name == "argument" or name not in names:
            continue
        if not typed & {*spellings} and error.value in arguments:
            break  # no flag was typed
        long = [word for word in spellings if word.startswith("--")]
        field = next((word for word in spellings if word in typed), (long or spellings)[0])
        off = field in parameter.secondary_opts and error.value == "False"
        return ConfigError(field, "given" if off else error.value, error.allowed)
    return error


def _parameter(option: Option) -> inspect.Parameter:
    metavar = option.metavar or None
    complete = _completion(option)
    declared = (
        typer.Argument(metavar=metavar, autocompletion=complete)
        if option.argument
        else typer.Option(*option.spellings, help=option.help, autocompletion=complete)
    )
    # `build` knows the defaults of all but switches.
    kind = bool if option.is_switch else str
    hint: Any = list[kind] if option.is_list else kind  # type: ignore[valid-type]
    default = option.default if option.is_switch else None
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[hint if default is not None else hint | None, declared],
    )


def _completion(option: Option) -> Callable[..., list[str]] | None:
    """Return the function that completes a value in a shell; after , or NAME= another one."""
    if not (option.reader.choices or option.names):
        return None

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        folder = Path(ctx.params.get("runs") or ctx.params.get("out") or "runs")
        names = option.reader.choices or options.load(_NAMES_OF)(option.names, folder)
        start = max(map(incomplete.rfind, ",=")) + 1
        before, word = incomplete[:start], incomplete[start:]
        return [f"{before}{name}" for name in names if name.startswith(word)]

    return complete
