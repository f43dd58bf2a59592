"""Times of computations: a roofline's sums by hand, what a source lacks is named, never 0."""

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.store.writers import new_run
from tests.workloads.formats.hand_made import ADD, QKV, QKV_DGRAD, QKV_WGRAD, op, pipeline

from stepmark.cases.case import OpCase
from stepmark.cases.record import Check, Environment, RunInfo, Samples
from stepmark.cases.record import Measured as Record
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.device import load_devices
from stepmark.model.ops import Copy, Gemm, Norm, Op, Phase
from stepmark.step.roofline import roofline_time
from stepmark.step.workload import CommOp, ComputeOp, Kernel, Stage, Workload
from stepmark.workloads.durations import (
    Fixed,
    Measured,
    Named,
    Own,
    Profile,
    Roofline,
    Source,
    describe,
    fill,
    first_few,
    parse_source,
    untimed,
)
from stepmark.workloads.workload_files import timed

H100 = load_devices()["h100-sxm"]
EXAMPLE = {  # microseconds of aliyun/aicb, workload/aiob_inputs/Example.txt, time_gpu_avg
    "Emb": 799,
    "layernorm": 70,
    "atten_qkv": 889,
    "atten_flash": 512,
    "atten_linear": 349,
    "layernorm2": 71,
    "mlp_linear_1": 1408,
    "mlp_gelu": 257,
    "mlp_linear_2": 742,
    "layernorm_post": 70,
    "logit_time": 12824,
    "param_time": 17374,
}


def profile(**more: float) -> Profile:
    sections = {name: us * 1e-6 for name, us in EXAMPLE.items()} | more
    return Profile(sections=sections)


def alone(*ops: ComputeOp) -> Workload:
    return Workload(name="w", rules="hand", blocks={"s": ops}, stages=(Stage(step="s"),))


def times(workload: Workload, stage: int = 0) -> list[float | None]:
    return [one.time_s for one in workload.expand(stage) if isinstance(one, ComputeOp)]


def total(workload: Workload, stage: int = 0) -> float:
    return math.fsum(one for one in times(workload, stage) if one is not None)


