"""A real profile comes back byte for byte, and says what AICB takes from it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmark.core.errors import ConfigError
from stepmark.workload.formats import aiob
from stepmark.workload.formats.aiob import Part, Profile

from ..mutations import only_config_errors
from .aicb_samples import DATA, broken

EXAMPLE = DATA / "aiob_example.txt"
PART = "mlp_gelu:\n    time_gpu_max: 30\n    time_gpu_min: 10\n    time_gpu_avg: 20.5\n"


def read(tmp_path: Path, text: str | bytes) -> Profile:
    path = tmp_path / "profile.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return aiob.read(path)


def test_a_real_profile_comes_back_byte_for_byte() -> None:
    assert "".join(aiob.profile_text(aiob.read(EXAMPLE))) == EXAMPLE.read_text()


def test_parts_are_seconds() -> None:
    profile = aiob.read(EXAMPLE)
    assert profile.iterations == 10
    assert len(profile.parts) == 12
    assert profile.parts["atten_qkv"] == Part(max_s=1255e-6, min_s=862e-6, avg_s=889e-6)


def test_sums_are_those_of_aicb() -> None:
    """In nanoseconds what AICB's extract_averages gives for its own example."""
    parts = aiob.read(EXAMPLE).parts

    def total(word: str, norm: str) -> int:
        held = [part.avg_s for name, part in parts.items() if word in name]
        return round((sum(held) + parts[norm].avg_s) * 1e9)

    assert total("atten", "layernorm") == 1_820_000
    assert total("mlp", "layernorm2") == 2_478_000
    assert round(parts["Emb"].avg_s * 1e9) == 799_000
    gradients = parts["param_time"]
    assert (round(gradients.min_s * 1e9), round(gradients.avg_s * 1e9)) == (
        16_647_000,
        17_374_000,
    )


def test_a_profile_of_inference_has_a_phase(tmp_path: Path) -> None:
    profile = read(tmp_path, f"inference_term:decode\n{PART}")
    assert (profile.iterations, profile.inference_phase) == (None, "decode")
    assert list(profile.parts) == ["mlp_gelu"]


seconds = st.floats(1e-9, 10.0)


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.from_regex(r"[a-zA-Z_0-9]{1,20}", fullmatch=True),
        st.tuples(seconds, seconds, seconds).map(sorted),
        min_size=1,
    ),
    st.none() | st.integers(0, 10**6),
)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    times: dict[str, list[float]],
    iterations: int | None,
) -> None:
    parts = {
        name: Part(min_s=low, avg_s=middle, max_s=high)
        for name, (low, middle, high) in times.items()
    }
    phase = "prefill" if iterations is None else ""
    profile = Profile(parts=parts, iterations=iterations, inference_phase=phase)
    again = read(tmp_path_factory.getbasetemp(), "".join(aiob.profile_text(profile)))
    assert again.iterations == iterations
    assert list(again.parts) == list(parts)
    for name, part in parts.items():
        found = again.parts[name]
        assert (found.min_s, found.avg_s, found.max_s) == pytest.approx(
            (part.min_s, part.avg_s, part.max_s), rel=1e-12
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: ''"),
        (
            f"iterations:10\n{PART}",
            "line 1: 'iterations:10' is invalid: it must be train_iter:N or inference_term",
        ),
        (f"train_iter:ten\n{PART}", "line 1"),
        ("train_iter:10\n", "no part"),
        (
            f"train_iter:10\n{PART}{PART}",
            "line 6: 'mlp_gelu:' is invalid: it must be a part that has not come",
        ),
        (f"train_iter:10\n{PART}\n    time_gpu_avg: 3\n", "line 7"),
        (f"train_iter:10\n{PART.replace('20.5', 'fast')}", "line 5: .*MICROSECONDS"),
        (f"train_iter:10\n{PART.replace('20.5', '-1')}", "line 5"),
        (f"train_iter:10\n{PART.replace('20.5', 'nan')}", "line 5"),
        (
            f"train_iter:10\n{PART.replace('20.5', '40')}",
            "mlp_gelu '10 40 30' is invalid: it must be min <= avg",
        ),
        (f"train_iter:10\n{PART.partition('    time_gpu_avg')[0]}", "mlp_gelu 'no time_gpu_a"),
        (f"train_iter:10\n    time_gpu_avg: 3\n{PART}", "line 2"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read(tmp_path, text)
    assert len(str(caught.value).splitlines()) == 1
    assert str(caught.value).startswith(str(tmp_path))


def test_any_broken_file_is_one_line_or_comes_back(tmp_path: Path) -> None:
    def there_and_back(path: Path) -> None:
        profile = aiob.read(path)
        again = "".join(aiob.profile_text(profile))
        path.write_text(again)
        assert aiob.read(path) == profile

    files: Iterator[bytes] = broken(EXAMPLE.read_bytes(), 200, seed=7)
    good, bad = only_config_errors(there_and_back, files, tmp_path / "profile.txt")
    assert good > 10
    assert bad > 60
