"""The search of layouts: its estimates, its best row, and that `predict` says the same."""

import dataclasses
import json
import math
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli.main import status
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import argv, build
from stepmark.ground.units import format_bytes
from stepmark.ground.waiting import Waiting
from stepmark.layouts.candidate import Candidate, place
from stepmark.layouts.cluster import Cluster
from stepmark.layouts.layer_kinds import stages_of
from stepmark.layouts.layout_search import search
from stepmark.layouts.layout_space import LayoutSpace
from stepmark.layouts.least_memory import least_bytes
from stepmark.layouts.plan import lines as plan_lines
from stepmark.layouts.plan import plan
from stepmark.layouts.plan_options import PlanOptions
from stepmark.layouts.plan_text import lines_of_count, lines_of_counts, parts_s
from stepmark.layouts.stage_costs import Estimator
from stepmark.model.model_tables import MODELS_DIR
from stepmark.model.packing import Packing
from stepmark.predictions.sheet_errors import SheetError, chance_faster

SMALL: dict[str, Any] = {
    "models": ("llama-3.1-8b",),
    "gpus": (16,),
    "gbs": 32,
    "device": "h100-sxm",
    "seq_len": 2048,
}


ONE: dict[str, Any] = {"mbs": (1,), "tp": (1,), "pp": (1,)}


def options(**changes: Any) -> PlanOptions:
    return PlanOptions(**{**SMALL, **changes})


def layouts(own: PlanOptions) -> list[Candidate]:
    (count,) = own.gpus
    space = LayoutSpace(options=own, num_gpus=count, gpus_per_host=8)
    return [*space.layouts([*space.axes()])]


@pytest.mark.parametrize(
    "own",
    [
        options(framework="megatron"),
        options(framework="pytorch"),
        options(models=("qwen3-30b-a3b",), gpus=(32,), gbs=64, ep=(1, 8)),
    ],
    ids=["megatron", "pytorch", "experts"],
)
def test_estimates_are_close_to_simulations(own: PlanOptions) -> None:
    cluster = Cluster(own, own.gpus[0])
    estimator = Estimator(cluster.seconds, cluster.send_s)
    drawn = random.Random(5).sample(layouts(own), 3)
    for candidate in drawn:
        estimate_s = estimator.step_s(candidate)
        step_s = cluster.predicted(candidate).step_s
        assert estimate_s == pytest.approx(step_s, rel=0.2), candidate.options


def test_estimates_of_many_micro_batches_are_the_simulations() -> None:
    own = PlanOptions(
        models=("llama-3.1-70b",),
        gpus=(64,),
        gbs=512,
        device="h100-sxm",
        framework="megatron",
        tp=(4, 8),
        pp=(2, 4),
    )
    cluster = Cluster(own, 64)
    estimator = Estimator(cluster.seconds, cluster.send_s)
    for candidate in random.Random(1).sample(layouts(own), 5):
        estimate_s = estimator.step_s(candidate)
        assert estimate_s == pytest.approx(cluster.predicted(candidate).step_s, rel=0.03)


def test_the_best_is_the_fastest_that_fits() -> None:
    own = options(
        framework="megatron",
        tp=(1, 2),
        pp=(1, 2),
        mbs=(1,),
        recompute=("none", "full"),
        memory=0.48,  # the fastest needs more
    )
    cluster = Cluster(own, 16)
    assert cluster.device.hbm_bytes
    fits = [
        cluster.predicted(each).step_s
        for each in layouts(own)
        if each.needed_bytes <= own.memory * cluster.device.hbm_bytes
    ]
    found = search(dataclasses.replace(own, top=3), 16)
    assert found.rows[0]["step_s"] == min(fits)
    assert found.num_layouts == len(layouts(own)) > len(fits)
    assert found.num_too_large > 0
    assert all(row["verdict"] == "fits" for row in found.rows)
    steps = [row["step_s"] for row in found.rows]
    assert steps == sorted(steps)