class TestLaws:
    @pytest.mark.parametrize(
        "source", [Fixed(time_s=1e-9), Roofline(device=H100)], ids=["fixed", "roofline"]
    )
    def test_filling_is_repeatable_and_changes_nothing_else(self, source: Source) -> None:
        plain = pipeline()
        once = fill(plain, source)
        assert fill(once, source) == once
        assert fill(plain, source) == once
        for stage in range(2):
            before, after = list(plain.expand(stage)), list(once.expand(stage))
            assert all(
                (one.op, one.module, one.layer, one.microbatch, one.after)
                == (two.op, two.module, two.layer, two.microbatch, two.after)
                if isinstance(one, ComputeOp) and isinstance(two, ComputeOp)
                else one == two
                for one, two in zip(before, after, strict=True)
            )
            assert all(one is not None and one > 0 for one in times(once, stage))

    def test_communication_keeps_no_time(self) -> None:
        filled = fill(pipeline(), Fixed(time_s=1e-9))
        assert {one.time_s for one in filled.expand() if isinstance(one, CommOp)} == {None}

    def test_fixed_times_add_up_to_the_number_of_computations(self) -> None:
        filled = fill(pipeline(microbatches=7, layers=5), Fixed(time_s=1e-9))
        # norm, qkv, core, add forward; core, dgrad, wgrad backward; one optimizer.
        assert total(filled) == pytest.approx((7 * 5 * (4 + 3) + 1) * 1e-9)

    def test_large_products_take_flops_over_peak(self) -> None:
        sizes = [(8192, 8192, 8192), (4096, 28672, 8192), (16384, 1024, 4096)]
        ops = [Gemm(m=m, n=n, k=k) for m, n, k in sizes]
        filled = fill(alone(*(op(one, Phase.FWD, "x") for one in ops)), Roofline(device=H100))
        by_hand = sum(2 * m * n * k for m, n, k in sizes) / 989.4e12
        assert total(filled) == pytest.approx(by_hand, rel=1e-12)

    def test_thin_products_take_bytes_over_bandwidth(self) -> None:
        moved = 2 * (4096 + 4096 * 4096 + 4096)
        thin = roofline_time(Gemm(m=1, n=4096, k=4096), H100)
        assert thin == pytest.approx(moved / 3.35e12, rel=1e-12)

    def test_what_computes_nothing_takes_bytes_over_bandwidth(self) -> None:
        norm = Norm(tokens=4096, hidden=8192)
        moved = 2 * (2 * 4096 * 8192 + 8192)
        assert roofline_time(norm, H100) == pytest.approx(moved / 3.35e12, rel=1e-12)
        assert roofline_time(ADD, H100) == pytest.approx(3 * 32 * 64 * 2 / 3.35e12, rel=1e-12)
        assert roofline_time(Copy(num_bytes=335), H100) == pytest.approx(2 * 335 / 3.35e12)

    @given(
        st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 4096)
    )
    def test_a_larger_product_never_takes_less(self, m: int, n: int, k: int, m2: int) -> None:
        small = roofline_time(Gemm(m=min(m, m2), n=n, k=k), H100)
        large = roofline_time(Gemm(m=max(m, m2), n=n, k=k), H100)
        assert small is not None
        assert large is not None
        assert 0 < small <= large

    def test_narrower_types_are_never_slower(self) -> None:
        found = [
            roofline_time(Gemm(m=512, n=512, k=512, dtype=dtype), H100)
            for dtype in (DType.FP32, DType.TF32, DType.BF16, DType.FP8_E4M3)
        ]
        assert found == sorted(found, key=lambda one: -(one or 0))

    def test_blocks_stay_shared(self) -> None:
        filled = fill(pipeline(microbatches=2048, layers=100), Roofline(device=H100))
        assert sum(len(block) for block in filled.blocks.values()) < 40


class TestSources:
    def test_reads_what_it_is_told(self) -> None:
        assert parse_source("fixed:1ns") == Fixed(time_s=1e-9)
        assert parse_source("fixed: 2.5 us") == Fixed(time_s=2.5e-6)
        assert parse_source("roofline:h100-sxm") == Roofline(device=H100)
        assert parse_source("roofline:NVIDIA H100 80GB HBM3") == Roofline(device=H100)
        assert parse_source(" runs/2026-01-01 ") == Named(text="runs/2026-01-01")
        assert parse_source("aiob.txt") == Named(text="aiob.txt")

    @pytest.mark.parametrize(
        "text",
        ["fixed:", "fixed:1", "fixed:0ns", "fixed:-1ns", "fixed:nan s", "fixed:9999999s", ""],
    )
    def test_refuses_what_is_no_time(self, text: str) -> None:
        with pytest.raises(ConfigError) as caught:
            parse_source(text)
        assert "\n" not in str(caught.value)
        assert "fixed:1ns" in str(caught.value)

    def test_an_unknown_device_lists_known_ones(self) -> None:
        with pytest.raises(
            ConfigError, match=r"h1000.*did you mean h100\? It must be one of h100-sxm"
        ) as caught:
            parse_source("roofline:h1000")
        assert caught.value.field == "compute-from"

    @given(st.text(max_size=30))
    def test_any_text_is_a_source_or_one_error(self, text: str) -> None:
        with suppress(ConfigError):
            assert isinstance(parse_source(text), Fixed | Roofline | Named)


