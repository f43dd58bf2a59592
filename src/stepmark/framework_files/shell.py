"""The words of a training command in a shell script, without running anything.

Assignments, arrays, `+=`, `${NAME:-default}`, `$((A * B))` and tests of strings and numbers are
evaluated; whatever else a script does (commands, files, functions) is not. A test that depends
on such things counts as false.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from stepmark.ground.errors import ConfigError

Values = dict[str, list[str]]  # of variables and arrays
_MAX_WORDS = 20_000
_MAX_SUM = 200  # characters
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
_EXPANSION = re.compile(
    r"\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)"
    r"|\$\{(?P<name>\w+)(?P<index>\[[@*]\])?(?:(?P<op>:?[-=])(?P<default>[^{}]*(?:\$\{[^{}]*\})?[^{}]*))?\}"
    r"|\$(?P<plain>[A-Za-z_]\w*|[0-9@*#?])"
    r"|(?P<command>\$\([^()]*\)|`[^`]*`)"
)
_RESERVED = ("export", "local", "declare", "readonly", "then", "else", "do", "{", "}")
_PIECE = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|[^\s'\"\\]", re.DOTALL)


@dataclass(slots=True)
class _Branches:
    """The open `if`s of a script: whether the current branch of each is left out."""

    skipped: list[bool] = field(default_factory=list)
    taken: list[bool] = field(default_factory=list)  # whether a branch was taken

    def enter(self, words: list[str], values: Values) -> list[str]:
        """Return the command of words that may begin or end a branch; [] for none."""
        first = words[0]
        if first == "if":
            self.skipped.append(True)
            self.taken.append(False)
        if first in ("if", "elif") and self.skipped:
            holds = not self.taken[-1] and _is_true(words[1:], values)
            self.skipped[-1] = not holds
            self.taken[-1] = self.taken[-1] or holds
        elif first == "else" and self.skipped:
            self.skipped[-1] = self.taken[-1]
        elif first == "fi" and self.skipped:
            self.skipped.pop()
            self.taken.pop()
        if first in ("if", "elif", "fi"):
            return []
        return words[1:] if first in ("then", "else") else words


def training_words(text: str) -> list[str]:
    """Return the words behind the Python file of the last command of a script; else none.

    A text that begins with a flag is such words itself. torchrun's --nproc_per_node and
    --nnodes come first.
    """
    values: Values = {}
    branches = _Branches()
    training: list[str] = []
    for words in _commands(text):
        command = branches.enter(words, values)
        if command and not any(branches.skipped):
            training = _run(command, values) or training
    return training


def _run(words: list[str], values: Values) -> list[str]:
    """Assign what a command assigns; return its arguments if it starts a training."""
    rest = [*words]
    while rest and rest[0] in _RESERVED:
        rest.pop(0)
    while rest and (match := _ASSIGNMENT.fullmatch(rest[0])):
        _assign(match[1], match[2], match[3], values)
        rest.pop(0)
    expanded = [part for word in rest for part in _parts(word, values)]
    if len(expanded) > _MAX_WORDS:
        raise ConfigError("file", f"{len(expanded)} words", f"at most {_MAX_WORDS}")
    return _arguments(expanded)


def _assign(name: str, sign: str, value: str, values: Values) -> None:
    is_array = value.startswith("(")
    new = _array(value, values) if is_array else [_joined(value, values)]
    before = values.get(name, []) if sign == "+=" else []
    values[name] = before + new if is_array or not before else ["".join(before) + new[0]]


def _parts(word: str, values: Values) -> Iterator[str]:
    """Yield the words of one with its variables; quoted arguments may be several."""
    for each in _expanded(word, values):
        is_several = " -" in each or each.startswith("-")
        yield from each.split() if is_several else (each,)


def _arguments(words: list[str]) -> list[str]:
    place = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
    if place is None:
        return words if words and words[0].startswith("--") else []
    own = words[place + 1 :]
    launch: list[str] = []
    for at, word in enumerate(words[:place]):
        name, is_, value = word.partition("=")
        name = name.replace("-", "_").lstrip("_")
        if name in ("nproc_per_node", "nnodes"):
            launch += [f"--{name}", value if is_ else words[at + 1]]
    return launch + own


def _array(value: str, values: Values) -> list[str]:
    inside = value[1:].rstrip().removesuffix(")")
    return [word for each in _split(inside) for word in _expanded(each, values)]


def _expanded(word: str, values: Values) -> list[str]:
    """Return the words that a word becomes: several for an array, or a variable unquoted."""
    if match := re.fullmatch(r"\"?\$\{?(\w+)(\[[@*]\])?\}?\"?", word):
        items = values.get(match[1], [])
        if match[2]:
            return items
        if not word.startswith('"'):
            return " ".join(items[:1]).split()
    return [_joined(word, values)]


def _joined(word: str, values: Values) -> str:
    """Return a word without quotes, with its variables expanded."""
    parts = []
    for piece in _PIECE.finditer(word):
        text = piece[0]
        if text[0] == "'":
            parts.append(text[1:-1].replace("$", "\0"))
        elif text[0] == '"':
            parts.append(text[1:-1].replace('\\"', '"').replace("\\\n", ""))
        else:
            parts.append(text[1:].replace("\n", "") if text[0] == "\\" else text)
    plain = "".join(parts) if parts else word
    return _substituted(plain, values).replace("\0", "$")


def _substituted(text: str, values: Values, depth: int = 0) -> str:
    def value_of(match: re.Match[str]) -> str:
        if match["sum"] is not None:
            return _sum(_substituted(match["sum"], values, depth + 1), values)
        name = match["name"] or match["plain"]
        if name is None:
            return ""  # the output of a command
        items = values.get(name)
        if items and (items[0] or len(items) > 1):
            return " ".join(items) if match["index"] else items[0]
        default = match["default"] or ""
        return _substituted(default.strip("\"'"), values, depth + 1)

    return text if depth > 8 else _EXPANSION.sub(value_of, text)


def _sum(text: str, values: Values) -> str:
    """Return a whole-number expression; "" for any other."""
    text = re.sub(r"[A-Za-z_]\w*", lambda match: (values.get(match[0]) or [""])[0], text)
    try:
        return str(_value(ast.parse(text[:_MAX_SUM].strip(), mode="eval").body))
    except (SyntaxError, ArithmeticError, ValueError, RecursionError, MemoryError):
        return ""


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError


def _is_true(words: list[str], values: Values) -> bool:
    """Return whether a test holds. [ a = b ] || [ ... ] has parts that are joined."""
    text = " ".join(words)
    for alternative in re.split(r"\|\|", text):
        tests = re.split(r"&&", alternative)
        if tests and all(_holds(test, values) for test in tests):
            return True
    return False


def _holds(test: str, values: Values) -> bool:
    words = [
        _joined(word, values)
        for word in _split(test.strip().strip(";"))
        if word not in ("[", "[[", "]", "]]")
    ]
    is_not = bool(words) and words[0] == "!"
    words = words[is_not:]
    result = False
    if len(words) == 2 and words[0] in ("-z", "-n"):
        result = bool(words[1]) == (words[0] == "-n")
    elif len(words) == 1 and words[0] in ("-z", "-n"):
        result = words[0] == "-z"
    elif len(words) == 3:
        left, sign, right = words
        if sign in ("==", "=", "!="):
            result = (left == right) == (sign != "!=")
        elif left.isdecimal() and right.isdecimal() and sign in _COMPARE:
            result = (int(left) > int(right)) - (int(left) < int(right)) in _COMPARE[sign]
    return result != is_not


_COMPARE = {
    "-eq": (0,),
    "-ne": (-1, 1),
    "-gt": (1,),
    "-ge": (0, 1),
    "-lt": (-1,),
    "-le": (-1, 0),
}


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, with their quotes; comments are left out."""
    words: list[str] = []
    for word in _lexed(text):
        if word in ("\n", ";", "&&", "||", "|", "&") and not (
            words and words[0] in ("if", "elif")
        ):
            if words:
                yield words
            words = []
        elif word in ("\n", ";", "then") and words:
            yield words
            words = []
        elif word != "\n":
            words.append(word)
    if words:
        yield words