def test_predict_says_the_same_of_the_first_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "layouts.json"
    words = f"plan llama-3.1-8b --gpus 16 --gbs 32 --device h100-sxm --top 2 --json {file}"
    more = ["--framework", "megatron", "--mbs", "1", "--seq-len", "2048", "--tp", "1,2"]
    assert status([*words.split(), *more]) == 0
    text = capsys.readouterr().out
    document = json.loads(file.read_text())
    best = document["counts"][0]
    assert best["best"] == document["layouts"][0]
    (command,) = (line for line in text.split("\n") if line.startswith("  stepmark predict"))
    assert command.strip() == best["command"]
    assert predicted_s(shlex.split(command)[1:], tmp_path) == best["best"]["step_s"]


@pytest.mark.parametrize(
    "own",
    [
        options(tp=(1, 2), pp=(1, 2), mbs=(1, 2), top=5),
        options(models=("qwen3-30b-a3b",), gpus=(32,), gbs=64, ep=(8,), pp=(1, 4), top=4),
    ],
    ids=["dense", "experts"],
)
def test_predict_says_the_same_of_every_row(own: PlanOptions, tmp_path: Path) -> None:
    result = search(own, own.gpus[0])
    assert {row["framework"] for row in result.rows} == {"megatron", "pytorch"}
    for number, row in enumerate(result.rows[: own.top]):
        words = ["predict", *argv(result.job(number))]
        assert predicted_s(words, tmp_path) == row["step_s"], words


MOE: dict[str, Any] = {
    **{"models": ("qwen3-30b-a3b",), "gpus": (32,), "gbs": 64, "framework": "megatron"},
    **{"pp": (1,), "tp": (1,), "mbs": (1,), "recompute": ("full",)},
}
BOTH_WAYS = ("alltoall", "two-hop")


def test_dispatches_and_an_imbalance_are_layouts(tmp_path: Path) -> None:
    own = options(**MOE, ep=(1, 8, 16), dispatch=BOTH_WAYS, imbalance=1.5)
    found = {(each.parallel.ep, each.dispatch): each for each in layouts(own)}
    assert set(found) == {(1, ""), *((ep, way) for ep in (8, 16) for way in ("", "two-hop"))}
    # A rank with all experts is never fuller than another.
    assert {each.job.imbalance for (ep, _), each in found.items() if ep > 1} == {1.5}
    assert found[1, ""].job.imbalance == 1
    result = search(own, 32)
    for number, row in enumerate(result.rows):
        words = ["predict", *argv(result.job(number))]
        assert predicted_s(words, tmp_path) == row["step_s"], words
    assert "two-hop" in "\n".join(lines_of_count(own, result))


def test_two_hops_send_less_between_hosts_and_an_imbalance_takes_longer() -> None:
    def step_s(**changes: Any) -> float:
        (own,) = layouts(options(**MOE, ep=(32,), **changes))
        return Cluster(options(), 32).predicted(own).step_s

    even = step_s()
    assert step_s(dispatch=("two-hop",)) < even
    assert step_s(imbalance=1.5) > even
    assert step_s(imbalance=1.5) < 1.5 * even


@pytest.mark.parametrize("gpus_per_host", [4, 8])
def test_hops_are_those_of_the_hosts(gpus_per_host: int) -> None:
    own = options(**MOE, ep=(16,), dispatch=("two-hop",))
    space = LayoutSpace(options=own, num_gpus=32, gpus_per_host=gpus_per_host)
    (candidate,) = space.layouts([*space.axes()])
    groups = candidate.workload().groups
    assert groups["ep_intranode"].size == gpus_per_host
    assert groups["ep_internode"].size == 16 // gpus_per_host


def test_schedules_of_pytorch_are_layouts(tmp_path: Path) -> None:
    """Each is predicted as by its command; gradients of weights fill bubbles."""
    own = options(
        framework="pytorch",
        tp=(1,),
        pp=(1, 4),
        vpp=(1, 2),
        mbs=(1,),
        recompute=("none", "full"),
        pp_schedule=("1f1b", "zb1p", "zbv", "dualpipev"),
    )
    found = {
        (each.schedule, each.num_chunks, each.recompute)
        for each in layouts(own)
        if each.parallel.pp > 1
    }
    plain = {("1f1b", chunks, again) for chunks in (1, 2) for again in ("none", "full")}
    split = {("zb1p", 1, "none"), ("zb1p", 2, "none"), ("zbv", 2, "none")}
    assert found == plain | split | {("dualpipev", 2, "none")}
    assert {each.schedule for each in layouts(own) if each.parallel.pp == 1} == {"1f1b"}
    result = search(dataclasses.replace(own, pp=(4,), recompute=("none",)), 16)
    for number, row in enumerate(result.rows):
        words = ["predict", *argv(result.job(number))]
        assert predicted_s(words, tmp_path) == row["step_s"], words
        assert row["estimated_s"] == pytest.approx(row["step_s"], rel=0.15)
    bubbles = {(row["pp_schedule"], row["vpp"]): row["bubble_s"] for row in result.rows}
    assert bubbles["zb1p", 2] < bubbles["zb1p", 1] < bubbles["1f1b", 1]
    assert "zbv" in "\n".join(lines_of_count(own, result))


