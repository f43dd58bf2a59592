"""Laws of training logs: a figure that is read is one that was printed."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.job_logs.training_lines import (
    BATCH,
    RANKS,
    SEQ_LEN,
    TOKENS,
    VERSIONS,
    KnownStep,
    Version,
    hugging_face,
    known_steps,
    mlperf,
)

from stepmark.ground.errors import ConfigError
from stepmark.job_logs.training_log.training_log import TrainingLog, read_training_log
from stepmark.job_logs.training_log.training_log_text import findings

FOREIGN = (
    "WARNING:root:iteration 7/9 took longer | step: 3",
    "[rank3]: UserWarning: barrier(): using the device under current context",
    "node7:4242:4242 [0] NCCL INFO Channel 00/16 : 0 1 2 3",
    " > finished loading 12 of 7 parts in 8.5 s",
    "validation loss at iteration 10 | lm loss value: 3.200000E+00 | lm loss PPL: 2.4E+01 |",
    "[titan] 2026-08-01 10:00:00,123 - root - INFO - validate step: 10  loss:  3.2000  "
    "memory: 42.50GiB(53.70%)  tps: 1,234",
    "",
)
NAMED = pytest.mark.parametrize("version", VERSIONS, ids=[own.name for own in VERSIONS])


def read(folder: Path, text: str | bytes) -> TrainingLog:
    path = folder / "job.log"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_training_log(path)


def lines_of(version: Version, steps: Iterable[KnownStep]) -> list[str]:
    return [*version.head, *(line for step in steps for line in version.lines(step))]


def check(log: TrainingLog, version: Version, steps: Sequence[KnownStep]) -> None:
    """Check that each step that was read is one of these, with its figures."""
    by_number = {step.number: step for step in steps}
    for own in log.steps:
        step = by_number[own.number]
        cost_s = own.step_s or TOKENS / RANKS / (own.tokens_per_s_gpu or 0)
        assert cost_s == pytest.approx(step.step_s, rel=version.rounding)
        if own.loss is not None:
            assert own.loss == pytest.approx(step.loss, rel=6e-3)
        if own.tokens_per_s_gpu is not None:
            rate = TOKENS / RANKS / step.step_s
            assert own.tokens_per_s_gpu == pytest.approx(rate, rel=max(2e-4, version.rounding))


@NAMED
def test_a_whole_log_gives_all_steps(version: Version, tmp_path: Path) -> None:
    steps = known_steps(seed=1, count=30)
    log = read(tmp_path, "\n".join([*lines_of(version, steps), ""]))
    assert [own.number for own in log.steps] == [step.number for step in steps]
    assert log.trainer == version.trainer
    assert all(own.step_s for own in log.steps)
    check(log, version, steps)


@pytest.mark.parametrize(
    "prefix",
    ["[default7]:", "[rank0]:", "[1,0]<stdout>:", " 0: ", "15: ", "[default7]: [0] "],
)
@pytest.mark.parametrize("version", VERSIONS[:2], ids=lambda own: own.name)
def test_launchers_prefixes_may_touch_the_line(
    version: Version, prefix: str, tmp_path: Path
) -> None:
    steps = known_steps(seed=15, count=20)
    lines = [f"{prefix}{line}" for line in lines_of(version, steps)]
    check(log := read(tmp_path, "\n".join([*lines, ""])), version, steps)
    assert len(log.steps) == len(steps)
    assert log.facts.num_ranks == RANKS


def test_megatron_deepspeed_states_seconds(tmp_path: Path) -> None:
    version = VERSIONS[0]
    steps = known_steps(seed=16, count=20)
    lines = [
        line.replace(f"(ms): {step.step_s * 1000:.1f}", f"(s): {step.step_s:.2f}")
        for step in steps
        for line in version.lines(step)
    ]
    log = read(tmp_path, "\n".join([*version.head, *lines, ""]))
    assert log.trainer == "Megatron-DeepSpeed"
    assert [own.step_s for own in log.steps] == [pytest.approx(own.step_s) for own in steps]


@NAMED
@given(seed=st.integers(0, 2**32), place=st.floats(0, 1))
def test_a_cut_line_with_the_next_on_it_gives_right_figures_or_none(
    version: Version, seed: int, place: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    steps = known_steps(seed, count=5)
    lines = [line for step in steps for line in version.lines(step)]
    number = Random(seed).randrange(len(lines) - 1)
    cut = lines[number][: round(place * len(lines[number]))]
    lines[number : number + 2] = [cut + lines[number + 1]]
    text = "\n".join([*version.head, *lines, ""])
    if not version.has_open_end:
        check(read(tmp_path_factory.getbasetemp(), text), version, steps)


@pytest.mark.parametrize("word", ["NAN", "nan", "-nan", "INF"])
def test_a_loss_is_no_number_in_any_case(word: str, tmp_path: Path) -> None:
    version = VERSIONS[1]
    steps = known_steps(seed=17, count=10)
    text = "\n".join([*lines_of(version, steps), ""])
    loss = f"lm loss: {steps[-1].loss:.6E}"
    log = read(tmp_path, text.replace(loss, f"lm loss: {word}"))
    assert [finding.rule for finding in findings(log)] == ["loss-nan"]


@pytest.mark.parametrize(
    ("words", "rule"), [("nan iterations", "loss-nan"), ("skipped iterations", "steps-skipped")]
)
def test_megatron_counts_nan_and_skipped_steps(words: str, rule: str, tmp_path: Path) -> None:
    """Megatron states no loss where all steps since the line before were skipped."""
    text = "\n".join([*lines_of(VERSIONS[1], known_steps(seed=18, count=10)), ""])
    log = read(tmp_path, text.replace(f"number of {words}:   0", f"number of {words}:   1"))
    (finding,) = findings(log)
    assert finding.rule == rule
    assert finding.count == 10


@pytest.mark.parametrize("word", ["inf", "nan", "1e400"])
def test_a_fact_is_a_number(word: str, tmp_path: Path) -> None:
    line = f"[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.0 | max reserved: {word}"
    lines = lines_of(VERSIONS[1], known_steps(seed=19, count=10))
    assert read(tmp_path, "\n".join([line, *lines, ""])).facts.memory_bytes is None


def test_the_rounding_of_a_time_is_that_of_what_it_follows_from(tmp_path: Path) -> None:
    by_name = {version.name: version for version in VERSIONS}
    steps = known_steps(seed=20, count=10)
    for name, unit in (
        ("megatron 2026", lambda step: 1e-4 / step.step_s),
        ("torchtitan 2026", lambda step: RANKS * step.step_s / TOKENS),
        ("composer", lambda step: 1e-4 * step.step_s / BATCH),
        ("nemo", lambda _: 1e-3),
    ):
        log = read(tmp_path, "\n".join([*lines_of(by_name[name], steps), ""]))
        for own, step in zip(log.steps, steps, strict=True):
            assert own.rounding == pytest.approx(unit(step), rel=1e-3), name
    log = read(tmp_path, "\n".join([*hugging_face(known_steps(seed=7, count=200)), ""]))
    assert all(0.01 < own.rounding <= 0.04 for own in log.steps)  # of 50 s to 200 s


@NAMED
def test_a_line_every_ten_steps_is_their_mean(version: Version, tmp_path: Path) -> None:
    steps = known_steps(seed=2, count=12, interval=10)
    log = read(tmp_path, "\n".join([*lines_of(version, steps), ""]))
    is_mean = version.trainer != "DeepSpeed"
    assert {own.span for own in log.steps} == {10 if is_mean else 1}


@NAMED
@given(seed=st.integers(0, 2**32), place=st.floats(0, 1))
def test_a_log_that_is_cut_gives_right_figures_or_none(
    version: Version, seed: int, place: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    steps = known_steps(seed, count=5)
    text = "\n".join([*lines_of(version, steps), ""]).encode()
    try:
        log = read(tmp_path_factory.getbasetemp(), text[: round(place * len(text))])
    except ConfigError:
        return
    check(log, version, steps)


@NAMED
def test_the_last_line_may_be_cut_anywhere(version: Version, tmp_path: Path) -> None:
    steps = known_steps(seed=12, count=3)
    text = "\n".join([*lines_of(version, steps), ""]).encode()
    for num_lost in range(1, 50):
        check(read(tmp_path, text[:-num_lost]), version, steps)


def test_a_step_has_no_figures_of_the_next_whose_first_line_is_lost(tmp_path: Path) -> None:
    version = next(own for own in VERSIONS if own.name == "composer")
    steps = known_steps(seed=13, count=9)
    lines = lines_of(version, steps)
    lines.remove("[batch=5/9000]:")
    rate = BATCH / steps[3].step_s
    lines.remove(f"\t Train throughput/samples_per_sec: {rate:.4f}")
    log = read(tmp_path, "\n".join([*lines, ""]))
    assert [own.number for own in log.steps] == [1, 2, 3, 6, 7, 8, 9]
    check(log, version, steps)


@NAMED
@given(seed=st.integers(0, 2**32))
def test_other_output_between_lines_changes_nothing(
    version: Version, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    random = Random(seed)
    steps = known_steps(seed, count=6)
    lines = lines_of(version, steps)
    for _ in range(8):
        lines.insert(random.randrange(len(lines) + 1), random.choice(FOREIGN))
    prefix = random.choice(("", "0: ", "[default0]: "))
    log = read(tmp_path_factory.getbasetemp(), "".join(f"{prefix}{line}\n" for line in lines))
    assert len(log.steps) == len(steps)
    check(log, version, steps)


@NAMED
@given(seed=st.integers(0, 2**32))
def test_other_output_within_a_line_gives_right_figures_or_none(
    version: Version, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if version.has_open_end:
        return
    random = Random(seed)
    steps = known_steps(seed, count=6)
    lines = lines_of(version, steps)
    number = random.randrange(len(version.head), len(lines))
    line = lines[number]
    place = random.randrange(len(line) + 1)
    lines[number] = f"{line[:place]}\n{random.choice(FOREIGN)}\n{line[place:]}"
    log = read(tmp_path_factory.getbasetemp(), "\n".join([*lines, ""]))
    check(log, version, steps)


@NAMED
def test_ranks_that_log_the_same_steps_count_once(version: Version, tmp_path: Path) -> None:
    steps = known_steps(seed=3, count=20)
    lines = [
        f"[default{rank}]: {line.removeprefix('[rank0]:')}"
        for step in steps
        for rank in range(4)
        for line in version.lines(step)
    ]
    log = read(tmp_path, "\n".join([*version.head, *lines, ""]))
    assert len(log.steps) == len(steps)
    assert log.num_ranks_logged == 4
    check(log, version, steps)


def test_a_bar_that_is_drawn_again_counts_once(tmp_path: Path) -> None:
    version = next(own for own in VERSIONS if own.name == "nemo 1")
    steps = known_steps(seed=14, count=20)
    lines = [line for step in steps for line in version.lines(step) * 3]
    log = read(tmp_path, "\r".join([*lines, "\n"]))
    assert [own.number for own in log.steps] == [step.number for step in steps]
    check(log, version, steps)


def test_lines_have_their_numbers_in_the_file(tmp_path: Path) -> None:
    version = VERSIONS[1]
    lines = [
        *version.head,
        *(
            "\n".join(["", "x" * 50_000, line])
            for s in known_steps(1, 60)
            for line in version.lines(s)
        ),
    ]
    path = tmp_path / "job.log"
    path.write_text("\n".join([*lines, ""]))
    text = path.read_text().split("\n")
    for own in read_training_log(path).steps:
        assert f" {own.number}/" in text[own.line - 1]


def test_facts_are_those_of_the_job(tmp_path: Path) -> None:
    by_name = {version.name: version for version in VERSIONS}
    for name in ("megatron 2.6", "torchtitan 2024", "torchtitan 2026", "composer"):
        steps = known_steps(seed=4, count=8)
        log = read(tmp_path, "\n".join([*lines_of(by_name[name], steps), ""]))
        assert log.facts.num_ranks == RANKS
        own = log.steps[-1]
        assert own.tokens_per_s == pytest.approx(TOKENS / steps[-1].step_s, rel=2e-4)
        assert own.tokens_per_s_gpu == pytest.approx(
            TOKENS / RANKS / steps[-1].step_s, rel=1e-4
        )


def test_a_restart_leaves_the_last_start(tmp_path: Path) -> None:
    version = VERSIONS[1]
    steps = known_steps(seed=5, count=40)
    text = "\n".join([*lines_of(version, steps[:30]), *lines_of(version, steps[20:]), ""])
    log = read(tmp_path, text)
    assert [own.number for own in log.steps] == list(range(21, 41))
    assert [own.number for own in log.restarts] == [21]


@example(starts=[(1, 1, 16), (1, 1, 16), (3, 1, 16), (1, 1, 16)])
@given(
    starts=st.lists(
        st.tuples(st.integers(1, 12), st.integers(0, 3), st.sampled_from((16, 64))), max_size=5
    )
)
def test_figures_have_the_facts_of_their_start(
    starts: list[tuple[int, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """starts: lines of each, steps that it repeats, and its GPUs, all stated again."""
    version = VERSIONS[1]
    lines = lines_of(version, known_steps(seed=21, count=9))
    ranks = dict.fromkeys(range(1, 10), 16)
    last = 9
    for count, num_again, num_ranks in starts:
        steps = known_steps(seed=count, count=last + count)[last - num_again :]
        own = "\n".join(lines_of(version, steps))
        lines.append(own.replace("using world size: 16", f"using world size: {num_ranks}"))
        last = steps[-1].number
        if len(steps) >= 8:
            ranks = {step.number: num_ranks for step in steps}
    log = read(tmp_path_factory.getbasetemp(), "\n".join([*lines, ""]))
    assert [own.number for own in log.steps] == list(ranks)
    assert log.facts.num_ranks == ranks[log.steps[0].number]
    assert len(log.restarts) == len(starts)


def test_facts_after_all_steps_are_of_none(tmp_path: Path) -> None:
    version = VERSIONS[1]
    lines = lines_of(version, known_steps(seed=22, count=20))
    later = [line.replace("size: 16", "size: 8") for line in version.head]
    log = read(tmp_path, "\n".join([*lines, *later, ""]))
    assert log.facts.num_ranks == RANKS
    assert log.empty_start == len(lines) + 1


@NAMED
def test_facts_of_another_rank_may_be_late(version: Version, tmp_path: Path) -> None:
    first, *others = known_steps(seed=23, count=20)
    lines = [line for step in others for line in version.lines(step)]
    whole = [line.removeprefix("[rank0]:") for line in [*lines_of(version, [first]), *lines]]
    late = [f"[default3]: {line.removeprefix('[rank0]:')}" for line in version.head]
    place = len(whole) - len(lines)
    tagged = [f"[default0]: {line}" for line in whole]
    log = read(tmp_path, "\n".join([*tagged[:place], *late, *tagged[place:], ""]))
    assert len(log.steps) == 20
    assert not log.restarts


def test_composer_states_no_rate_in_its_first_window(tmp_path: Path) -> None:
    version = next(own for own in VERSIONS if own.name == "composer")
    text = [
        line
        for place, step in enumerate(known_steps(seed=24, count=40))
        for line in version.lines(step)
        if place >= 10 or "throughput/" not in line
    ]
    whole = read(tmp_path, "\n".join([*version.head, *text, ""]))
    assert [own.number for own in whole.steps] == list(range(11, 41))
    assert whole.num_torn == 0
    # A second start, in its first window, from step 31: without its head, too.
    again = [
        line
        for step in known_steps(seed=24, count=40)[30:]
        for line in version.lines(step)
        if "throughput/" not in line
    ]
    log = read(tmp_path, "\n".join([*version.head, *text, *again, ""]))
    assert [own.number for own in log.restarts] == [31]
    assert log.num_later == 1
    assert len(log.steps) == 30


def test_a_clock_that_goes_back_is_a_start(tmp_path: Path) -> None:
    steps = known_steps(seed=25, count=200)
    lines = hugging_face(steps)
    resumed = hugging_face(steps[80:])[1:]  # without its facts
    log = read(tmp_path, "\n".join([*lines[:81], *resumed, ""]))
    assert [own.number for own in log.restarts] == [81]
    for own in log.steps:
        exact = sum(step.step_s for step in steps[own.number - own.span : own.number])
        assert (own.step_s or 0) * own.span == pytest.approx(exact, abs=1.0)


def test_a_bar_that_begins_is_a_start_whatever_its_clock(tmp_path: Path) -> None:
    """The batches that a resumed run skips may take longer than the steps before."""
    steps = known_steps(seed=36, count=200)
    zero = "  0%|          | 0/200 [00:00<?, ?it/s]"
    slow = KnownStep(81, 2000.0, 2.5)
    first, resumed = hugging_face(steps), hugging_face([slow, *steps[81:]])[1:]
    lines = [first[0], zero, *first[1:81]]
    log = read(tmp_path, "\n".join([*lines, zero, *resumed, ""]))
    assert [own.number for own in log.restarts] == [81]
    assert log.facts.batch == BATCH
    for own in log.steps:
        exact = sum(step.step_s for step in steps[own.number - own.span : own.number])
        assert (own.step_s or 0) * own.span == pytest.approx(exact, abs=1.0)
    assert max(own.step_s or 0 for own in log.steps) < 20


def test_a_bar_of_an_evaluation_begins_no_start(tmp_path: Path) -> None:
    lines = hugging_face(known_steps(seed=37, count=200))
    for place in (150, 100, 50):
        bars = [f"  {n}%|          | {n}/50 [00:0{n}<?, ?it/s]" for n in range(3)]
        lines[place:place] = [*bars, "{'eval_loss': 2.5, 'eval_runtime': 3.1, 'epoch': 0.1}"]
    log = read(tmp_path, "\n".join([*lines, ""]))
    assert not log.restarts
    assert log.steps[-1].number > 190


@pytest.mark.parametrize("place", [0, 20, 38])
def test_lines_that_changed_places_are_no_restart(place: int, tmp_path: Path) -> None:
    steps = known_steps(seed=26, count=40)
    order = [*steps[:place], steps[place + 1], steps[place], *steps[place + 2 :]]
    log = read(tmp_path, "\n".join([*lines_of(VERSIONS[1], order), ""]))
    assert [own.number for own in log.steps] == list(range(1, 41))
    assert not log.restarts
    check(log, VERSIONS[1], steps)


@pytest.mark.parametrize("name", ["megatron 2.6", "torchtitan 2026"])
def test_two_jobs_that_log_the_same_steps_are_refused(name: str, tmp_path: Path) -> None:
    version = next(own for own in VERSIONS if own.name == name)
    lines = list(version.head)
    for step in known_steps(seed=27, count=20):
        slow = KnownStep(step.number, step.step_s * 1.2, step.loss)
        lines += [*version.lines(step), *version.lines(slow)]
    with pytest.raises(ConfigError, match="20 of 40 lines state a time of the step before"):
        read(tmp_path, "\n".join([*lines, ""]))


def test_a_step_that_is_done_again_at_once_is_a_start(tmp_path: Path) -> None:
    steps = known_steps(seed=28, count=40)
    again = KnownStep(20, steps[19].step_s * 3, steps[19].loss)
    lines = [*lines_of(VERSIONS[1], steps[:20]), *VERSIONS[1].lines(again)]
    lines += [line for step in steps[20:] for line in VERSIONS[1].lines(step)]
    log = read(tmp_path, "\n".join([*lines, ""]))
    assert [own.number for own in log.restarts] == [20]
    assert log.costs[0] == pytest.approx(again.step_s)


def test_of_two_trainers_the_last_counts(tmp_path: Path) -> None:
    first, second = VERSIONS[1], next(own for own in VERSIONS if own.name == "torchtitan 2026")
    lines = lines_of(first, known_steps(seed=29, count=60))
    steps = known_steps(seed=30, count=20)
    log = read(tmp_path, "\n".join([*lines, *lines_of(second, steps), ""]))
    assert log.trainer == "torchtitan"
    assert len(log.steps) == 20
    assert log.left_out == (("Megatron-LM", len(first.head) + 1, len(lines)),)


def named(name: str) -> Version:
    return next(version for version in VERSIONS if version.name == name)


def alternating(first: Sequence[str], second: Sequence[str]) -> list[str]:
    return [line for pair in zip(first, second, strict=True) for line in pair]


@pytest.mark.parametrize("name", ["megatron 2026", "nanotron 2026", "nemo"])
def test_jobs_of_two_trainers_that_alternate_are_told_apart(name: str, tmp_path: Path) -> None:
    first, second = named(name), named("torchtitan 2026")
    steps, others = known_steps(seed=32, count=20), known_steps(seed=33, count=20)
    lines = alternating(lines_of(first, steps)[-20:], lines_of(second, others)[-20:])
    lines = [*first.head, *second.head, *lines, ""]
    log = read(tmp_path, "\n".join(lines))
    check(log, second, others)
    num_facts = len(lines) - 41
    assert log.left_out == ((first.trainer, num_facts + 1, num_facts + 39),)
    assert [one.rule for one in findings(log)] == ["several-jobs"]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("name", ["torchtitan 2026", "deepspeed", "composer", "nanotron 2026"])
def test_ranks_that_state_other_facts_are_of_two_jobs(
    name: str, is_late: bool, tmp_path: Path
) -> None:
    version = named(name)
    steps = known_steps(seed=38, count=20)
    others = [line.replace(str(BATCH), "256") for line in version.head]
    others = [line.replace(str(TOKENS), str(2 * TOKENS)) for line in others]
    head = [f"0: {line}" for line in version.head]
    other_head = [f"1: {line}" for line in others]
    lines = [line for step in steps for line in version.lines(step)]
    body = alternating([f"0: {line}" for line in lines], [f"1: {line}" for line in lines])
    place = len(body) // 2 if is_late else 0
    text = "\n".join([*head, *body[:place], *other_head, *body[place:], ""])
    with pytest.raises(ConfigError, match=r"a log of one job: ranks state .* and "):
        read(tmp_path, text)


def test_facts_of_a_start_without_steps_are_of_none(tmp_path: Path) -> None:
    version = VERSIONS[1]
    world = version.head[0].replace("size: 16", "size: 8")
    lines = [version.head[0], version.head[2], "Killed", world]
    steps = [line for step in known_steps(seed=41, count=20) for line in version.lines(step)]
    log = read(tmp_path, "\n".join([*lines, *steps, ""]))
    assert (log.facts.num_ranks, log.facts.seq_len) == (8, None)


def test_ranks_that_log_other_times_are_of_two_jobs(tmp_path: Path) -> None:
    version = VERSIONS[1]
    steps = known_steps(seed=39, count=20)
    slow = [KnownStep(step.number, step.step_s * 1.5, step.loss) for step in steps]
    lines = alternating(
        [f"0: {line}" for step in steps for line in version.lines(step)],
        [f"1: {line}" for step in slow for line in version.lines(step)],
    )
    log = read(tmp_path, "\n".join([*version.head, *lines, ""]))
    (finding,) = findings(log)
    assert finding.rule == "several-jobs"
    assert "prefix 1 are of another job" in finding.text
    assert "by a factor of 1.5." in finding.text
    # The lines of an earlier start are no measure.
    again = [line.replace("0: ", "1: ") for line in lines[::2]]
    log = read(tmp_path, "\n".join([*version.head, *lines[1::2], *version.head, *again, ""]))
    assert log.other_rank is None


def test_epochs_of_nemo_are_no_starts(tmp_path: Path) -> None:
    version = named("nemo")
    lines = [line for step in known_steps(seed=40, count=100) for line in version.lines(step)]
    for epoch in range(1, 4):
        for place in range(25 * epoch, 25 * epoch + 25):
            old = f"epoch 0, iteration {place + 1}/"
            new = f"epoch {epoch}, iteration {place + 1 - 25 * epoch}/"
            lines[place] = lines[place].replace(old, new)
    log = read(tmp_path, "\n".join([*lines, ""]))
    assert [own.number for own in log.steps] == list(range(1, 101))
    assert not log.restarts


@pytest.mark.parametrize(
    "stamp", ["2026-08-01T10:00:00.123456789Z ", "2026-08-01T10:00:00+02:00 "]
)
def test_a_bar_may_follow_a_container_s_time(stamp: str, tmp_path: Path) -> None:
    lines = "\n".join(hugging_face(known_steps(seed=7, count=200))).replace("\r", "\n")
    log = read(tmp_path, "".join(f"{stamp}{line}\n" for line in lines.split("\n")))
    assert log.trainer == "Hugging Face Trainer"
    assert len(log.steps) > 9


def test_lines_of_the_engine_of_a_trainer_are_of_its_job(tmp_path: Path) -> None:
    steps = known_steps(seed=34, count=30)
    engine = [line for step in steps for line in named("deepspeed").lines(step)][1::2]
    bars = hugging_face(steps)
    log = read(tmp_path, "\n".join([bars[0], *alternating(engine, bars[1:]), ""]))
    assert log.trainer == "DeepSpeed"
    assert not log.left_out


def test_two_trainers_that_state_facts_alike_are_refused(tmp_path: Path) -> None:
    lines = lines_of(VERSIONS[0], known_steps(seed=35, count=20))
    others = [line.replace("(ms): ", "(s): ").replace("size: 16", "size: 8") for line in lines]
    with pytest.raises(ConfigError, match="Megatron-LM and Megatron-DeepSpeed, which state fa"):
        read(tmp_path, "\n".join([*alternating(lines, others), ""]))


def test_a_loss_that_is_no_number_counts_of_any_rank(tmp_path: Path) -> None:
    version = next(own for own in VERSIONS if own.name == "torchtitan 2026")
    steps = known_steps(seed=31, count=20)
    lines = list(version.head)
    for step in steps:
        bad = KnownStep(step.number, step.step_s, float("nan") if step.number > 15 else 2.5)
        without = KnownStep(step.number, step.step_s, -1.0)
        lines += [f"[rank0]:{line}" for line in version.lines(without)]
        lines += [f"[rank7]:{line}" for line in version.lines(bad)]
    log = read(tmp_path, "\n".join([*lines, ""]))
    assert [own.number for own in log.bad_losses] == list(range(16, 21))
    assert log.steps[0].loss == pytest.approx(2.5)


def test_untagged_lines_of_several_ranks_are_refused(tmp_path: Path) -> None:
    version = VERSIONS[1]
    steps = known_steps(seed=6, count=40)
    order = [step for a, b in zip(steps[::2], steps[1::2], strict=True) for step in (b, a)]
    with pytest.raises(ConfigError, match="step numbers go back in 20 of 40 lines"):
        read(tmp_path, "\n".join([*lines_of(version, order), ""]))


@pytest.mark.parametrize("is_new", [False, True])
def test_hugging_face_by_the_clock_of_its_bar(is_new: bool, tmp_path: Path) -> None:
    steps = known_steps(seed=7, count=200)
    log = read(tmp_path, "\n".join([*hugging_face(steps, is_new=is_new), ""]))
    mean_s = sum(step.step_s for step in steps) / len(steps)
    seconds = sum((own.step_s or 0) * own.span for own in log.steps)
    assert seconds / sum(own.span for own in log.steps) == pytest.approx(mean_s, rel=0.02)
    for own in log.steps:
        exact = sum(step.step_s for step in steps[own.number - own.span : own.number])
        assert (own.step_s or 0) * own.span == pytest.approx(exact, abs=1.0)
    assert log.steps[-1].samples_per_s is None
    assert log.facts.batch == BATCH


def test_a_bar_of_less_than_its_clock_can_tell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 50 s of steps"):
        read(tmp_path, "\n".join([*hugging_face(known_steps(seed=8, count=5)), ""]))


@given(seed=st.integers(0, 2**32))
def test_mlperf_blocks_without_their_evaluations(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    random = Random(seed)
    blocks = known_steps(seed, count=8)
    lines = mlperf(blocks)
    del lines[random.randrange(2, len(lines))]
    log = read(tmp_path_factory.getbasetemp(), "\n".join([*lines, ""]))
    assert len(log.steps) >= 6
    for own in log.steps:
        block = blocks[own.number // 10 - 1]
        assert own.step_s == pytest.approx(block.step_s, rel=1e-3)
        assert own.tokens_per_s == pytest.approx(BATCH * SEQ_LEN / block.step_s, rel=1e-3)
        assert own.span == 10


def test_mlperf_states_the_time_between_blocks(tmp_path: Path) -> None:
    log = read(tmp_path, "\n".join([*mlperf(known_steps(seed=9, count=5)), ""]))
    assert log.pause_s == pytest.approx(4 * 33.25, abs=0.01)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[INFO] 0/10, SamplesPerSec=12.5\n" * 20,
            "12.5 samples/s is the mean since the start",
        ),
        ("| elapsed time per iteration (ms): 12\n" * 9, "none of its lines of steps is whole"),
        (
            "{'train_runtime': 99.0, 'train_steps_per_second': 0.25, 'epoch': 1.0}\n",
            "Hugging Face Trainer's 0.25 steps/s is the number of all steps",
        ),
        ("{'loss': 2.5, 'learning_rate': 1e-05, 'epoch': 0.1}\n" * 9, "its lines state losses"),
        ("hello\n", "with steps"),
        (
            "\n".join(line for line in mlperf(known_steps(1, 5)) if "global_batch" not in line),
            "states its global_batch_size",
        ),
    ],
)
def test_what_cannot_be_told_is_refused(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, text)


def test_rates_without_a_batch_stay_rates(tmp_path: Path) -> None:
    version = next(own for own in VERSIONS if own.name == "deepspeed")
    lines = [line for step in known_steps(1, 9) for line in version.lines(step)]
    log = read(tmp_path, "\n".join([*lines, ""]))
    assert log.unit == "samples/s"
    assert log.costs[0] == pytest.approx(known_steps(1, 1)[0].step_s / BATCH)
