"""Tables of measured operations, and two traces side by side."""

from collections import Counter

import pytest

from stepmark.step.trace_ops import OpKey
from stepmark.traces import trace_comparison, trace_kernels_text
from stepmark.traces.trace_comparison import Launches
from stepmark.traces.trace_kernels_text import Label, Ranks, RankSums, Sum, label_of

KEY = OpKey("mlp.up", "blocks.3.ffn.up", 3, "fwd", False, "compute", "aten::mm", "nvjet_x")


def rank(**times: list[int]) -> RankSums:
    """Return sums by operation: ns of each step."""
    count = max(map(len, times.values()))
    sums: dict[Label, Sum] = {
        (name,): Sum(
            time_ns=sum(values),
            calls=len(values),
            kernels=len(values),
            shortest_ns=min(values),
            longest_ns=max(values),
            by_step_ns=Counter(dict(enumerate(values))),
        )
        for name, values in times.items()
    }
    return RankSums(
        sums=sums,
        steps=tuple(range(count)),
        step_ns=(1000,) * count,
        is_host=False,
        is_marked=True,
        outside_ns=0,
    )


def launches(**times: list[int]) -> list[Ranks]:
    """Return a launch of one step for each value."""
    count = max(map(len, times.values()))
    return [
        [(0, rank(**{name: [values[launch]] for name, values in times.items()}))]
        for launch in range(count)
    ]


def by_name(a: Launches, b: Launches) -> dict[object, dict[str, object]]:
    return {row["op"]: row for row in trace_comparison.rows(a, b, "op")}


@pytest.mark.parametrize(
    ("by", "label"),
    [
        ("role", ("mlp.up", "fwd", "compute")),
        ("layer", ("3", "compute")),
        ("module", ("blocks.3.ffn.up", "fwd", "compute")),
        ("op", ("aten::mm",)),
        ("group", ("matrix products",)),
        ("name", ("nvjet_x",)),
    ],
)
def test_labels(by: str, label: Label) -> None:
    assert label_of(KEY, by) == label
    unknown = OpKey("", "", None, "", False, "compute", "", "x")
    first = label_of(unknown, by)[0]
    assert first == {"group": "other", "name": "x"}.get(by, "unattributed")
    assert label_of(KEY._replace(is_recomputed=True), "role")[1] == "re-fwd"
    assert label_of(KEY._replace(layer=None), "layer")[0] == "outside blocks"


def test_rows_add_up_and_ranks_differ() -> None:
    ranks = [(0, rank(mm=[5, 7], add=[1, 1])), (3, rank(mm=[8, 8]))]
    rows = trace_kernels_text.rows(ranks, "op")
    assert [row["op"] for row in rows] == ["mm", "add"]
    assert [row["total_ns"] for row in rows] == [28, 2]
    assert rows[0] | {"time_per_step_ns": 7.0, "mean_ns": 7.0, "shortest_ns": 5} == rows[0]
    assert (rows[0]["slowest_rank"], rows[0]["slowest_rank_ns"]) == (3, 8)
    assert (rows[1]["slowest_rank"], rows[1]["fastest_rank_ns"]) == (0, 0)
    assert sum(float(str(row["share_pct"])) for row in rows) == pytest.approx(100)


def test_steps_of_one_launch_give_no_verdict() -> None:
    """Steps that repeat to a thousandth do not tell how launches differ."""
    a = [[(0, rank(mm=[1000, 1001, 999] * 8))]]
    b = [[(0, rank(mm=[660, 661, 659] * 8))]]
    row = by_name(a, b)["mm"]
    assert (row["verdict"], row["reason"]) == ("cannot tell", "one launch")
    assert (row["low"], row["high"]) == (None, None)
    assert (
        "cannot" not in trace_comparison.lines([row], {}, "op")[1]
    )  # as the first line has it
    first, second = trace_comparison.headline([row])
    assert "cannot tell (one launch)" in first
    assert "A1,A2,A3 B1,B2,B3" in second
    assert by_name([*a, *a], b)["mm"]["reason"] == "one launch"


