"""The nearest of a closed set, and the sentences that name it or what the system lacks."""

import errno
import os

import pytest

from stepmark.ground.errors import nearest, not_one_of, sentence_of


@pytest.mark.parametrize(
    ("word", "expected"),
    [("FSDP", ["fsdp"]), ("fspd", ["fsdp"]), ("all-reduc", ["all_reduce"]), ("xyz", [])],
)
def test_nearest(word: str, expected: list[str]) -> None:
    assert nearest(word, ["ddp", "fsdp", "all_reduce"]) == expected


def test_the_first_of_equals_is_suggested() -> None:
    assert nearest("all_reduce", ["all_reduce", "all-reduce"]) == ["all_reduce"]


def test_the_sentence_names_field_value_nearest_and_all() -> None:
    error = not_one_of("dtype", "bf61", ["fp32", "bf16"], " for gemm")
    assert str(error) == (
        "dtype bf61 is invalid: did you mean bf16? It must be one of fp32, bf16 for gemm."
    )
    assert str(not_one_of("dtype", "x", ["fp32"])) == (
        "dtype x is invalid: it must be one of fp32."
    )


def test_an_alias_is_suggested_but_not_listed() -> None:
    error = not_one_of("device", "h2000", ["h20", "h200-sxm"], aliases=["h200"])
    assert "did you mean h200? It must be one of h20, h200-sxm." in str(error)


def test_what_is_missing_has_no_nearest() -> None:
    assert "did you mean" not in str(not_one_of("api", None, ["None", "torch"]))


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x/y"), "'/x/y': free some space"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "ulimit -n"),
        (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "ulimit -u"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (MemoryError(), "MemoryError: memory is used up"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "memory is used up"),
        (ImportError("libtorch.so: failed to map segment from shared object"), "ulimit -v"),
        (
            RuntimeError("[enforce fail at a/b.cc:212] ifa. Unable to find interface: [::1]"),
            "ifa. Unable to find interface: [::1]: its network interface is down",
        ),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found"), "TMPDIR"),
        (OSError(errno.EIO, os.strerror(errno.EIO), "f"), "[Errno 5] Input/output error: 'f'"),
    ],
)
def test_what_the_system_lacks_is_one_sentence(error: BaseException, advice: str) -> None:
    text = sentence_of(error)
    assert advice in text
    assert "\n" not in text
    assert "enforce fail" not in text


def test_a_mistake_of_ours_is_no_sentence() -> None:
    assert sentence_of(RuntimeError("a mistake")) == ""
    assert sentence_of(KeyError("name")) == ""
