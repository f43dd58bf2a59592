import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.ground.errors import ConfigError
from stepmark.ground.units import format_bytes, format_time, parse_bytes, parse_duration

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@given(st.floats(1e-9, 1e5))
def test_a_time_reads_back(seconds: float) -> None:
    number, unit = format_time(seconds).split()
    assert float(number) * SECONDS[unit] == pytest.approx(seconds, rel=1e-3)


@given(st.integers(0, 2**50))
def test_a_size_reads_back(size: int) -> None:
    number, unit = format_bytes(size).split()
    assert float(number) * BYTES[unit] == pytest.approx(size, rel=1e-3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.0, "1 s"),
        (0.0123456, "12.35 ms"),
        (12.34e-6, "12.34 us"),
        (3e-9, "3 ns"),
        (0, "0 ns"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (3 * 2**29, "1.5 GiB")]
)
def test_sizes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60s", 60),
        ("60", 60),
        ("2m", 120),
        ("2min", 120),
        ("500ms", 0.5),
        ("250us", 250e-6),
        (" 1.5 h ", 5400),
        ("168h", 7 * 86400),
        ("1e2s", 100),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text, "budget") == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    ["", "s", "0", "0s", "-1s", "nan", "inf", "1x", "60 parsecs", "169h", "1s2", "--", "1e400"],
)
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="budget") as caught:
        parse_duration(text, "budget")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8", 8),
        ("1K", 2**10),
        ("1k", 2**10),
        ("1.5M", 3 * 2**19),
        ("4GiB", 2**32),
        ("2 KB", 2**11),
        ("1T", 2**40),
        ("0", 0),
        ("1e3", 1000),
        (" 64B ", 64),
    ],
)
def test_bytes(text: str, size: int) -> None:
    assert parse_bytes(text, "begin") == size


@pytest.mark.parametrize("text", ["", "K", "-1", "1X", "1KK", "nan", "inf", "1025T", "1,5M"])
def test_bytes_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="begin"):
        parse_bytes(text, "begin")


@given(st.integers(0, 2**40))
def test_plain_bytes_are_exact(size: int) -> None:
    assert parse_bytes(str(size), "end") == size