def test_a_comparison_adds_up_and_judges() -> None:
    a = launches(mm=[1000, 1010, 990, 1000], add=[50] * 4, old=[3] * 4)
    b = launches(mm=[500, 505, 495, 500], add=[50] * 4, new=[4, 0, 4, 4])
    rows = by_name(a, b)
    assert list(rows) == ["mm", "old", "new", "add"]
    assert rows["mm"]["verdict"] == "faster"
    assert rows["mm"]["time_ratio"] == pytest.approx(0.5)
    assert 0.4 < float(str(rows["mm"]["low"])) < 0.5 < float(str(rows["mm"]["high"])) < 0.6
    assert (rows["add"]["verdict"], rows["add"]["reason"]) == (
        "cannot tell",
        "identical values",
    )
    assert [rows[name]["only_in"] for name in ("old", "new", "mm")] == ["a", "b", ""]
    total = trace_comparison.total(a, b)
    differences = [float(str(row["difference_ns"])) for row in rows.values()]
    assert total["difference_ns"] == sum(differences) == -500 - 3 + 3
    assert total["verdict"] == "faster"
    text = trace_comparison.lines(list(rows.values()), total, "op")
    assert "only in A" in text[2]
    assert text[-1].endswith("sum")
    b = launches(mm=[500, 505])
    (row,) = trace_comparison.rows(a, b, "op")[:1]
    row |= {"b_calls": 10352.0}
    assert "(1 calls, then 10352)" in trace_comparison.lines([row], total, "op")[1]


def test_work_that_a_launch_lacks_has_no_verdict() -> None:
    a = launches(mm=[500, 500], x=[1, 1])
    row = by_name(a, launches(mm=[1000, 0], x=[1, 1]))["mm"]
    assert (row["verdict"], row["low"]) == ("cannot tell", None)
    assert row["reason"] == "not in every launch"


def test_a_launch_is_the_mean_of_its_ranks_and_steps() -> None:
    a: Launches = [
        [(0, rank(mm=[100, 102, 98])), (1, rank(mm=[100, 102]))],
        [(0, rank(mm=[101]))],
    ]
    b = launches(mm=[100, 102])
    row = by_name(a, b)["mm"]
    assert row["time_ratio"] == pytest.approx(101 / (603 / 6))
    low, high = (float(str(row[name])) for name in ("low", "high"))
    assert low * high == pytest.approx(100 * 102 / (100.4 * 101))  # geometric means of launches
    assert row["verdict"] == "cannot tell"


def test_pairs_of_kernels_are_joined_without_sizes() -> None:
    """Functors, types and lambdas are what a kernel computes; two candidates are no pair."""
    reduce = "void at::native::reduce_kernel<{}, 1, at::ReduceOp<float, {}> >(at::R<float>)"
    index = "void (anonymous namespace)::{}<int, {}>(int)"
    pairs = [
        (reduce.format(128, "MeanOps"), reduce.format(512, "MeanOps")),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_TNT", "nvjet_hsh_256x128_64x4_2x1_v_bz_TNT"),
        ("triton_poi_fused_add_3", "triton_poi_fused_add_11"),
    ]
    alone = [
        (reduce.format(128, "MaxOps"), reduce.format(128, "SumOps")),
        (index.format("gather", 4), index.format("scatter", 4)),
        ("k<4, lambda(int)#1>", "k<4, lambda(int)#2>"),
        ("gemm_bf16_64x64", "gemm_fp8_64x64"),
        ("two_1x1", "two_2x2"),
    ]
    a = [[(0, rank(**{name: [5, 5] for name, _ in pairs + alone}, same_7=[1, 1]))]]
    own = {name: [6, 6] for _, name in pairs + alone}
    b = [[(0, rank(**own, two_3x3=[6, 6], same_7=[1, 1]))]]
    rows = {str(row["name"]): row for row in trace_comparison.rows(a, b, "name")}
    assert {name for name, row in rows.items() if not row["only_in"]} == {
        "at::native::reduce_kernel<*, *, at::ReduceOp<float, MeanOps> >(at::R<float>)",
        *("nvjet_hsh_*_bz_TNT", "triton_poi_fused_add_*", "same_7"),
    }
    assert {name for name, row in rows.items() if row["only_in"] == "a"} == {
        x for x, _ in alone
    }
    assert sum(float(str(row["a_ns"])) for row in rows.values()) == 5 * 8 + 1


def test_rows_are_judged_as_a_table() -> None:
    """One row in forty whose launches differ by chance is no finding; one that moved is."""
    base = {f"op{n}": [100 + n, 101 + n, 99 + n] for n in range(40)}
    chance = base | {"op7": [109, 110, 108]}
    moved = base | {"op7": [147, 148, 146]}
    a, by_chance, b = (launches(**times) for times in (base, chance, moved))

    def verdicts(other: Launches) -> set[str]:
        rows = trace_comparison.rows(a, other, "op")
        return {str(row["verdict"]) for row in rows if row["op"] == "op7"}

    assert verdicts(by_chance) == {"cannot tell"}
    assert verdicts(b) == {"slower"}
    (note, *_) = trace_comparison.remarks(a, b, trace_comparison.rows(a, b, "op"))
    assert "0.8% are wrong on average" in note
