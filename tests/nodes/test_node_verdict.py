"""Verdicts on synthetic fleets of which the truth is known."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import pytest

from stepmark.model.collectives import ordered_pairs
from stepmark.nodes.node_check import Fact, Figure, NodeCheck, Remark, merged
from stepmark.nodes.node_verdict import FleetVerdict, Outcome, judge, judge_figures

HEALTHY, SLOW, FAILED = Outcome.HEALTHY, Outcome.SLOW, Outcome.FAILED
CANNOT_TELL = Outcome.CANNOT_TELL
FLOOR, PEAK = 0.05, 1000e12
Speeds = dict[tuple[int, int], float]  # of (host, device); others have 1


def name(host: int) -> str:
    return f"n{host:03}"


def fleet(
    num_hosts: int,
    num_devices: int,
    speeds: Speeds | None = None,
    *,
    noise: float = 0.004,
    launches: int = 5,
    base: float = 700e12,
) -> list[NodeCheck]:
    """Hosts whose devices all run at `base`, but for `speeds`, with noise of launches."""
    draw = random.Random(f"{num_hosts} {num_devices} {noise}")
    return [
        NodeCheck(
            host=name(host),
            checked_at="2026-01-01T00:00:00+00:00",
            num_devices=num_devices,
            figures=tuple(
                Figure(
                    name="gemm 8192x8192x8192 bf16",
                    unit="FLOP/s",
                    values=tuple(
                        base * (speeds or {}).get((host, device), 1.0) * draw.gauss(1, noise)
                        for _ in range(launches)
                    ),
                    where=(f"{name(host)}/{device}",),
                    device="card",
                    peak=PEAK,
                )
                for device in range(num_devices)
            ),
        )
        for host in range(num_hosts)
    ]


def outcomes(verdict: FleetVerdict) -> dict[str, Outcome]:
    """The hosts that are not healthy."""
    return {node.host: node.outcome for node in verdict.nodes if node.outcome is not HEALTHY}


def test_equal_devices_are_healthy() -> None:
    assert outcomes(judge(fleet(1, 8), floor=FLOOR)) == {}
    assert outcomes(judge(fleet(16, 8), floor=FLOOR)) == {}


def test_a_slow_device_among_eight_is_named_and_the_others_are_healthy() -> None:
    verdict = judge(fleet(1, 8, {(0, 3): 0.85}), floor=FLOOR)
    bad = [f.figure.where for f in verdict.figures if f.outcome is not HEALTHY]
    assert bad == [("n000/3",)]
    assert outcomes(verdict) == {"n000": SLOW}
    assert verdict.failing_hosts == ("n000",)
    (reason,) = verdict.nodes[0].reasons
    assert reason.startswith("n000/3: gemm")
    assert "of the others' median" in reason


@pytest.mark.parametrize("num_hosts", [3, 5, 15, 16])
def test_a_slow_node_is_named_among_any_number(num_hosts: int) -> None:
    slow = {(1, device): 0.9 for device in range(8)}
    assert outcomes(judge(fleet(num_hosts, 8, slow), floor=FLOOR)) == {"n001": SLOW}


def test_several_slow_nodes_do_not_hide_each_other() -> None:
    slow = {(host, 0): 0.8 for host in (1, 4, 9, 11, 12)}
    verdict = judge(fleet(16, 1, slow), floor=FLOOR)
    assert verdict.failing_hosts == tuple(name(host) for host, _ in slow)
    assert set(outcomes(verdict).values()) == {SLOW}


def test_an_erratic_node_does_not_hide_the_others() -> None:
    checks = fleet(8, 1)
    wild = fleet(8, 1, {(7, 0): 0.9}, noise=0.3)[7]
    verdict = judge([*checks[:7], wild], floor=FLOOR)
    assert outcomes(verdict).keys() <= {"n007"}
    assert outcomes(verdict)["n007"] is not HEALTHY


def test_of_two_nodes_the_slower_is_slow_and_what_both_share_is_unknown() -> None:
    verdict = judge(fleet(2, 1, {(1, 0): 0.7}), floor=FLOOR)
    assert outcomes(verdict) == {"n001": SLOW}
    assert verdict.failing_hosts == ("n001",)
    (reason,) = verdict.nodes[1].reasons
    assert reason.startswith("n001/0: gemm 8192x8192x8192 bf16: 0.70")
    assert reason.endswith(" of n000/0")
    (unknown,) = verdict.unknown
    assert "whether both are slow" in unknown
    assert "of the peak (card)" in verdict.medians[0]


def test_devices_that_are_slow_alike_are_unknown() -> None:
    """Only where the usual share is known, and only those below it."""
    h100 = "NVIDIA H100 80GB HBM3"
    for base, device, speeds, expected in (
        (460e12, h100, {}, dict.fromkeys(map(name, range(4)), CANNOT_TELL)),
        (460e12, "card", {}, {}),
        (690e12, h100, {}, {}),
        (460e12, h100, {(0, 0): 1.5}, dict.fromkeys(map(name, range(1, 4)), CANNOT_TELL)),
    ):
        checks = [
            replace(one, figures=tuple(replace(f, device=device) for f in one.figures))
            for one in fleet(4, 1, speeds, base=base)
        ]
        verdict = judge(checks, floor=FLOOR)
        assert outcomes(verdict) == expected
        assert len(verdict.medians) == 1
    assert "46% of the peak" in verdict.medians[0]
    assert "usual from 68% on, in doubt below 61%" in verdict.medians[0]
    assert "the median of gemm" in verdict.nodes[1].reasons[0]


def test_two_nodes_that_agree_are_healthy_but_not_known_to_be_fast() -> None:
    verdict = judge(fleet(2, 1), floor=FLOOR)
    assert outcomes(verdict) == {}
    assert len(verdict.unknown) == 1
    assert judge(fleet(3, 1), floor=FLOOR).unknown == ()


def test_two_nodes_whose_launches_differ_cannot_be_told_apart() -> None:
    verdict = judge(fleet(2, 1, noise=0.1), floor=FLOOR)
    assert outcomes(verdict) == {"n000": CANNOT_TELL, "n001": CANNOT_TELL}
    assert all("of n00" in reason for node in verdict.nodes for reason in node.reasons)


@pytest.mark.parametrize(
    ("peak", "back", "outcome", "text"),
    [
        (1.2, 1.0, HEALTHY, ""),
        (10.0, 1.0, CANNOT_TELL, "10% of the link's rate, and two directions may both be slow"),
        (None, 1.0, CANNOT_TELL, "the link's rate is unknown"),
        (1.2, 0.6, CANNOT_TELL, "slow; which end is the cause is not known: b-a"),
    ],
)
def test_the_two_directions_between_two_nodes(
    peak: float | None, back: float, outcome: Outcome, text: str
) -> None:
    checks = pairs(["a", "b"], lambda source, _: 1.0 if source == "a" else back)
    with_peak = tuple(replace(figure, peak=peak) for figure in checks[0].figures)
    verdict = judge([replace(checks[0], figures=with_peak), checks[1]], floor=FLOOR)
    assert {node.outcome for node in verdict.nodes} == {outcome}
    assert all(text in " ".join(node.reasons) for node in verdict.nodes)
    assert ["which end is slow" in line for line in verdict.unknown] == [True]


def test_one_other_among_several_pairs_is_too_few() -> None:
    checks = pairs(["a", "b", "c", "d"], lambda *_: 1.0)
    some = {("a", "b"), ("b", "c"), ("c", "d")}
    figures = [figure for figure in checks[0].figures if figure.where in some]
    verdicts = list(judge_figures(figures, FLOOR))
    assert {verdict.reason for verdict in verdicts} == {"too few others to compare with"}
    assert {verdict.other for verdict in verdicts} == {""}


def test_properties_that_differ_are_named_with_the_rarest_first() -> None:
    def check(host: str, width: str) -> NodeCheck:
        facts = (
            Fact(where=f"{host}/0", name="GPU", value="card"),
            Fact(where=f"{host}/0", name="PCIe", value=width),
        )
        return NodeCheck(host=host, checked_at="", facts=facts)

    checks = [check("a", "x16"), check("b", "x8"), check("c", "x16")]
    assert judge(checks, floor=FLOOR).differences == ("PCIe: x8 (b/0); x16 (a/0, c/0)",)


def test_two_nodes_of_which_one_is_below_the_data_sheets_limit() -> None:
    verdict = judge(fleet(2, 1, {(1, 0): 0.5}), floor=FLOOR)
    assert outcomes(verdict) == {"n001": FAILED}
    assert verdict.unknown == ()  # the other is above the limit


def test_a_whole_fleet_below_the_data_sheets_limit_fails() -> None:
    verdict = judge(fleet(8, 1, base=0.39 * PEAK), floor=FLOOR)
    assert set(outcomes(verdict).values()) == {FAILED}
    assert len(verdict.failing_hosts) == 8


@pytest.mark.parametrize(("launches", "noise"), [(1, 0.004), (5, 0.2), (2, 0.05)])
def test_too_little_data_is_never_healthy(launches: int, noise: float) -> None:
    verdict = judge(fleet(8, 1, launches=launches, noise=noise), floor=FLOOR)
    assert set(outcomes(verdict).values()) == {CANNOT_TELL}
    assert len(outcomes(verdict)) >= 7


@pytest.mark.parametrize("launches", [2, 3])
def test_an_interval_without_meaning_is_named_by_its_cause(launches: int) -> None:
    """Two launches that differ give one of 0.000 to 467454934.395."""
    for figure in judge(fleet(3, 1, launches=launches, noise=0.3), floor=FLOOR).figures:
        assert figure.reason == f"too few launches ({launches})"
        assert figure.low is not None, "the figures are in --csv and --json"
    (figure, *_) = judge(fleet(3, 1, launches=2), floor=FLOOR).figures
    assert figure.reason == "0.573 to 1.762 of the others' median"


def test_identical_values_prove_nothing() -> None:
    """As in comparisons: a rate that never varies was not measured."""
    assert set(outcomes(judge(fleet(8, 1, noise=0), floor=FLOOR)).values()) == {CANNOT_TELL}


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_a_value_that_is_no_rate_cannot_tell_and_is_nobodys_reference(value: float) -> None:
    checks = fleet(8, 1, {(3, 0): value})
    assert outcomes(judge(checks, floor=FLOOR)) == {"n003": CANNOT_TELL}


def test_one_launch_that_is_no_rate() -> None:
    figure = Figure(
        name="copy", unit="B/s", values=(1.0, math.nan), where=("a/0",), device="card"
    )
    check = NodeCheck(host="a", checked_at="", figures=(figure,))
    assert outcomes(judge([check], floor=FLOOR)) == {"a": CANNOT_TELL}


def test_a_fleet_of_noisy_equal_nodes_has_no_false_alarm() -> None:
    for noise in (0.01, 0.03):
        verdict = judge(fleet(250, 8, noise=noise), floor=FLOOR)
        assert verdict.failing_hosts == ()


def test_devices_of_a_host_share_what_is_known_of_their_variance() -> None:
    """Each alone with its five launches, 52 % of devices would be known to be healthy."""
    outcomes = [
        figure.outcome
        for number in range(50)
        for figure in judge(fleet(1, 8, noise=0.03 + number * 1e-6), floor=FLOOR).figures
    ]
    assert SLOW not in outcomes
    assert outcomes.count(HEALTHY) > 0.7 * len(outcomes)


def test_a_device_at_the_floor_is_rarely_slow() -> None:
    slow = [
        figure.outcome
        for number in range(300)
        for figure in judge(
            fleet(1, 8, {(0, 1): 1 - FLOOR}, noise=0.03 + number * 1e-6), floor=FLOOR
        ).figures
    ].count(SLOW)
    assert slow <= 4  # of 300: one in 200 is the limit


def test_a_device_with_a_rare_state_is_not_certainly_within_the_floor() -> None:
    """One launch in five is 4 % slower: five launches seldom show how often."""
    draw = random.Random(1)
    healthy = 0
    for _ in range(100):
        (check,) = fleet(1, 8, noise=0)
        figures = [
            replace(
                figure,
                values=tuple(
                    value * draw.gauss(1, 0.004) * (0.96 if draw.random() < 0.2 else 1)
                    for value in figure.values
                ),
            )
            for figure in check.figures
        ]
        mean = (1 - FLOOR) / (1 - 0.2 * 0.04)
        slow = replace(figures[1], values=tuple(mean * value for value in figures[1].values))
        verdicts = list(judge_figures([figures[0], slow, *figures[2:]], FLOOR))
        healthy += verdicts[1].outcome is HEALTHY
    assert healthy <= 1  # 14 of them by the spread of the launches alone


def test_what_all_devices_of_a_host_have_in_common_hides_no_verdict() -> None:
    """They are measured in the same launches, of which one may be slow for all."""
    (check,) = fleet(1, 8, {(0, 3): 0.85}, noise=0.002)
    drift = (1.0, 0.9, 1.0, 0.95, 0.9)
    figures = tuple(
        replace(f, values=tuple(v * d for v, d in zip(f.values, drift, strict=True)))
        for f in check.figures
    )
    verdict = judge([replace(check, figures=figures)], floor=FLOOR)
    assert [f.outcome for f in verdict.figures].count(HEALTHY) == 7
    assert outcomes(verdict) == {"n000": SLOW}


def test_a_rate_that_never_varies_is_not_healthy_among_others() -> None:
    (check,) = fleet(1, 8)
    first, *others = check.figures
    fixed = replace(first, values=(700e12,) * 5)
    verdict = next(iter(judge_figures([fixed, *others], FLOOR)))
    assert (verdict.outcome, verdict.reason) == (CANNOT_TELL, "equal values")


def test_the_floor_is_what_the_user_says() -> None:
    checks = fleet(16, 1, {(2, 0): 0.9}, noise=0.002)
    assert outcomes(judge(checks, floor=0.2)) == {}
    assert outcomes(judge(checks, floor=0.03)) == {"n002": SLOW}


def test_devices_of_another_kind_are_not_compared() -> None:
    other = [
        NodeCheck(
            host=f"b{check.host}",
            checked_at="",
            figures=tuple(
                Figure(
                    name=f.name,
                    unit=f.unit,
                    values=tuple(v / 2 for v in f.values),
                    where=tuple(f"b{place}" for place in f.where),
                    device="half a card",
                )
                for f in check.figures
            ),
        )
        for check in fleet(4, 1)
    ]
    assert outcomes(judge([*fleet(4, 1), *other], floor=FLOOR)) == {}


def test_an_expected_host_without_a_result_fails() -> None:
    expected = [name(host) for host in range(5)]
    verdict = judge(fleet(4, 1), floor=FLOOR, expected=expected)
    assert outcomes(verdict) == {"n004": FAILED}
    assert verdict.failing_hosts == ("n004",)


def test_a_host_with_another_number_of_gpus_fails() -> None:
    checks = [*fleet(3, 8)[:2], fleet(3, 7)[2]]
    assert outcomes(judge(checks, floor=FLOOR, gpus_per_node=8)) == {"n002": FAILED}


def test_failures_precede_what_is_not_clear() -> None:
    (check,) = fleet(1, 8)
    remark = Remark(where="n000/1", text="stuck")
    unclear = NodeCheck(host="", checked_at="", unclear=(remark,))
    assert outcomes(judge([merged(check, [unclear])], floor=FLOOR)) == {"n000": CANNOT_TELL}
    failed = NodeCheck(host="", checked_at="", failures=(remark,))
    verdict = judge([merged(check, [unclear, failed])], floor=FLOOR)
    assert outcomes(verdict) == {"n000": FAILED}
    assert verdict.nodes[0].reasons[0] == "n000/1: stuck"


def test_a_host_without_any_figure_is_not_healthy() -> None:
    assert outcomes(judge([NodeCheck(host="a", checked_at="")], floor=FLOOR)) == {
        "a": CANNOT_TELL
    }


def pairs(places: list[str], speed: Callable[[str, str], float]) -> list[NodeCheck]:
    """A check that has every ordered pair."""
    draw = random.Random(0)
    figures = tuple(
        Figure(
            name="p2p 64 MiB",
            unit="B/s",
            values=tuple(speed(*pair) * draw.gauss(1, 0.003) for _ in range(5)),
            where=pair,
            device="card",
        )
        for pair in permutations(places, 2)
    )
    hosts = dict.fromkeys(place.partition("/")[0] for place in places)
    first, *others = (NodeCheck(host=host, checked_at="") for host in hosts)
    return [merged(first, [NodeCheck(host="", checked_at="", figures=figures)]), *others]


PLACES = ["a/0", "b/0", "c/0", "d/0", "e/0"]


def test_a_host_is_slow_if_all_its_pairs_are() -> None:
    checks = pairs(PLACES, lambda a, b: 0.5 if "c/0" in (a, b) else 1.0)
    assert outcomes(judge(checks, floor=FLOOR)) == {"c": SLOW}


def test_two_slow_ends_are_both_named() -> None:
    bad = {"b/0", "c/0"}
    checks = pairs([*PLACES, "f/0", "g/0"], lambda a, b: 0.5 if bad & {a, b} else 1.0)
    assert outcomes(judge(checks, floor=FLOOR)) == {"b": SLOW, "c": SLOW}


def test_one_slow_pair_does_not_tell_which_end_is_the_cause() -> None:
    checks = pairs(PLACES, lambda a, b: 0.5 if {a, b} == {"a/0", "b/0"} else 1.0)
    verdict = judge(checks, floor=FLOOR)
    assert outcomes(verdict) == {"a": CANNOT_TELL, "b": CANNOT_TELL}
    assert "which end is the cause is not known" in verdict.nodes[0].reasons[0]


def test_pairs_of_two_or_three_places_have_no_others() -> None:
    for count in (2, 3):
        verdict = judge(pairs(PLACES[:count], lambda a, b: 1.0), floor=FLOOR)
        assert set(outcomes(verdict).values()) == {CANNOT_TELL}


def ring(num_hosts: int, speed: Callable[[str, str], float]) -> FleetVerdict:
    """The verdict where each host sends to two others, as from 21 hosts on."""
    hosts = [f"n{number:02}" for number in range(1, num_hosts + 1)]
    sent = {(hosts[a], hosts[b]) for a, b in ordered_pairs(num_hosts, 2)}
    (first, *others) = pairs(hosts, speed)
    sent_figures = tuple(figure for figure in first.figures if figure.where in sent)
    return judge([replace(first, figures=sent_figures), *others], floor=FLOOR)


@pytest.mark.parametrize("num_hosts", [4, 8, 32])
@pytest.mark.parametrize("end", [0, 1])
def test_a_host_that_is_slow_in_one_direction_is_named(num_hosts: int, end: int) -> None:
    def speed(*ends: str) -> float:
        return 0.6 if ends[end] == "n03" else 1.0

    hosts = [f"n{number:02}" for number in range(1, num_hosts + 1)]
    count = num_hosts - 1
    verdict = judge(pairs(hosts, speed), floor=FLOOR)
    if num_hosts == 32:
        verdict = ring(num_hosts, speed)
        count = 2
    assert outcomes(verdict) == {"n03": SLOW}
    direction = ("out of", "into")[end]
    assert verdict.nodes[2].reasons == (
        f"n03: p2p 64 MiB: all {count} pairs {direction} it are slow",
    )
    assert verdict.slow_links == ()


def test_a_host_that_is_slow_in_one_direction_and_has_a_slow_link() -> None:
    slow = {("n03", "n05")}
    hosts = [f"n{number:02}" for number in range(1, 9)]
    checks = pairs(hosts, lambda a, b: 0.6 if b == "n03" or (a, b) in slow else 1.0)
    verdict = judge(checks, floor=FLOOR)
    assert outcomes(verdict) == {"n03": SLOW, "n05": CANNOT_TELL}
    assert verdict.slow_links == (("n03", "n05"),)


def test_a_slow_link_is_listed_and_both_its_ends_are_suspects() -> None:
    verdict = ring(32, lambda a, b: 0.6 if (a, b) == ("n07", "n08") else 1.0)
    assert outcomes(verdict) == {"n07": CANNOT_TELL, "n08": CANNOT_TELL}
    assert verdict.slow_links == (("n07", "n08"),)
    assert verdict.failing_hosts == ()


def test_a_slow_sender_and_a_slow_receiver_of_one_another_are_not_told_apart() -> None:
    """Each has one slow pair with another host, which may be a slow link."""
    pair = next(b for a, b in ordered_pairs(32, 2) if a == 6)
    receiver = f"n{pair + 1:02}"
    verdict = ring(32, lambda a, b: 0.6 if a == "n07" or b == receiver else 1.0)
    assert verdict.failing_hosts == ()
    assert len(verdict.slow_links) == 3


def test_two_receivers_that_are_slow_do_not_accuse_their_sender() -> None:
    """All pairs into both are slow, so those out of the host that sends to both are, too."""
    receivers = {f"n{b + 1:02}" for a, b in ordered_pairs(32, 2) if a == 6}
    verdict = ring(32, lambda _, b: 0.6 if b in receivers else 1.0)
    assert "n07" not in verdict.failing_hosts