def _split(text: str) -> list[str]:
    return [word for word in _lexed(text) if word not in ("\n", ";")]


_QUOTED = r"""'[^']*'|"(?:\\.|[^"\\])*+\""""
_SUM = r"\$\(\((?:[^\n()]|\([^\n()]*\))*+\)\)"
_COMMAND = r"\$\([^()]*\)|`[^`]*`"
# Possessive quantifiers: a hostile text takes time in proportion to its length.
_TOKEN = re.compile(
    r"(?P<comment>(?<![^\s;(])#[^\n]*)"
    r"|(?P<space>[ \t\r]+|\\\r?\n)"
    r"|(?P<end>\n|;;?|&&|\|\||[|&])"
    rf"|(?P<word>[A-Za-z_]\w*\+?=\((?:{_QUOTED}|(?<=[\s(])\#[^\n]*|{_SUM}|{_COMMAND}|\\."
    r"|[^'\"()\\`])*+\)"
    rf"|(?:{_QUOTED}|{_SUM}|{_COMMAND}|\$\{{[^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*)*+\}}|\\[^\n]"
    r"|[^\s'\"\\;&|`])++)"
    r"|(?P<other>.)",
    re.DOTALL,
)


def _lexed(text: str) -> Iterator[str]:
    for match in _TOKEN.finditer(text):
        if match.lastgroup in ("word", "end"):
            yield match[0]
