"""Variables of a shell script: their expansion, arithmetic, and tests of them.

A value that cannot be known, as it is the output of a command, is marked with its name.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from stepmark.framework_files.shell_grammar import OUTPUT, split

Values = dict[str, list[str]]  # of variables and arrays, and of arguments: @, #, 1
MARK = "\1"  # around the name of what is uncertain
_MAX_SUM = 200  # characters
_MAX_BITS = 63
_MAX_NAME = 60
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.LShift: lambda number, bits: number << min(bits, _MAX_BITS),
    ast.Pow: lambda number, power: int(math.pow(number, power)),
}
_COMPARED: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
}
_SIGNS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
_FILE_TESTS = ("-f", "-d", "-e", "-s", "-r", "-x", "-w", "-L")
_EXPANSION = re.compile(
    r"\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)"
    r"|\$\{(?P<name>\w+|[@*#])(?:\[(?P<index>[@*]|\d{1,4})\])?"
    r"(?:(?P<op>:?[-=+?])(?P<default>[^{}]*(?:\$\{[^{}]*\})?[^{}]*))?\}"
    r"|\$\{(?P<other>[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+)\}"
    r"|\$(?P<plain>[A-Za-z_]\w*|[0-9@*#?])"
    rf"|(?P<command>{OUTPUT})"
)
_PIECE = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|[^'\"\\]", re.DOTALL)


def marked(name: str) -> str:
    """Return the value of a variable, or of an expression, that cannot be known."""
    return f"{MARK}{name.replace(MARK, '')[:_MAX_NAME]}{MARK}"


def expanded(word: str, values: Values) -> list[str]:
    """Return the words that a word becomes: several for an array, or a variable unquoted."""
    if match := re.fullmatch(r"\"?\$\{?(\w+|[@*])(\[[@*]\])?\}?\"?", word):
        items = values.get(match[1], [])
        if match[2] or match[1] in "@*":
            return items
        if not word.startswith('"'):
            return spaced(items[0]) if items else []
    return [joined(word, values)]


def spaced(text: str) -> list[str]:
    """Return the words of a value; what is marked is one."""
    return re.findall(rf"(?:{MARK}[^{MARK}]*{MARK}|\S)+", text)


def array(value: str, values: Values) -> list[str]:
    """Return the items of an array in parentheses."""
    inside = value[1:].rstrip().removesuffix(")")
    return [word for each in split(inside) for word in expanded(each, values)]


def joined(word: str, values: Values) -> str:
    """Return a word without quotes, with its variables expanded."""
    parts = []
    for piece in _PIECE.finditer(word):
        text = piece[0]
        if text[0] == "'":
            parts.append(text[1:-1].replace("$", "\0").replace("`", "\2"))
        elif text[0] == '"':
            parts.append(text[1:-1].replace('\\"', '"').replace("\\\n", ""))
        else:
            parts.append(text[1:].replace("\n", "") if text[0] == "\\" else text)
    plain = "".join(parts) if parts else word
    return _substituted(plain, values).replace("\0", "$").replace("\2", "`")


def _substituted(text: str, values: Values, depth: int = 0) -> str:
    def value_of(match: re.Match[str]) -> str:
        if match["sum"] is not None:
            return _sum(_substituted(match["sum"], values, depth + 1), values)
        name = match["name"] or match["plain"]
        if name is None:  # the output of a command, or ${X%.*}
            return marked(match[0])
        items = _items(values.get(name, []), match["index"] or "")
        is_set = len(items) > 1 or any(items)
        sign = (match["op"] or "").removeprefix(":")
        default = (match["default"] or "").strip("\"'")
        if sign == "?" and not is_set:
            return marked(name)
        if is_set and sign != "+":
            return " ".join(items) if match["index"] else items[0]
        is_default = is_set == (sign == "+")
        text = _substituted(default, values, depth + 1) if is_default else ""
        if sign == "=":
            values[name] = [text]
        return text

    return text if depth > 8 else _EXPANSION.sub(value_of, text)


def _items(items: list[str], index: str) -> list[str]:
    """Return the items of a variable that an index names, @ and * for all."""
    is_one = index.isdecimal() and not any(MARK in item for item in items)
    return items[int(index) :][:1] if is_one else items


def _sum(text: str, values: Values) -> str:
    """Return a whole-number expression; marked where it cannot be known."""
    names = re.sub(r"[A-Za-z_]\w*", lambda match: (values.get(match[0]) or ["0"])[0], text)
    try:
        if MARK in names:
            raise ValueError
        return str(_value(ast.parse(names[:_MAX_SUM].strip(), mode="eval").body))
    except (SyntaxError, ArithmeticError, ValueError, RecursionError, MemoryError):
        return marked(text.strip())


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
        compare = _COMPARED[type(node.ops[0])]
        return int(compare(_value(node.left), _value(node.comparators[0])))
    raise ValueError


def holds(words: list[str], values: Values) -> bool | None:
    """Return whether a test holds, with parts that && and || join; None: it is unknown.

    Tests of files count as if there were none.
    """
    closed = [*_closed(words)]
    return _joint(
        any,
        (
            _joint(all, (_holds(test, values) for test in _parts(part, "&&")))
            for part in _parts(closed, "||")
        ),
    )


def _closed(words: list[str]) -> Iterator[str]:
    """Yield words of a test in which [[ a && b ]] is [[ a ]] && [[ b ]]."""
    is_open = False
    for word in words:
        is_open = word == "[[" or (is_open and word != "]]")
        yield from ("]]", word, "[[") if is_open and word in ("&&", "||") else (word,)


def _joint(
    join: Callable[[Iterable[bool]], bool], results: Iterable[bool | None]
) -> bool | None:
    """Return what results are together, if those that are unknown do not decide it."""
    each = list(results)
    low = join(result is True for result in each)
    high = join(result is not False for result in each)
    return low if low == high else None


def _parts(words: list[str], joint: str) -> Iterator[list[str]]:
    part: list[str] = []
    for word in words:
        if word == joint:
            yield part
            part = []
        else:
            part.append(word)
    yield part


def _holds(words: list[str], values: Values) -> bool | None:
    if not words:
        return None
    first, *rest = words
    if first == "!":
        result = _holds(rest, values)
        return None if result is None else not result
    if first.startswith("(("):
        text = joined(" ".join(words).removeprefix("((").removesuffix("))"), values)
        value = _sum(text, values)
        return None if MARK in value else value != "0"
    if first in ("true", "false", ":"):
        return first != "false"
    if first in ("[", "[[", "test"):
        inside = [word for word in rest if word not in ("]", "]]")]
        return _compared(inside, values, is_double=first == "[[")
    return None


def _compared(words: list[str], values: Values, *, is_double: bool) -> bool | None:
    """Return whether a test between brackets holds. is_double: [[ ]], with patterns."""
    if words and words[0] == "!":
        result = _compared(words[1:], values, is_double=is_double)
        return None if result is None else not result
    own = [part for word in words for part in _operands(word, values, is_double=is_double)]
    if any(MARK in word for word in own):
        return None
    if len(own) == 3 and own[1] in ("==", "=", "!="):
        left, sign, right = own
        is_pattern = is_double and not _is_quoted(words[2])
        fits = fnmatchcase(left, right) if is_pattern else left == right
        return fits == (sign != "!=")
    if len(own) == 3 and own[1] in _SIGNS:
        return _ordered(*own, is_double=is_double)
    if len(own) == 2:
        return _has_property(*own)
    return None if len(own) > 2 else bool(own and own[0])


def _operands(word: str, values: Values, *, is_double: bool) -> list[str]:
    """Return what a word becomes: in [ ] several, or none, where it has no quotes."""
    text = joined(word, values)
    return [text] if is_double or _is_quoted(word) else spaced(text)


def _is_quoted(word: str) -> bool:
    return "'" in word or '"' in word


def _has_property(test: str, word: str) -> bool | None:
    """Return whether a test of one word holds; what a shell refuses does not."""
    if test in ("-z", "-n"):
        return bool(word) == (test == "-n")
    is_refused = not test.startswith("-") or test in _SIGNS
    return False if is_refused or test in _FILE_TESTS else None


def _ordered(left: str, sign: str, right: str, *, is_double: bool) -> bool | None:
    """Return whether numbers compare so; an empty one is 0 in [[ ]], others are refused."""
    numbers = [word or "0" for word in (left, right)] if is_double else [left, right]
    if all(re.fullmatch(r"-?\d+", word) for word in numbers):
        return _SIGNS[sign](int(numbers[0]), int(numbers[1]))
    return None if is_double else False
