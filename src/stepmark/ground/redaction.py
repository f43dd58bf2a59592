"""Remove secrets from what is stored or printed: words of commands, variables, texts.

A secret is known by the name before it (--token X, HF_TOKEN=X), by what precedes it (Bearer X,
?sig=X, ://user:X@), or by the prefix of its issuer (hf_X). Long secrets of this process's own
environment and command line are known by their value, too.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache

REDACTED = "<redacted>"
# Names are compared in snake case: MONKEY, KEYBOARD, tokens, key_value_heads are harmless.
_SECRET = re.compile(
    r"(\w+_)?(secrets?(_\w+)?|(\w*password|\w*passwd|passphrase|credentials?|\w*token|jwt|auth"
    r"|x_\w+_signature|(api|access|account|auth|private|ssh)?key)(_\d+|_b64|_base64|_hex|_value)*)"
)
# More names of variables: SMTP_PASS, GITHUB_PAT, MYSQL_PWD, but not PWD; AWS_ACCESS_KEY_ID.
_SECRET_VARIABLE = re.compile(r"\w+_(pass|pat|pwd|key_id)|(\w+_)?(db|ssh)pass")
# Tokens of models and columns of data: --pad-token, --loss-per-token, --prompt-key.
_HARMLESS = re.compile(
    r"(\w+_)?(answer|audio|begin|bos|by|cache|cls|column|each|end|eos|field|first|group|image"
    r"|input|json|label|last|mask|max|min|next|num|output|pad|partition|per|primary|prompt"
    r"|question|response|sep|sort|special|start|stop|text|think|unk|video)_(key|token)"
)
_NAME = re.compile(r"[-+~]*\w[\w.-]*")
# --token X, token=X, "token": X, ?key=X, password: X; but not "key: 5", sorted(key=len) and our
# own "--token is invalid".
_ASSIGNED = re.compile(
    r"(?<![\w.-])(?:(?P<option>-{1,2}[A-Za-z_][\w.-]*+)(?:\s*[:=]\s*+|[ ]+(?!is\s))"
    r"|(?:(?<=[?&'\"])|(?!(?i:auth|key)\s*[:=]|(?i:token|secrets?|credentials?)\s*:))"
    r"(?P<name>[A-Za-z_][\w.-]*+)['\"]?\s*+(?::=|:(?![:/])|=(?!=))\s*+)(?=(?P<quote>['\"]?)\S)"
)
_VALUE = re.compile(r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')+|.[^\s"'&]*""")
# A line without any of them has no shape of a secret; it is much faster to look for them.
_HINTS = (
    *("token", "key", "secret", "pass", "pwd", "credential", "jwt", "auth", "sig", "_pat"),
    *("cookie", "bearer", "basic", "://"),
    *("hf_", "sk-", "gho_", "ghp_", "ghr_", "ghs_", "ghu_", "_pat_", "glpat-", "nvapi-"),
    *("xox", "akia", "asia", "aiza", "eyj"),
)
_SHAPES = (
    (re.compile(r"""(://)[^/\s"]*@"""), rf"\1{REDACTED}@"),
    (
        re.compile(
            r"""(?i)\b((?:authorization|cookie)['"]?\s*[:=]\s*['"]?)[^\s"'][^\r\n"']*"""
        ),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"(?i)([?&]sig(?:nature)?=)[^\s&\"']+"), rf"\1{REDACTED}"),
    # Not the word after "Basic": the name and password have capitals or digits in base64.
    (
        re.compile(r"\b(Basic\s+)\w(?=[a-z]*[A-Z0-9+/=])[A-Za-z0-9+/]{7,}=*"),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]+"), rf"\1{REDACTED}"),
    (
        re.compile(
            r"\b(?:hf_[A-Za-z0-9]{16,}|sk-(?=[\w-]*\d)[\w-]{20,}|gh[opsru]_[A-Za-z0-9]{16,}"
            r"|github_pat_\w{16,}|glpat-[\w-]{16,}|nvapi-[\w-]{16,}|xox[abeprs]-[\w-]{10,}"
            r"|(?:AKIA|ASIA)[A-Z0-9]{16}\b|AIza[\w-]{35}|eyJ[\w-]{6,}\.[\w-]+\.[\w-]*)"
        ),
        REDACTED,
    ),
)


@lru_cache(maxsize=1024)
def is_secret_name(name: str) -> bool:
    """Return whether the value of an option, a variable or a field of this name is a secret."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    snake = "_".join(parts).lower()
    if name.lstrip("-Dex").isupper():  # docker run -eNAME=X, gcc -DNAME=X
        return bool(_SECRET.fullmatch(snake) or _SECRET_VARIABLE.fullmatch(snake))
    return bool(_SECRET.fullmatch(snake)) and not _HARMLESS.fullmatch(snake)


def redact_words(words: Iterable[str]) -> tuple[str, ...]:
    """Return the words of a command without their secrets."""
    return tuple(seen + REDACTED if value else redact(seen) for seen, value in _pairs(words))


def redact_variable(name: str, value: str) -> str:
    """Return the value of a variable, without what is secret of it."""
    return REDACTED if is_secret_name(name) else redact(value)


def redact(text: str) -> str:
    """Return a text without the secrets that it has."""
    for value in _known_secrets():
        text = text.replace(value, REDACTED)
    return redact_shapes(text)


def redact_shapes(text: str) -> str:
    """Return a text of another process without the secrets that can be recognized."""
    return "\n".join(map(_redact_line, text.split("\n")))


def _redact_line(line: str) -> str:
    if not any(map(line.lower().__contains__, _HINTS)):
        return line
    for pattern, replacement in _SHAPES:
        line = pattern.sub(replacement, line)
    shown = ""
    end = 0
    for match in _ASSIGNED.finditer(line):
        if match.start() >= end and is_secret_name(match["option"] or match["name"]):
            shown += line[end : match.end()] + match["quote"] + REDACTED + match["quote"]
            value = _VALUE.match(line, match.end())
            end = value.end() if value else len(line)
    return shown + line[end:]


def _known_secrets() -> list[str]:
    """Return the secrets of this process that a name tells, the longest first."""
    values = [
        *(value for name, value in os.environ.items() if is_secret_name(name)),
        *(value for _, value in _pairs(sys.argv)),
    ]
    # A shorter value stands in texts by chance, as "1" does.
    return sorted((v for v in values if len(v) >= 8), key=len, reverse=True)


def _pairs(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield of each word what may be seen, and the secret that follows; "" for none."""
    is_expected = False
    for word in words:
        is_value = is_expected and not re.match("--[a-z]", word)
        pair = ("", word) if is_value else _assigned(word)
        is_expected = word.startswith("-") and pair == (word, "") and is_secret_name(word)
        yield pair


def _assigned(word: str) -> tuple[str, str]:
    """Split a word where it assigns to a secret name: --env=HF_TOKEN= and the value."""
    start = 0
    while (end := word.find("=", start)) >= 0 and _NAME.fullmatch(word, start, end):
        if is_secret_name(word[start:end]):
            return word[: end + 1], word[end + 1 :]
        start = end + 1
    return word, ""
