"""The words of a training command in a shell script, without running anything.

Assignments, arrays, `+=`, `${NAME:-default}`, `$((A * B))`, `&&`, `||` and tests of strings and
numbers are evaluated; whatever else a script does (commands, files) is not. A test that depends
on such things counts as false. A variable that is assigned in a loop, a case or a function is
uncertain: a training that uses it is refused.
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
    r"|\$\{(?P<other>[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+)\}"
    r"|\$(?P<plain>[A-Za-z_]\w*|[0-9@*#?])"
    r"|(?P<command>\$\([^()]*\)|`[^`]*`)"
)
_MARK = "\1"  # around the name of what is uncertain, in a value
_HEREDOC = re.compile(
    r"(?<!<)<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*)\n(?:.*?\n)??[ \t]*\2[ \t]*(?=\n|\Z)", re.DOTALL
)
_SEPARATORS = ("\n", ";", ";;", "&&", "||", "|", "&")
_ENDS = {"for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
_RESERVED = ("export", "local", "declare", "readonly", "then", "else", "do", "{", "}")
_PIECE = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|[^\s'\"\\]", re.DOTALL)


@dataclass(slots=True)
class _Branches:
    """The open `if`s of a script: whether the current branch of each is left out."""

    skipped: list[bool] = field(default_factory=list)
    matched: list[bool] = field(default_factory=list)  # whether a branch ran

    def enter(self, words: list[str], values: Values) -> list[str]:
        """Return the command of words that may begin or end a branch; [] for none."""
        first = words[0]
        if first == "if":
            self.skipped.append(True)
            self.matched.append(False)
        if first in ("if", "elif") and self.skipped:
            is_open = not any(self.skipped[:-1]) and not self.matched[-1]
            holds = is_open and _is_true(words[1:], values)
            self.skipped[-1] = not holds
            self.matched[-1] = self.matched[-1] or holds
        elif first == "else" and self.skipped:
            self.skipped[-1] = self.matched[-1]
        elif first == "fi" and self.skipped:
            self.skipped.pop()
            self.matched.pop()
        if first in ("if", "elif", "fi"):
            return []
        return words[1:] if first in ("then", "else") else words


@dataclass(slots=True)
class _Regions:
    """The open loops, cases and functions of a script, by the word that ends each."""

    ends: list[str] = field(default_factory=list)

    def holds(self, words: list[str]) -> bool:
        """Return whether a command is in such a region, or begins or ends one."""
        first = next((word for word in words if word not in ("do", "then", "else")), "")
        was_open = bool(self.ends)
        is_function = first == "function" or first.endswith("()") or words[1:2] == ["()"]
        if first in _ENDS:
            self.ends.append(_ENDS[first])
        elif is_function or (was_open and first == "{"):
            self.ends.append("}")
        elif was_open and first == self.ends[-1]:
            self.ends.pop()
        return was_open or bool(self.ends)


def _assigned_in_region(words: list[str]) -> Iterator[str]:
    """Yield the variables that a command of a region assigns."""
    if words[0] in ("for", "select", "read") and len(words) > 1:
        yield words[1]
    for word in words:
        if match := _ASSIGNMENT.fullmatch(word):
            yield match[1]
        elif word not in _RESERVED and not word.endswith((")", "()")):
            return


def _is_run(joint: str, status: bool) -> bool:
    return joint not in ("&&", "||") or status == (joint == "&&")


def training_words(text: str, where: str = "script") -> list[str]:
    """Return the words behind the Python file of the last command of a script; else none.

    A text that begins with a flag is such words itself. torchrun's --nproc_per_node and
    --nnodes come first. Raises ConfigError for words that cannot be known.
    """
    values: Values = {}
    branches = _Branches()
    regions = _Regions()
    training: list[str] = []
    status = True  # whether the last command succeeded
    for joint, words in _commands(_HEREDOC.sub(r"\3", text)):
        if regions.holds(words):
            if not any(branches.skipped):
                values.update({name: [_marked(name)] for name in _assigned_in_region(words)})
                training = _run(words, dict(values)) or training
            continue
        command = branches.enter(words, values)
        if not command or any(branches.skipped) or not _is_run(joint, status):
            continue
        if command[0] in ("[", "[[", "test"):
            status = _holds(" ".join(command).removeprefix("test "), values)
        else:
            status = True
            training = _run(command, values) or training
    _check_certain(training, where)
    return training


def _marked(name: str) -> str:
    return f"{_MARK}{name}{_MARK}"


def _check_certain(words: list[str], where: str) -> None:
    for word in words:
        if _MARK in word:
            name = word.split(_MARK)[1]
            allowed = (
                "a value that the script gives by assignments outside of loops, cases and "
                "functions: put the arguments themselves in a file"
            )
            raise ConfigError(f"{where}: {name}", "uncertain", allowed)


def _run(words: list[str], values: Values) -> list[str]:
    """Assign what a command assigns; return its arguments if it starts a training."""
    rest = [*words]
    while rest and rest[0] in _RESERVED:
        rest.pop(0)
    assigned = []
    while rest and (match := _ASSIGNMENT.fullmatch(rest[0])):
        assigned.append(match)
        rest.pop(0)
    for match in () if rest else assigned:  # else they are the command's alone
        _assign(match[1], match[2], match[3], values)
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
        if match["other"] is not None:
            return _marked(match[0].replace(_MARK, ""))
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
    if _MARK in text or "?" in text:
        return _marked(text.replace(_MARK, "").strip())
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
    _check_certain(words, "a test")
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


def _commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the words of each command, with their quotes, and what joins it to the last one.

    Comments are left out; the tests of an `if` are one command.
    """
    words: list[str] = []
    joint = ""
    for word in _lexed(text):
        if word in _SEPARATORS and not (words and words[0] in ("if", "elif")):
            if words:
                yield joint, words
            if words or word != "\n":  # a line may end in && or ||
                joint = word
            words = []
        elif word in ("\n", ";", "then") and words:
            yield joint, words
            joint, words = word, []
        elif word != "\n":
            words.append(word)
    if words:
        yield joint, words


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