class TestMissing:
    def test_measured_times_go_to_their_shapes(self) -> None:
        measured: dict[Op, float] = {QKV: 1e-6, QKV_DGRAD: 2e-6, QKV_WGRAD: 3e-6}
        ops = [
            op(one, Phase.FWD, "qkv", microbatch=index) for index, one in enumerate(measured)
        ]
        filled = fill(alone(*ops, *ops), Measured(times=measured, name="run 7"))
        assert times(filled) == [1e-6, 2e-6, 3e-6, 1e-6, 2e-6, 3e-6]
        assert filled.notes == ("Compute times: run 7.",)

    def test_the_first_few_missing_are_named_and_all_counted(self) -> None:
        with pytest.raises(ConfigError) as caught:
            fill(pipeline(), Measured(times={QKV: 1e-6}))
        # norm, core twice, add, dgrad, wgrad, optimizer; not once per stage or micro-batch
        assert (
            "without a time are 7: norm tokens=32 hidden=64 dtype=bf16 (attention.norm)"
            in str(caught.value)
        )
        assert str(caught.value).endswith("; and 4 more.")
        assert "\n" not in str(caught.value)

    def test_a_later_source_fills_the_gaps_of_the_first(self) -> None:
        filled = fill(pipeline(), Measured(times={QKV: 1e-3}), Roofline(device=H100))
        assert times(filled)[1] == 1e-3
        assert times(filled)[0] == roofline_time(Norm(tokens=32, hidden=64), H100)
        assert filled.notes[-1] == "Compute times: measured, roofline of NVIDIA H100 80GB HBM3."

    def test_refilling_replaces_the_note(self) -> None:
        filled = fill(fill(pipeline(), Fixed(time_s=1e-9)), Fixed(time_s=2e-9))
        assert filled.notes == ("Compute times: 2 ns each.",)

    def test_no_source_leaves_all_missing(self) -> None:
        with pytest.raises(ConfigError, match="without a time are 8"):
            fill(pipeline())

    def test_unknown_costs_and_peaks_have_no_roofline(self) -> None:
        assert roofline_time(Kernel(name="x", flops=5), H100) is None
        assert roofline_time(Kernel(name="x", bytes_moved=5), H100) is None
        old = load_devices()["a100-40gb-sxm"]
        assert roofline_time(Gemm(m=16, n=16, k=16, dtype=DType.FP8_E4M3), old) is None
        with pytest.raises(ConfigError, match="gemm m=16 n=16 k=16 dtype=fp8_e4m3"):
            fill(
                alone(op(Gemm(m=16, n=16, k=16, dtype=DType.FP8_E4M3), Phase.FWD, "x")),
                Roofline(device=old),
            )

    def test_what_costs_nothing_has_no_time_and_never_0(self) -> None:
        assert roofline_time(Kernel(name="view", flops=0, bytes_moved=0), H100) is None
        with pytest.raises(ConfigError, match="without a time are 1: gemm"):
            fill(alone(op(QKV, Phase.FWD, "mlp.up")), profile(mlp_linear_1=0.0))

    def test_waiting_is_not_timed(self) -> None:
        waits = op(Kernel(name="wait", flops=0, bytes_moved=0), Phase.FWD, "x", time_s=0.0)
        filled = fill(alone(waits, op(QKV, Phase.FWD, "x")), Fixed(time_s=1e-9))
        assert times(filled) == [0.0, 1e-9]

    def test_a_device_without_peaks_times_bytes_alone(self) -> None:
        bare = replace(H100, peak_flops_per_s={})
        assert roofline_time(Kernel(name="x", flops=5, bytes_moved=5), bare) is None
        assert roofline_time(QKV, bare) is None
        assert roofline_time(ADD, bare) == roofline_time(ADD, H100)

    def test_what_stays_without_a_time_is_counted(self) -> None:
        filled = fill(pipeline(), Measured(times={QKV: 1e-6}), partial=True)
        assert times(filled)[:2] == [None, 1e-6]
        missing = untimed(filled)
        assert len(missing) == 7
        assert missing[0] == "norm tokens=32 hidden=64 dtype=bf16 (attention.norm)"
        assert first_few(missing).endswith("; and 4 more")
        assert first_few(missing[:3]) == "; ".join(missing[:3])
        assert untimed(fill(filled, Fixed(time_s=1.0))) == []

    def test_times_of_the_file_stay_where_its_place_among_the_sources_is(self) -> None:
        own = alone(op(QKV, Phase.FWD, "x", time_s=1e-3), op(ADD, Phase.FWD, "y"))
        assert times(fill(own, Own(), Fixed(time_s=2e-3))) == [1e-3, 2e-3]
        assert times(fill(own, Fixed(time_s=2e-3), Own())) == [2e-3, 2e-3]
        assert times(fill(own, Measured(times={}), Own(), partial=True)) == [1e-3, None]
        assert times(fill(own, Measured(times={}), partial=True)) == [None, None]

    def test_one_operator_may_have_several_times_in_a_file(self) -> None:
        own = alone(*(op(QKV, Phase.FWD, "x", time_s=time_s) for time_s in (1e-3, 2e-3)))
        assert times(fill(own, Own())) == [1e-3, 2e-3]

    def test_the_note_names_what_gave_a_time_and_keeps_that_of_times_that_stay(self) -> None:
        once = fill(alone(op(QKV, Phase.FWD, "x"), op(ADD, Phase.FWD, "y")), Fixed(time_s=1.0))
        partly = fill(once, Measured(times={QKV: 1e-6}, name="run 7"), Own())
        assert partly.notes == (
            "Compute times: 1 s each.",
            "Compute times: run 7, the file's own.",
        )
        whole = fill(partly, Fixed(time_s=2e-9), Own())
        assert whole.notes == ("Compute times: 2 ns each.",)
        assert fill(alone(op(ADD, Phase.FWD, "y")), Own(), partial=True).notes == ()

    def test_shapes_are_described_by_what_is_not_a_default(self) -> None:
        assert describe(QKV) == "gemm m=32 n=96 k=64 dtype=bf16"
        assert describe(QKV_WGRAD) == "gemm m=96 n=64 k=32 dtype=bf16 layout=tn"
        assert describe(Kernel(name="add")) == "kernel name=add"


