"""Which parameters the selected tests of a file have, so that a fixture does no other work."""

import pytest


def parameters(request: pytest.FixtureRequest, name: str) -> set[str]:
    """Return the values of this parameter of the selected tests in the requesting file."""
    return {
        item.callspec.params[name]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and name in getattr(getattr(item, "callspec", None), "params", {})
    }


def slowly(names: list[str], slow: tuple[str, ...]) -> list[object]:
    """Return names as parameters of a test, of which these are slow."""
    assert set(slow) <= set(names)
    return [
        pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names
    ]
