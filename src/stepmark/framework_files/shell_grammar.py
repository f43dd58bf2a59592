"""The commands of a shell script, with its branches, loops, cases and functions."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from stepmark.ground.errors import ConfigError

_MAX_DEPTH = 50  # scripts of real jobs nest less than 10
TESTS = ("[", "[[", "test", "true", "false", "!")
_HEREDOC = re.compile(
    r"(?<!<)<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*)\n(?:.*?\n)??[ \t]*\2[ \t]*(?=\n|\Z)", re.DOTALL
)
_LOOPS = ("for", "while", "until", "select")
_TESTED = ("if", "elif", "while", "until")  # words with a test, whose parts && and || join
_ALONE = ("then", "else", "do", "{")  # words behind which a command begins
_SEPARATORS = ("\n", ";", ";;", "&&", "||", "|", "&")
_JOINTS = ("&&", "||", "|", "&")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Words with their quotes. joint, here and below: what stands before, such as &&."""

    words: list[str]
    joint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An if: the words of each test, and what runs where it holds."""

    branches: list[tuple[list[str], "Body"]]
    joint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop. head: its words before do."""

    head: list[str]
    body: "Body"
    joint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case: the patterns of each arm, and what runs where one fits."""

    subject: str
    arms: list[tuple[list[str], "Body"]]
    joint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Commands in braces; with a name they are a function, which runs where it is called."""

    name: str
    body: "Body"
    joint: str


Node: TypeAlias = Command | Choice | Loop | Case | Group
Body: TypeAlias = list[Node]


def parse(text: str) -> Body:
    """Return the commands of a script. Raises ConfigError where it nests too deep."""
    return _Parser(text).body(())


class _Parser:
    """Reader of commands that are left: the next one is the last of a list."""

    def __init__(self, text: str) -> None:
        self._left = [*_commands(_HEREDOC.sub(r"\3", text))][::-1]
        self._depth = 0

    def body(self, ends: tuple[str, ...], *, is_arm: bool = False) -> Body:
        """Return the commands before one that begins with one of these words."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ConfigError("script", "nested", f"at most {_MAX_DEPTH} levels deep")
        nodes: Body = []
        while self._left and self._first not in ends:
            if is_arm and self._left[-1][0] == ";;":
                break
            nodes.append(self._node(*self._left.pop()))
        self._depth -= 1
        return nodes

    @property
    def _first(self) -> str:
        return self._left[-1][1][0] if self._left else ""

    def _skip(self, word: str) -> None:
        if self._first == word:
            self._left.pop()

    def _node(self, joint: str, words: list[str]) -> Node:
        if words[0] == "if":
            return Choice(branches=self._branches(words), joint=joint)
        if words[0] in _LOOPS:
            while self._left and self._first != "do":
                self._left.pop()  # for ((i = 0; i < 4; i++))
            self._skip("do")
            body = self.body(("done",))
            self._skip("done")
            return Loop(head=words, body=body, joint=joint)
        if words[0] == "case" and len(words) > 1:
            return Case(subject=words[1], arms=[*self._arms()], joint=joint)
        name = function_name(words)
        if words[0] == "{" or (name and self._first == "{"):
            if name:
                self._left.pop()
            body = self.body(("}",))
            self._skip("}")
            return Group(name=name, body=body, joint=joint)
        return Command(words=words, joint=joint)

    def _branches(self, words: list[str]) -> list[tuple[list[str], Body]]:
        branches = []
        while True:
            self._skip("then")
            branches.append((words[1:], self.body(("elif", "else", "fi"))))
            if self._first != "elif":
                break
            words = self._left.pop()[1]
        if self._first == "else":
            self._left.pop()
            branches.append((["true"], self.body(("fi",))))
        self._skip("fi")
        return branches

    def _arms(self) -> Iterator[tuple[list[str], Body]]:
        while self._left and self._first != "esac":
            patterns = [word.strip("()") for word in self._left.pop()[1]]
            yield patterns, self.body(("esac",), is_arm=True)
        self._skip("esac")


def function_name(words: list[str]) -> str:
    """Return the name of the function whose definition begins so; "" for none."""
    if words[0] == "function" and len(words) > 1:
        return words[1].removesuffix("()")
    if len(words) == 1 and words[0].endswith("()"):
        return words[0].removesuffix("()")
    return words[0] if words[1:] == ["()"] else ""


def _commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the words of each command, and what joins it to the last one."""
    words: list[str] = []
    joint = ""
    is_open = False  # [[ has no ]] yet
    is_pattern = False  # of a case
    for word in _spaced(text):
        is_pattern = (is_pattern or word == ";;") and word != "esac"
        if is_pattern and word not in _SEPARATORS:
            words.append(word)
            if word.endswith(")"):
                yield joint, words
                joint, words, is_pattern = "", [], False
            continue
        if is_pattern and word == "|":
            continue
        is_open = word == "[[" or (is_open and word not in ("]]", "\n"))
        is_test = is_open or (bool(words) and words[0] in _TESTED)
        if word in _SEPARATORS and not (is_test and word in _JOINTS):
            if words:
                yield joint, words
            if words or word != "\n":  # a line may end in && or ||
                joint = word
            words = []
        elif word in _ALONE and (not words or (word == "{" and function_name(words))):
            if words:
                yield joint, words
                joint, words = "", []
            yield joint, [word]
            joint = ""
        else:
            words.append(word)
            is_pattern = word == "in" and words[0] == "case"
            if is_pattern:
                yield joint, words
                joint, words = "", []
    if words:
        yield joint, words


def _spaced(text: str) -> Iterator[str]:
    """Yield words; `f(){` is two."""
    for word in _lexed(text):
        if re.fullmatch(r"[\w.:-]+\(\)\{", word):
            yield word[:-1]
            yield "{"
        else:
            yield word


def split(text: str) -> list[str]:
    """Return the words of a text with their quotes, without comments."""
    return [word for word in _lexed(text) if word not in ("\n", ";")]


_QUOTED = r"""'[^']*'|"(?:\\.|[^"\\])*+\""""
_SUM = r"\$\(\((?:[^\n()]|\([^\n()]*\))*+\)\)"
OUTPUT = r"\$\((?:[^()]|\([^()]*\))*+\)|`[^`]*`"  # of a command
# Possessive quantifiers: a hostile text takes time in proportion to its length.
_TOKEN = re.compile(
    r"(?P<comment>(?<![^\s;(])#[^\n]*)"
    r"|(?P<space>[ \t\r]+|\\\r?\n)"
    r"|(?P<redirection>\d*>&\d+-?|&>>?)"
    r"|(?P<end>\n|;;?|&&|\|\||[|&])"
    rf"|(?P<word>[A-Za-z_]\w*\+?=\((?:{_QUOTED}|(?<=[\s(])\#[^\n]*|{_SUM}|{OUTPUT}|\\."
    r"|[^'\"()\\`])*+\)"
    rf"|(?:{_QUOTED}|{_SUM}|{OUTPUT}|\$\{{[^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*)*+\}}|\\[^\n]"
    r"|[^\s'\"\\;&|`])++)"
    r"|(?P<other>.)",
    re.DOTALL,
)


def _lexed(text: str) -> Iterator[str]:
    for match in _TOKEN.finditer(text):
        if match.lastgroup in ("word", "end", "redirection"):
            yield match[0]
