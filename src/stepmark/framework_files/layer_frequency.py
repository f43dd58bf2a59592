"""Which layers have experts: --moe-layer-freq of Megatron-LM, a Python expression."""

import ast

from stepmark.ground.errors import ConfigError

_MOST_LAYERS = 100_000


def dense_layers(text: str) -> str:
    """Return the leading layers without experts of a frequency. Raises ConfigError."""
    try:
        value = _pattern(ast.parse(text.strip()[:1000], mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        value = None
    if value == 1:
        return "0"
    if isinstance(value, list):
        dense = value.index(1) if 1 in value else len(value)
        if all(each == 1 for each in value[dense:]) and not any(value[:dense]):
            return str(dense)
    raise ConfigError(
        "moe-layer-freq", text, "1, or a list such as ([0]*3+[1]*58): dense layers come first"
    )


def _pattern(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        items = [_pattern(item) for item in node.elts]
        return [item for item in items if isinstance(item, int)]
    if isinstance(node, ast.BinOp):
        left, right = _pattern(node.left), _pattern(node.right)
        is_sum = isinstance(node.op, ast.Add)
        if is_sum and isinstance(left, list) and isinstance(right, list):
            return left + right
        is_repeat = isinstance(node.op, ast.Mult)
        if is_repeat and isinstance(left, list) and isinstance(right, int):
            return left * min(right, _MOST_LAYERS // max(1, len(left)))
    raise ValueError(ast.dump(node))