def predicted_s(words: list[str], folder: Path) -> float:
    """The step of a command."""
    out = folder / "prediction.json"
    assert status([*words, "--json", str(out)]) == 0
    return float(json.loads(out.read_text())["step_s"])


def test_every_layout_is_a_step_of_its_framework() -> None:
    drawn = random.Random(7).sample(layouts(options()), 12)
    for candidate in drawn:
        workload = candidate.workload()
        assert workload.world_size == 16
        assert workload.num_sequences == 32
        layers = sum(stage.total() for stage in stages_of(candidate))
        assert layers == candidate.job.model.num_layers


def test_tied_tables_have_no_pipelines_of_pytorch() -> None:
    own = options(models=("gemma-3-1b",), framework="pytorch", mbs=(1,), tp=(1,))
    assert {each.parallel.pp for each in layouts(own)} == {1}


def test_memory_is_derived_where_the_bound_allows_a_layout() -> None:
    own = options(framework="pytorch", tp=(1,), pp=(1,), mbs=(2,), recompute=("none",))
    (candidate, *_) = layouts(own)
    cluster = Cluster(own, 16)
    share = (candidate.needed_bytes - 2**28) / (cluster.most_bytes / own.memory)
    assert least_bytes(candidate) < share * cluster.most_bytes / own.memory
    tight = dataclasses.replace(own, memory=share, recompute=("none", "full"))
    rows = search(tight, 16).rows
    assert {row["recompute"] for row in rows if row["dp_replicate"] == 1} == {"full"}


@pytest.mark.parametrize(
    "own",
    [
        options(models=("qwen3-30b-a3b",), gpus=(32,), gbs=64),
        options(framework="pytorch", gpus=(8,), tp=(1,), pp=(1, 2), mbs=(1, 4), seq_len=8192),
    ],
    ids=["experts", "dense"],
)
def test_the_bound_of_memory_is_one(own: PlanOptions) -> None:
    for candidate in random.Random(3).sample(layouts(own), 10):
        assert least_bytes(candidate) <= candidate.memory.reserved_bytes, candidate.options


@pytest.mark.parametrize("device", ["h100-sxm", "h200"])
def test_no_layout_needs_less_than_the_one_that_is_named(device: str) -> None:
    """It is derived, also where a bound leaves all layouts out."""
    own = options(models=("llama-3.1-70b",), gpus=(4,), gbs=64, device=device, mbs=(1,))
    own = dataclasses.replace(own, seq_len=8192, recompute=("full",))
    least = min(layouts(own), key=lambda each: each.needed_bytes)
    size, where = format_bytes(least.needed_bytes), place(least.row)
    with pytest.raises(ConfigError, match=re.escape(f"less than {size} of a GPU ({where})")):
        search(own, 4)


def test_measured_layouts_have_their_times(tmp_path: Path) -> None:
    """The first layout is the best measured one, or another that is predicted to be faster."""
    own = options(framework="megatron", tp=(1, 2, 4), pp=(2,), mbs=(1,), recompute=("none",))
    own = dataclasses.replace(own, vpp=(1,), gbs=64)
    (before,), _ = plan(own)
    first, second = before.rows[:2]
    file = tmp_path / "anchors.csv"
    for factor, words in ((1.0, "s; no other is predicted"), (1.9, "not measured yet; the")):
        step_s = factor * first["step_s"]
        file.write_text(f"tp,pp,step\n{first['tp']},2,{step_s}s\n")
        changed = dataclasses.replace(own, anchor=str(file))
        (after,), _ = plan(changed)
        assert words in next(lines_of_count(changed, after))
        measured = {row["tp"]: row["measured_s"] for row in after.rows}
        assert measured[first["tp"]] == pytest.approx(step_s)
        assert measured[second["tp"]] is None
        assert after.rows[0]["tp"] == (first if factor == 1.0 else second)["tp"]


