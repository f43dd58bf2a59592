"""What test_run_cases runs on two gloo ranks."""

import time

from tests.measuring.fakes import GOOD, WRONG, NoGuard, context, entries, gemm, impl

from stepmark.cases.plan import OpHow
from stepmark.cases.record import Check, Failed, Measured, Record, Skipped
from stepmark.measuring import run_cases
from stepmark.measuring.ranks import Ranks
from stepmark.operators.bench import IMPLS
from stepmark.operators.bench.bench import OperatorBench


def measure_and_check(ranks: Ranks) -> None:
    second = ranks.rank == 1

    def broken_on_second() -> Check:
        if second:
            raise ValueError("only here")
        return GOOD

    def broken_on_first() -> Check:
        assert not second, "this rank should wait"
        raise ValueError("on the first")

    def slow_on_second() -> None:
        time.sleep(0.004 if second else 0.0005)

    IMPLS["gemm"] = {
        "skips": impl(unsupported=lambda op, caps: "not on rank 1" if second else None),
        "breaks": impl(verify=broken_on_second),
        "wrong": impl(verify=lambda: WRONG if second else GOOD),
        "uneven": impl(run=slow_on_second),
        "good": impl(),
        "breaks on first": impl(verify=broken_on_first),
    }
    names = ("skips", "breaks", "wrong", "uneven", "good")
    records: list[Record] = []
    place = context(ranks)
    bench = OperatorBench(place, OpHow(sample_s=0.1, soak_s=0.02))
    cases = [gemm(name, num_ranks=2) for name in names]
    # The second rank waits for these, which fail and succeed on the first alone.
    cases += [gemm("breaks on first"), gemm("good")]
    run_cases.run(entries(cases), place, {"op": bench}, NoGuard(), records.append)
    if second:
        assert records == [], "only rank 0 passes records on"
    else:
        check(records)


def check(records: list[Record]) -> None:
    skipped, failed, wrong, uneven, good, first_failed, alone = records
    assert isinstance(skipped, Skipped), skipped
    assert skipped.reason == "not on rank 1 (rank 1)", skipped.reason
    assert isinstance(failed, Failed), failed
    assert (failed.message, failed.ranks) == ("only here", (1,)), failed
    assert "ValueError" in failed.traceback
    assert isinstance(wrong, Measured), wrong
    assert [one.num_wrong for one in wrong.checks] == [0, 4]
    assert isinstance(uneven, Measured), uneven
    fast, slow = uneven.samples.seconds
    assert len(fast) == len(slow)
    assert min(slow) > 2 * min(fast), (min(slow), min(fast))
    assert isinstance(good, Measured), good
    assert len(good.telemetry) == 2
    assert isinstance(first_failed, Failed), first_failed
    assert (first_failed.message, first_failed.ranks) == ("on the first", (0,))
    assert isinstance(alone, Measured), alone
    assert len(alone.samples.seconds) == len(alone.telemetry) == 1
