"""The words of a training command in a shell script, without running anything.

Assignments, arrays, sums, tests of strings and numbers, branches, cases and functions are
evaluated; commands and files are not. What depends on these, or on a loop, is uncertain: a
training that uses it is refused.
"""

import contextlib
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from stepmark.framework_files.shell_grammar import (
    TESTS,
    Body,
    Case,
    Choice,
    Command,
    Loop,
    Node,
    parse,
)
from stepmark.framework_files.shell_values import (
    MARK,
    Values,
    array,
    expanded,
    holds,
    joined,
    marked,
    spaced,
)
from stepmark.ground.errors import ConfigError

_MAX_WORDS = 20_000
_MAX_COMMANDS = 20_000
_MAX_CALLS = 20  # of functions by functions
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
_DECLARATIONS = ("export", "local", "declare", "readonly", "typeset")
_READERS = ("read", "mapfile", "readarray", "let", "printf", "getopts")
_LAUNCH = ("nproc_per_node", "nnodes")
_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>?|<<?<?)(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")


class _ReturnError(Exception):
    """A function returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Training:
    """A command that starts a Python file, and whether it runs for certain."""

    program: str
    words: list[str]
    certain: bool


@dataclass(slots=True)
class _Script:
    """What a script has done so far.

    arguments: words of lines that begin with a flag. local: names that each function which is
    being called has for itself.
    """

    text: str
    values: Values = field(default_factory=lambda: {"@": [], "#": ["0"]})
    functions: dict[str, Body] = field(default_factory=dict)
    trainings: list[_Training] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    local: list[set[str]] = field(default_factory=list)
    num_commands: int = 0

    def run(self, body: Body, *, certain: bool) -> None:
        """Run commands. certain: whether they run is known."""
        status: bool | None = True  # of the last command; None: unknown
        for node in body:
            self.num_commands += 1
            if self.num_commands > _MAX_COMMANDS:
                raise ConfigError("script", "long", f"one of {_MAX_COMMANDS} commands at most")
            is_joined = node.joint in ("&&", "||")
            if is_joined and status is not None and status != (node.joint == "&&"):
                continue
            is_known = not is_joined or status is not None
            result = self._run_node(node, certain=certain and is_known)
            status = result if is_known else None

    def _run_node(self, node: Node, *, certain: bool) -> bool | None:
        """Return whether what it runs succeeds; commands do."""
        if isinstance(node, Command):
            return self._run_command(node.words, certain=certain)
        if isinstance(node, Choice):
            self._choose(node, certain=certain)
        elif isinstance(node, Case):
            self._choose_arm(node, certain=certain)
        elif isinstance(node, Loop):
            self._loop(node)
        elif node.name:
            self.functions[node.name] = node.body
        else:
            self.run(node.body, certain=certain)
        return True

    def _choose(self, node: Choice, *, certain: bool) -> None:
        for test, body in node.branches:
            if test and test[0] in self.functions:
                self.run(self.functions[test[0]], certain=False)
            result = holds(test, self.values)
            if result is not False:
                certain = certain and result is True
                self.run(body, certain=certain)
            if result is True:
                return

    def _choose_arm(self, node: Case, *, certain: bool) -> None:
        subject = joined(node.subject, self.values)
        is_known = MARK not in subject
        for patterns, body in node.arms:
            own = [joined(pattern, self.values) for pattern in patterns]
            fits = is_known and any(fnmatchcase(subject, pattern) for pattern in own)
            if fits or not is_known:
                self.run(body, certain=certain and is_known)
            if fits:
                return

    def _loop(self, node: Loop) -> None:
        """Mark what a loop assigns, unless its test does not hold at once."""
        first, *head = node.head
        if first in ("for", "select"):
            for name in head[:1]:
                self._mark(name)
        elif holds(head, self.values) is (first == "until"):
            return
        self.run(node.body, certain=False)

    def _run_command(self, words: list[str], *, certain: bool) -> bool | None:
        if words[0].startswith("((") or words[0] == "let":
            self._mark_assigned(" ".join(words))
        if words[0] in TESTS or words[0].startswith("(("):
            return holds(words, self.values)
        is_declaration = words[0] in _DECLARATIONS
        rest = words[is_declaration:]
        if is_declaration:
            rest = [word for word in rest if not word.startswith("-")]
        assigned = []
        while rest and (match := _ASSIGNMENT.fullmatch(rest[0])):
            assigned.append(match)
            rest.pop(0)
        if words[0] == "local" and self.local:
            self.local[-1].update(match[1] for match in assigned)
        if is_declaration:  # all of its words are expanded before
            values = [self._value_of(match) for match in assigned]
            for match, value in zip(assigned, values, strict=True):
                self._assign(match, value, certain=certain)
        elif not rest:  # else they are the command's alone
            for match in assigned:
                self._assign(match, self._value_of(match), certain=certain)
        else:
            self._start(rest, certain=certain)
        return True

    def _start(self, words: list[str], *, certain: bool) -> None:
        """Run a builtin that changes variables, a function, or a training."""
        first, *names = words
        if first in _READERS or (first == "unset" and not certain):
            for name in names:
                self._mark(name)
        elif first == "unset":
            for name in names:
                self.values.pop(name, None)
        elif first in ("source", "."):
            for name in re.findall(r"\$\{?([A-Za-z_]\w*)", self.text):
                self.values.setdefault(name, [marked(name)])
        elif first == "return" and self.local and certain:
            raise _ReturnError
        elif first == "shift":
            self._set_arguments(self.values["@"][1:])
        parts = [part for word in _plain(words) for part in _parts(word, self.values)]
        if len(parts) > _MAX_WORDS:
            raise ConfigError("file", f"{len(parts)} words", f"at most {_MAX_WORDS}")
        if parts and parts[0] in self.functions:
            self._call(parts[0], parts[1:], certain=certain)
        elif parts and parts[0].startswith("--"):
            self.arguments += parts
        elif (place := _place_of_program(parts)) is not None:
            training = _Training(
                program=re.split(r"[/.]", parts[place].removesuffix(".py"))[-1],
                words=_arguments(parts, place),
                certain=certain,
            )
            self.trainings += [training] if training.words else []

    def _call(self, name: str, arguments: list[str], *, certain: bool) -> None:
        if len(self.local) > _MAX_CALLS:
            raise ConfigError("script", name, f"one of {_MAX_CALLS} calls in calls at most")
        before = dict(self.values)
        self._set_arguments(arguments)
        self.local.append({name for name in self.values if not _NAME.fullmatch(name)})
        with contextlib.suppress(_ReturnError):
            self.run(self.functions[name], certain=certain)
        for local in self.local.pop():
            self.values.pop(local, None)
            if local in before:
                self.values[local] = before[local]

    def _set_arguments(self, arguments: list[str]) -> None:
        for name in [name for name in self.values if name.isdecimal()]:
            del self.values[name]
        self.values |= {"@": arguments, "#": [str(len(arguments))]}
        self.values |= {str(at): [word] for at, word in enumerate(arguments, 1)}

    def _value_of(self, match: re.Match[str]) -> list[str]:
        is_array = match[3].startswith("(")
        return array(match[3], self.values) if is_array else [joined(match[3], self.values)]

    def _assign(self, match: re.Match[str], value: list[str], *, certain: bool) -> None:
        name, sign, text = match.groups()
        new = value if certain else [marked(name)]
        before = self.values.get(name, []) if sign == "+=" else []
        is_list = text.startswith("(") or not before
        self.values[name] = before + new if is_list else [before[0] + new[0], *before[1:]]

    def _mark_assigned(self, text: str) -> None:
        """Mark the variables of an expression that assigns some, such as ((N = 4))."""
        if re.search(r"(?<![<>=!])=(?!=)|\+\+|--", text):
            for name in _NAME.findall(text):
                self._mark(name)

    def _mark(self, name: str) -> None:
        if _NAME.fullmatch(name):
            self.values[name] = [marked(name)]


def training_words(
    text: str,
    where: str = "script",
    idle: Collection[str] = (),
    check: Callable[[str], None] = lambda program: None,
) -> list[str]:
    """Return the words behind the Python file of the last command of a script; else none.

    A text of lines that begin with a flag is such words itself. torchrun's --nproc_per_node and
    --nnodes come first. idle: flags whose value may be uncertain. check: refuses a program by
    its name. Raises ConfigError for words that cannot be known.
    """
    script = _Script(text)
    script.run(parse(text), certain=True)
    if script.arguments and script.trainings:
        allowed = "a part of the command, which a comment or a line without \\ ends before it"
        raise ConfigError(f"{where}: {script.arguments[0]}", "alone", allowed)
    if not script.trainings:
        _check_certain(script.arguments, where, idle)
        return script.arguments
    *others, last = script.trainings
    if not last.certain and any(other.words != last.words for other in others):
        raise ConfigError(
            f"{where}: training", "uncertain", "one that no unknown test or loop chooses"
        )
    check(last.program)
    _check_certain(last.words, where, idle)
    return last.words


def _check_certain(words: list[str], where: str, idle: Collection[str]) -> None:
    before = ""
    for word in words:
        name = before if before.startswith("--") else word.partition("=")[0]
        if MARK in word and name not in idle:
            allowed = (
                "a value that assignments of the script give, without loops, commands and "
                "unknown tests: put the arguments themselves in a file"
            )
            raise ConfigError(f"{where}: {word.split(MARK)[1]}", "uncertain", allowed)
        before = word


def _plain(words: list[str]) -> Iterator[str]:
    """Yield the words of a command without its redirections."""
    coming = iter(words)
    for word in coming:
        match = _REDIRECTION.fullmatch(word)
        if match is None:
            is_last = word.count(")") > word.count("(")  # of a subshell
            yield word.removesuffix(")") if is_last else word
        elif not match[1]:
            next(coming, "")  # the file is a word of its own


def _parts(word: str, values: Values) -> Iterator[str]:
    """Yield the words of one with its variables; quoted arguments may be several."""
    for each in expanded(word, values):
        is_several = " -" in each or each.startswith("-")
        yield from spaced(each) if is_several else (each,)


def _arguments(words: list[str], place: int) -> list[str]:
    """Return the words behind the program, and those before that give the number of ranks."""
    launch: list[str] = []
    for at, word in enumerate(words[:place]):
        name, is_, value = word.partition("=")
        name = name.replace("-", "_").lstrip("_")
        value = value if is_ else words[at + 1]
        if name in _LAUNCH and MARK not in value:
            launch += [f"--{name}", value]
    return launch + words[place + 1 :]


def _place_of_program(words: list[str]) -> int | None:
    """Return where the Python file is, or the module behind -m; None: there is none."""
    for at, word in enumerate(words):
        if word.endswith(".py"):
            return at
    for at, word in enumerate(words[:-2]):
        if word == "-m" and words[at + 2].startswith("--"):
            return at + 1
    return None