class TestProfile:
    def test_sums_of_a_layer_are_those_of_aicb(self) -> None:
        """1,820 us of attention and 2,478 us of MLP in AICB's own example, backward twice."""
        modules = {
            "attention": ("attention.norm", "attention.qkv", "attention.core", "attention.out"),
            "mlp": ("mlp.norm", "mlp.up", "mlp.activation", "mlp.down"),
        }
        for part, expected in (("attention", 1820e-6), ("mlp", 2478e-6)):
            fwd = [op(QKV, Phase.FWD, name) for name in modules[part]]
            both = [
                op(QKV, phase, name)
                for name in modules[part]
                for phase in (Phase.DGRAD, Phase.WGRAD)
            ]
            joint = [op(QKV, Phase.BWD, name) for name in modules[part]]
            assert total(fill(alone(*fwd), profile())) == pytest.approx(expected)
            assert total(fill(alone(*both), profile())) == pytest.approx(2 * expected)
            assert total(fill(alone(*joint), profile())) == pytest.approx(2 * expected)

    def test_unfused_attention_is_the_sum_of_its_sections(self) -> None:
        sections = {
            "atten_core_qk": 1e-6,
            "atten_core_softmax": 2e-6,
            "atten_core_contex": 4e-6,
        }
        core = alone(op(QKV, Phase.FWD, "attention.core"))
        assert total(fill(core, Profile(sections=sections))) == pytest.approx(7e-6)
        del sections["atten_core_softmax"]
        with pytest.raises(ConfigError, match=r"attention\.core"):
            fill(core, Profile(sections=sections))

    def test_what_aiob_does_not_time_is_missing(self) -> None:
        with pytest.raises(ConfigError, match=r"attention\.residual"):
            fill(alone(op(ADD, Phase.FWD, "attention.residual")), profile())
        with pytest.raises(ConfigError, match="without a time are 1"):
            fill(alone(op(QKV, Phase.OPTIM, "attention.qkv")), profile())

    def test_one_section_is_not_shared_by_two_shapes(self) -> None:
        two = alone(op(QKV, Phase.FWD, "mlp.up"), op(QKV_DGRAD, Phase.FWD, "mlp.up"))
        with pytest.raises(ConfigError, match="without a time are 2"):
            fill(two, profile())