def test_ranges_are_the_layouts() -> None:
    own = options(tp=(2,), pp=(4,), mbs=(2,), recompute=("half",), framework="megatron")
    for candidate in layouts(own):
        axes = candidate.parallel
        assert (axes.tp, axes.pp, candidate.job.mbs) == (2, 4, 2)
        assert candidate.recompute != "none"


@pytest.mark.parametrize("framework", ["megatron", "pytorch"])
def test_anchors_of_a_plan_are_predicted_as_its_rows(framework: str, tmp_path: Path) -> None:
    """Also those of its command, whose cp and chunks are no part of the table."""
    file, answer = tmp_path / "anchors.csv", tmp_path / "answer.json"
    own = options(framework=framework, tp=(1, 2), pp=(2,), cp=(1, 2), mbs=(1,), gbs=64)
    own = dataclasses.replace(own, recompute=("none",), vpp=(1, 2), top=50)
    (before,), _ = plan(own)
    rows = [
        row for row in before.rows if (row["cp"], row["vpp"], row["dp_replicate"]) == (1, 1, 1)
    ]
    lines = [f"{row['tp']},2,{row['dp']},{1.3 * row['step_s']}s" for row in rows]
    file.write_text("\n".join(["tp,pp,dp,step", *lines]))
    (after,), _ = plan(dataclasses.replace(own, anchor=str(file)))
    assert after.cluster.anchored
    anchors = after.cluster.anchored.document()
    assert [row["predicted_s"] for row in anchors["rows"]] == [row["step_s"] for row in rows]
    assert len(rows) == 2
    for number, row in enumerate(after.rows):
        if row["cp"] == 2 or number == 0:
            words = argv(after.job(number))
            assert status(["predict", *words, "--json", str(answer)]) == 0
            document = json.loads(answer.read_text())
            assert document["anchors"] == anchors
            assert document["step_s"] == pytest.approx(row["step_s"])


