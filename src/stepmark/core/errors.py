"""Exceptions that a user can see.

StepmarkError
├── ConfigError    bad input: exit code 2, one line that names field, value and what is allowed
└── CheckError     a measured check failed: exit code 1
"""


class StepmarkError(Exception):
    """Base of all errors that are shown as one line instead of a traceback."""

    exit_code = 1


class ConfigError(StepmarkError):
    """Input that cannot be used. The message is one line: field, value, what is allowed."""

    exit_code = 2

    def __init__(self, field: str, value: object, allowed: str) -> None:
        text = str(value)
        shown = text if len(text) <= 80 else text[:77] + "..."
        self.field = field
        self.shown = shown
        self.allowed = allowed
        super().__init__(f"{field}: {shown!r}: {allowed}".replace("\n", " "))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, str, str]]:
        """Pickle the __init__ arguments, because rank 0 sends the error to its peers."""
        return ConfigError, (self.field, self.shown, self.allowed)


class CheckError(StepmarkError):
    """A measured figure fails a check."""


# In order of precedence, the last one is the strongest; 130 and 143 are interrupts.
EXIT_CODES = (0, 3, 1, 2, 143, 130)


def worst(*codes: int) -> int:
    """Return the exit code of work whose parts ended with these codes."""
    return max(codes, key=EXIT_CODES.index)