RUN = "20261121-050000-ef56"
UNKNOWN = Environment(
    **dict.fromkeys(("host", "os", "kernel", "cpu", "python", "torch", "git_commit"), "x"),
    **dict.fromkeys(("num_cores", "memory_bytes"), 1),
    versions={},
    devices=(),
    stepmark="0",
    variables={},
)


def record(
    what: Op, *ranks: tuple[float, ...], backend: str = "torch", wrong: int = 0
) -> Record:
    checks = (
        Check(max_rel_err=0, tolerance=1, num_wrong=wrong, num_compared=9, reference="x"),
    )
    return Record(
        run_id=RUN,
        case=OpCase(op=what, backend=backend, num_ranks=len(ranks)),
        samples=Samples(seconds=ranks, method="graph-rotate/1"),
        checks=checks,
        telemetry=(),
        backend_run=backend,
        peak_memory_bytes=None,
        started_at=0.0,
    )


def run(root: Path, *records: Record) -> str:
    info = RunInfo(
        run_id=RUN,
        created_at="2026-11-21T05:00:00+00:00",
        command="stepmark op gemm",
        environment=UNKNOWN,
        num_cases=len(records),
    )
    with new_run(root, info) as writer:
        for one in records:
            writer.append(one)
    return str(root / RUN)


class TestRun:
    """--compute-from of what `stepmark op` measured."""

    def test_the_median_of_the_slowest_rank(self, tmp_path: Path) -> None:
        found = run(tmp_path, record(QKV, (1e-3, 3e-3, 2e-3), (2e-3, 1e-3, 2e-3)))
        filled = timed(alone(op(QKV, Phase.FWD, "x")), found)
        assert times(filled) == [2e-3]
        assert filled.notes == (f"Compute times: run {RUN}.",)

    def test_the_fastest_backend_whose_results_are_right(self, tmp_path: Path) -> None:
        found = run(
            tmp_path,
            record(QKV, (4e-3,)),
            record(QKV, (3e-3,), backend="triton"),
            record(QKV, (1e-3,), backend="wrong", wrong=1),
        )
        assert times(timed(alone(op(QKV, Phase.FWD, "x")), found)) == [3e-3]

    def test_shapes_that_were_not_run_are_named(self, tmp_path: Path) -> None:
        found = run(tmp_path, record(QKV, (1e-3,)), record(QKV_WGRAD, (1e-3,)))
        with pytest.raises(ConfigError, match="without a time are 6: norm tokens=32") as caught:
            timed(pipeline(), found)
        assert f"run {RUN}" in str(caught.value)
        assert times(timed(pipeline(), f"{found}, fixed:1ns"))[:2] == [1e-9, 1e-3]

    def test_a_profile_in_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "aiob.txt"
        path.write_text(
            "train_iter:2\natten_qkv:\n    time_gpu_max: 9\n    time_gpu_min: 7\n"
            "    time_gpu_avg: 8\n"
        )
        filled = timed(alone(op(QKV, Phase.FWD, "attention.qkv")), str(path))
        assert times(filled) == [pytest.approx(8e-6)]
        assert filled.notes == ("Compute times: AIOB profile aiob.txt.",)

    def test_what_is_neither_is_one_error(self) -> None:
        with pytest.raises(ConfigError, match="no such run"):
            timed(pipeline(), "no such run")