@pytest.mark.parametrize(
    ("columns", "changes", "expected"),
    [
        ("pp,mbs,ckpt", {}, "line 1: tp is missing: give a column tp, since"),
        ("tp,mbs,ckpt", {}, "give a column pp"),
        ("tp,pp,ckpt", {}, "give a column mbs"),
        ("tp,pp,mbs", {}, "give a column recompute"),
        ("tp,pp,mbs,ckpt", {"cp": (2,), "cp_comm_type": ("a2a",)}, "a column cp_comm_type"),
        ("tp,pp,mbs,ckpt", {"gpus": (16, 32)}, "give a column nproc"),
        ("tp,pp", {}, "line 1: mbs, recompute is missing: give a column mbs, recompute, since"),
        ("tp,pp,mbs", {"framework": "both"}, "they must state tp, pp, mbs, recompute"),
    ],
)
def test_a_row_of_anchors_states_what_layouts_differ_in(
    columns: str, changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "anchors.csv"
    cells = ["none" if column == "ckpt" else "1" for column in columns.split(",")]
    file.write_text(f"{columns},step\n{','.join(cells)},9s\n")
    with pytest.raises(ConfigError, match=re.escape(expected)):
        plan(options(**{"framework": "megatron", "anchor": str(file), **changes}))


def test_a_log_is_no_anchor_of_a_plan(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    elapsed = "elapsed time per iteration (ms): 9000.0 |"
    log.write_text("".join(f" iteration {n}/ 9 | {elapsed}\n" for n in range(1, 10)))
    with pytest.raises(ConfigError, match="a table, since a log does not state tp"):
        plan(options(framework="megatron", anchor=str(log)))


def test_contention_is_not_computation() -> None:
    """Replicas change computation by the shards of the optimizer alone, and contention more."""
    own = options(framework="pytorch", tp=(1,), pp=(1,), mbs=(1,), gpus=(64,), gbs=64)
    result = search(dataclasses.replace(own, recompute=("none",), top=20), 64)
    parts = [parts_s(each) for each in result.simulated]
    assert len({each.candidate.parallel.dp_replicate for each in result.simulated}) > 1
    assert max(own["contention"] for own in parts) > 0
    for each, parts_of in zip(result.simulated, parts, strict=True):
        assert sum(parts_of.values()) == pytest.approx(each.row["step_s"], rel=1e-6)
        assert parts_of["computation"] == pytest.approx(parts[0]["computation"], rel=0.05)


def test_the_other_framework_has_its_own_degrees() -> None:
    own = options(tp=(1, 2), pp=(1, 2), mbs=(1, 2), recompute=("none",), top=3)
    result = search(own, 16)
    name = result.best.candidate.framework
    other = result.neighbours["framework"].candidate
    fastest = next(each for each in result.estimates if each.candidate.framework != name)
    assert other.axes == fastest.candidate.axes
    assert any(line.startswith(f"{other.framework}, ") for line in lines_of_count(own, result))


def test_several_numbers_of_gpus() -> None:
    own = options(gpus=(8, 16), tp=(2,), pp=(1,), mbs=(1,), framework="megatron", top=2)
    searches, left_out = plan(own)
    assert left_out == {}
    text = [*lines_of_counts(searches)]
    assert text[0].startswith("llama-3.1-8b: the fastest layout for each number of GPUs")
    assert [each.cluster.num_gpus for each in searches] == [8, 16]
    assert searches[0].rows[0]["step_s"] > searches[1].rows[0]["step_s"]
    assert text[-1].startswith("up to 16 GPUs each does at least 80% of the best tokens/s")


def test_a_number_of_gpus_without_layouts_is_named() -> None:
    own = options(
        gpus=(16, 12), gbs=32, tp=(2,), pp=(1,), mbs=(1,), framework="megatron", top=1
    )
    searches, left_out = plan(own)
    assert [each.cluster.num_gpus for each in searches] == [16]
    assert [*left_out] == [12]
    assert [*plan_lines(own, searches, left_out)][-1].startswith("12 GPUs are left out: gbs 32")


def test_long_sequences_are_divided_over_ranks() -> None:
    degrees = {each.parallel.cp for each in layouts(options(seq_len=32768, tp=(8,), pp=(1,)))}
    assert degrees == {1, 2}  # what 16 GPUs leave


def test_exchanges_of_a_sequence_are_searched() -> None:
    """Of KV heads by heads only what a rank has of them."""
    one = {"framework": "megatron", "tp": (2,), "pp": (1,), "mbs": (1,), "recompute": ("none",)}
    own = options(**one, seq_len=8192, cp=(1, 2, 8), cp_comm_type=("p2p", "a2a"), top=3)
    chosen = [(each.parallel.cp, each.exchange) for each in layouts(own)]
    assert chosen == [(1, ""), (2, ""), (2, "a2a"), (8, "")]  # 4 KV heads
    result = search(own, 16)
    assert {(row["cp"], row["cp_comm_type"]) for row in result.rows} >= {(2, ""), (2, "a2a")}
    text = "\n".join(lines_of_count(own, result))
    assert re.search(r"rules .* cp +cp by +dp", text)
    assert re.search(r"Megatron .* 2 +a2a ", text)


@pytest.mark.parametrize("changes", [{"framework": "pytorch", "cp": (2,)}, {"cp": (1,)}])
def test_an_exchange_that_no_layout_has_is_refused(changes: dict[str, Any]) -> None:
    own = options(**changes, cp_comm_type=("a2a",))
    with pytest.raises(ConfigError, match=r"cp-comm-type a2a .*left out without layouts"):
        layouts(own)


def test_packed_sequences_are_planned(tmp_path: Path) -> None:
    """Attention of all layouts is of pieces, and the first row is what `predict` says."""
    own = options(
        packing=Packing(mean=500, longest=2048),
        tp=(1,),
        pp=(1,),
        mbs=(1, 2),
        recompute=("none",),
        top=2,
    )
    result = search(own, 16)
    plain = search(dataclasses.replace(own, packing=None), 16)
    assert result.best.row["step_s"] < plain.best.row["step_s"]
    assert {each.job.mbs for each in layouts(own) if each.is_megatron} == {1}
    assert "sequences of 2,048 tokens a step, packed from pieces (500,2048), bf16" in "\n".join(
        lines_of_count(own, result)
    )
    step_s = predicted_s(["predict", *argv(result.job(0))], tmp_path)
    assert step_s == pytest.approx(result.rows[0]["step_s"])
    with pytest.raises(ConfigError, match=r"verify 2 .*left out with --packing"):
        plan(dataclasses.replace(own, verify=2))


def test_a_split_that_megatron_takes_by_an_option_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress: list[str] = []
    monkeypatch.setattr(
        Waiting,
        "progress",
        property(None, lambda _, text: progress.append(text)),
        raising=False,
    )
    own = options(
        framework="megatron", gpus=(12,), gbs=24, tp=(1,), pp=(3,), vpp=(1,), mbs=(1,), top=2
    )
    result = search(own, 12)
    for text in ([*lines_of_count(own, result)], [*lines_of_counts([result])]):
        (note,) = (line for line in text if line.startswith("note: "))
        assert "32 layers do not divide by 3 stages" in note
        assert "--decoder-last-pipeline-num-layers 10" in note
    assert "1 of 1 groups, at most about 0 min more before the best are simulated" in progress


def test_the_answer_comes_first() -> None:
    own = options(framework="megatron", tp=(1, 2), pp=(1, 2), mbs=(1,), top=4, tokens=1e12)
    text = [*lines_of_count(own, search(own, 16))]
    assert re.match(r"llama-3\.1-8b on 16 h100-sxm: megatron, .*mbs 1", text[0])
    assert re.match(
        r"  step [\d.]+ m?s, [\d,]+ tokens/s/GPU, .* MFU \(causal\), fits \([\d.]+ of 80 GiB "
        r"reserved\), bound by computation \([\d.]+ % of the step\).*, [\d.]+ days",
        text[1],
    )
    searched = r"  searched \d+ layouts in \d+ s \(cp at most 1, more by --cp\): "
    assert re.match(rf"{searched}\d+ need more memory, \d+ sim", text[3])
    assert text[2].startswith("  by data sheet, typical host, network dgx-h100; 32 sequences")
    assert re.search(r", 90 % interval [\d.]+ m?s? ?to [\d.]+ m?s by \d+ published", text[2])
    assert any(re.match(r"pp 2 instead of 1: \+[\d.]+% of the step, of which", x) for x in text)


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"gbs": 7, "tp": (1,), "pp": (1,)}, "gbs", "multiple of the data ranks"),
        ({"device": "h1000"}, "device", ""),
        ({"models": ("llama-3.1-405b",), "gpus": (8,)}, "gpus", "no layout needs less"),
        ({"device": "h100,h200"}, "device", "must be one device"),
        ({"models": ("llama-3.1-70b",), "gpus": (250,), "gbs": 1024}, "gpus", "248 or 256"),
        ({"tp": (3,)}, "gbs", "multiple of the data ranks"),
        ({"models": ("nothing",)}, "model", ""),
        ({"network": "nowhere"}, "network", ""),
        ({"host": "nobody", "mbs": (1,), "tp": (1,), "pp": (1,)}, "host", ""),
        (
            {"precision": "nvfp4", "mbs": (1,), "tp": (1,), "pp": (1,)},
            "device",
            "peak of nvfp4",
        ),
        ({"ep": (8,)}, "ep", "has no experts"),
        ({"dispatch": ("two-hop",)}, "dispatch", "without experts"),
        ({"framework": "megatron", "pp_schedule": ("zbv",)}, "pp-schedule", "have 1F1B"),
        ({"imbalance": 1.5}, "imbalance", "without experts"),
        ({**MOE, "framework": "pytorch", "dispatch": ("two-hop",)}, "dispatch", "PyTorch's"),
        ({**MOE, "verify": 1, "imbalance": 1.5}, "verify", "--imbalance"),
        ({"vpp": (2,), "pp": (1,)}, "gbs", ""),
    ],
)
def test_no_layout_is_a_sentence(changes: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(options(**changes))
    assert caught.value.field == field
    assert words in str(caught.value)


def test_multi_token_prediction_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "later.toml"
    own = (MODELS_DIR / "llama-3.1-8b.toml").read_text()
    path.write_text("num_mtp_layers = 1\n" + own)
    with pytest.raises(ConfigError, match="multi-token prediction") as caught:
        plan(options(models=(str(path),)))
    assert caught.value.field == "model"


def test_layers_with_keys_of_earlier_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "shared.toml"
    widths = "\n".join(f"{name} = 64" for name in ("hidden_size", "vocab_size", "seq_len"))
    heads = "num_layers = 2\nnum_heads = 2\nnum_kv_heads = 2\nhead_dim = 32"
    layers = 'pattern = "AB"\n[layer.A]\n[layer.B]\nhas_kv = false'
    path.write_text(f"{widths}\nffn_hidden_size = 64\n{heads}\n{layers}\n")
    with pytest.raises(ConfigError, match="layers have keys and values of their own"):
        plan(options(models=(str(path),)))


def test_processes_change_nothing() -> None:
    """Two of them search what one does, so that their rows are equal."""
    own = options(mbs=(1, 2), seq_len=1024, recompute=("none", "full"), top=3)
    one, two = (search(dataclasses.replace(own, jobs=count), 16) for count in (1, 2))
    assert one.rows == two.rows
    assert one.num_layouts == two.num_layouts
    assert {axis: each.row for axis, each in one.neighbours.items()} == {
        axis: each.row for axis, each in two.neighbours.items()
    }


def test_no_faster_layout_needs_less_memory_than_one_on_the_front() -> None:
    rows = search(options(tp=(1, 2), mbs=(1, 2), pp=(1, 2), framework="megatron"), 16).rows
    front = [row for row in rows if row["is_pareto"]]
    assert front[0] is rows[0]
    for row in rows:
        smaller = [x for x in rows if x["reserved_bytes"] <= row["reserved_bytes"]]
        assert row["is_pareto"] == (min(smaller, key=lambda x: x["step_s"]) is row)


def test_slower_layouts_have_less_chance() -> None:
    assert chance_faster(1.0) == pytest.approx(0.5, abs=0.01)
    chances = [chance_faster(ratio) for ratio in (1.0, 1.02, 1.1, 1.5, 4.0)]
    assert chances == sorted(chances, reverse=True)
    pairs = [(0.0, 0.1), (0.3,), (0.0, 1.0)]
    errors = [
        SheetError(source=str(number), device="x", traits=(), log_ratio=value)
        for number, values in enumerate(pairs)
        for value in values
    ]
    # Of two sources with a pair each the second differs by more than 0.5, half of it this way.
    assert chance_faster(math.exp(0.5), errors) == 0.25


def test_the_page_has_layouts_and_ledgers(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    words = f"plan llama-3.1-8b --gpus 16 --gbs 32 --device h100-sxm --top 2 --html {file}"
    more = "--framework megatron --mbs 1 --seq-len 2048 --tp 1,2 --pp 1"
    assert status([*words.split(), *more.split()]) == 0
    text = file.read_text()
    assert "Time and memory" in text
    assert "tp 2 instead of 1" in text
    assert "allowed: 73.6 GiB" in text


def test_a_pipeline_over_sequences_is_estimated_without_gathers_of_each_micro_batch() -> None:
    """Each of its stages gathers weights once a step, which one stage does every time."""
    own = options(
        gbs=256,
        framework="pytorch",
        cp=(2,),
        tp=(1,),
        pp=(2,),
        vpp=(1,),
        mbs=(1,),
        recompute=("none",),
    )
    (candidate, *_) = layouts(own)
    cluster = Cluster(own, 16)
    estimate_s = Estimator(cluster.seconds, cluster.send_s).step_s(candidate)
    assert estimate_s == pytest.approx(cluster.predicted(candidate).step_s, rel=0.05)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("256", [256]),
        ("64,96", [64, 96]),
        ("8-64", [8, 16, 32, 64]),
        ("48-100,64", [48, 96, 64]),
    ],
)
def test_a_range_of_gpus_doubles(text: str, counts: list[int]) -> None:
    words = {"models": ["llama-3.1-8b"], "gpus": text, "gbs": "64", "device": "h200"}
    assert [*build(PlanOptions, words).gpus] == counts


@pytest.mark.parametrize("text", ["", "0", "64-8", "8-", "-8", "x", "8,,16", str(2**21)])
def test_a_wrong_number_of_gpus_is_refused(text: str) -> None:
    words = {"models": ["llama-3.1-8b"], "gpus": text, "gbs": "64", "device": "h200"}
    with pytest.raises(ConfigError) as caught:
        build(PlanOptions, words)
    assert caught.value.field == "gpus"
