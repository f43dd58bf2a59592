"""From options classes to commands: `verb(CommOptions, "stepmark.app.comm:run", doc)`.

A handler is named as text and imported when it is called, so --help reads no other room.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import typer
import typer.core
import typer.main

from stepmark.core import options
from stepmark.core.errors import ConfigError
from stepmark.core.options import Option

T = TypeVar("T")
Builder = Callable[[list[str]], Any]  # makes a command from its arguments
_WORDS = "stepmark.words"  # of the command line, for messages


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

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name in self.builders:
            command = click_command(name, self.builders[name](rest))
        return name, command, rest


class Command(_WithoutPydantic, typer.core.TyperCommand):
    """A command whose help has a section per options class, and whose errors name flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise as_typed(error, self.params, ctx.meta[_WORDS]) from error.__cause__

    def format_options(self, ctx: Any, formatter: Any) -> None:
        cls = getattr(self.callback, "options_class", None)
        titles = {
            option.name: "Arguments" if option.argument else option.group
            for option in (options.options(cls) if cls else ())
        }
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                if parameter.param_type_name == "argument":  # typer adds <str> to the name
                    record = record[0].rpartition(" <")[0], record[1]
                title = titles.get(parameter.name or "", "Options")
                sections.setdefault(title, []).append(record)
        for title, records in sorted(
            sections.items(), key=lambda section: section[0] != "Arguments"
        ):
            with formatter.section(title):
                formatter.write_dl(records)


def verb(cls: type[Any], handler: str, doc: str, command: type[Any] = Command) -> Any:
    """Return a command for typer that passes its options to "module:function"."""

    def call(**values: Any) -> int:
        code: int | None = options.load(handler)(options.build(cls, values))
        return code or 0

    parameters = [_parameter(option) for option in options.options(cls)]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    call.__doc__ = doc
    call.options_class, call.command_class = cls, command  # type: ignore[attr-defined]
    return call


def builder(cls: type[Any], handler: str, doc: str, command: type[Any] = Command) -> Builder:
    """Return a function that makes the command of `verb`, for `group`."""
    return lambda arguments: verb(cls, handler, doc, command)


def group(doc: str, commands: Mapping[str, tuple[str, Builder]]) -> Any:
    """Return a typer application of commands.

    commands: by name a line of help, and a function that returns the command from its
    arguments. Only the command that is called is built: --help reads none of them.
    """
    builders = {name: build for name, (_, build) in commands.items()}
    app = typer.Typer(
        cls=type("Group", (Group,), {"builders": builders}),
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        help=doc,
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
    app.command(name, cls=command.command_class)(command)
    return typer.main.get_command(app)


def as_typed(
    error: ConfigError, parameters: Iterable[Any], words: Sequence[str]
) -> ConfigError:
    """Return the error with its field spelled as the user typed it, else as in --help."""
    name = error.field.lstrip("-").replace("_", "-")
    typed = {word.partition("=")[0] for word in words}
    for parameter in parameters:
        spellings = [*parameter.opts, *parameter.secondary_opts]
        names = {parameter.name.replace("_", "-"), *(word.lstrip("-") for word in spellings)}
        if parameter.param_type_name == "argument" or name not in names:
            continue
        long = [word for word in spellings if word.startswith("--")]
        field = next((word for word in spellings if word in typed), (long or spellings)[0])
        off = field in parameter.secondary_opts and error.value == "False"
        return ConfigError(field, "given" if off else error.value, error.allowed)
    return error


def _parameter(option: Option) -> inspect.Parameter:
    metavar = option.metavar or None
    text = _with_default(option)
    declared = (
        typer.Argument(help=text, metavar=None if metavar == "<str>" else metavar)
        if option.argument
        else typer.Option(
            *option.spellings,
            help=text,
            metavar=None if option.is_switch else metavar,
        )
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


def _with_default(option: Option) -> str:
    """Return the help, with the default unless the help states one itself."""
    default = option.default
    if (
        default in (None, (), "", options.REQUIRED)
        or isinstance(default, bool)
        or option.help.endswith("]")
    ):
        return option.help
    return f"{option.help} [{option.reader.show(default)}]"
