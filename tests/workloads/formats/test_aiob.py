"""A real profile comes back byte for byte, and says what AICB takes from it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.workloads.mutations import only_config_errors

from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Gemm, Op, Phase
from stepmark.step.workload import Block, ComputeOp, Run, Stage, Workload
from stepmark.workloads.formats import aiob
from stepmark.workloads.formats.aiob import Part, Profile

from .aicb_samples import DATA, broken
from .hand_made import ADD, op

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


def layer(*ops: ComputeOp, times: int = 1) -> Workload:
    blocks: dict[str, Block] = {"layer": ops, "s": (Run(block="layer", times=times),)}
    return Workload(name="w", rules="hand", blocks=blocks, stages=(Stage(step="s"),))


def written(tmp_path: Path, workload: Workload, samples: aiob.Samples) -> Profile:
    return read(tmp_path, "".join(aiob.write(workload, samples)))


UP, OTHER = Gemm(m=32, n=64, k=16), Gemm(m=32, n=128, k=16)


class TestMeasured:
    """What is written of the samples of operators."""

    def test_a_part_has_the_spread_of_its_samples(self, tmp_path: Path) -> None:
        """Samples above three times the least are in neither max nor avg."""
        up = op(UP, Phase.FWD, "mlp.up", time_s=2e-6)
        profile = written(tmp_path, layer(up, times=5), {UP: [1e-6, 3e-6, 2e-6, 3.1e-6]})
        part = profile.parts["mlp_linear_1"]
        assert (part.min_s, part.avg_s, part.max_s) == pytest.approx((1e-6, 2e-6, 3e-6))
        assert profile.iterations == 4

    def test_only_a_time_is_max_min_and_avg(self, tmp_path: Path) -> None:
        items = [
            op(UP, Phase.FWD, "mlp.up", time_s=2e-6),
            op(ADD, Phase.FWD, "mlp.activation", time_s=5e-6),
        ]
        profile = written(tmp_path, layer(*items), {UP: [1e-6, 2e-6]})
        assert profile.parts["mlp_gelu"] == Part(max_s=5e-6, min_s=5e-6, avg_s=5e-6)
        assert profile.iterations == 2
        assert written(tmp_path, layer(*items), {}).iterations == 1

    def test_the_least_sampled_part_counts(self, tmp_path: Path) -> None:
        items = [
            op(UP, Phase.FWD, "mlp.up", time_s=1e-6),
            op(OTHER, Phase.FWD, "mlp.down", time_s=1e-6),
        ]
        samples: dict[Op, list[float]] = {UP: [1e-6] * 9, OTHER: [1e-6]}
        assert written(tmp_path, layer(*items), samples).iterations == 1

    def test_a_part_of_two_operators_is_their_mean_by_calls(self, tmp_path: Path) -> None:
        items = [
            op(UP, Phase.FWD, "mlp.up", time_s=1e-6),
            op(OTHER, Phase.FWD, "mlp.up", time_s=1e-6),
            op(OTHER, Phase.FWD, "mlp.up", time_s=1e-6),
        ]
        profile = written(tmp_path, layer(*items), {UP: [1e-6, 3e-6], OTHER: [5e-6, 9e-6]})
        part = profile.parts["mlp_linear_1"]
        assert (part.min_s, part.max_s) == pytest.approx((1e-6, 9e-6))
        assert part.avg_s == pytest.approx((2e-6 + 2 * 7e-6) / 3)

    def test_other_passes_do_not_count(self, tmp_path: Path) -> None:
        items = [
            op(UP, Phase.FWD, "mlp.up", time_s=1e-6),
            op(OTHER, Phase.DGRAD, "mlp.up", time_s=9e-6),
            op(UP, Phase.FWD, "mlp.up", time_s=9e-6, recompute=True),
        ]
        samples: dict[Op, list[float]] = {UP: [1e-6], OTHER: [9e-6]}
        (part,) = written(tmp_path, layer(*items), samples).parts.values()
        assert part == Part(max_s=1e-6, min_s=1e-6, avg_s=1e-6)

    @given(st.floats(1e-9, 1.0), st.integers(1, 1000), st.integers(1, 7))
    def test_equal_times_stay_equal(self, time_s: float, times: int, count: int) -> None:
        """Rounding of a mean would else give a profile that is refused."""
        up = op(UP, Phase.FWD, "mlp.up", time_s=time_s)
        text = "".join(aiob.write(layer(up, times=times), {UP: [time_s] * count}))
        values = {line.split()[1] for line in text.splitlines() if "time_gpu" in line}
        assert len(values) == 1

    def test_what_has_no_part_is_refused(self) -> None:
        aiob.check(layer(op(UP, Phase.FWD, "mlp.up")))
        for item in (op(UP, Phase.FWD, "mlp.residual"), op(UP, Phase.DGRAD, "mlp.up")):
            with pytest.raises(ConfigError, match="it has no part"):
                aiob.check(layer(item))


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
