"""stepmark trace messages: how often each message was sent, and how fast."""

from stepmark.core.errors import ConfigError
from stepmark.core.trace_options import MessagesOptions


def messages(options: MessagesOptions) -> int:
    """Print and write the histogram."""
    raise ConfigError("trace", options.files, "read by trace breakdown")
