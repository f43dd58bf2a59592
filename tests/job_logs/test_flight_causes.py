"""Flight recorder: the named cause of real, forked and simulated jobs is the rank at fault."""

import os
import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests import fork_server

from stepmark.findings.finding import Finding, Severity
from stepmark.findings.stalls import Cause, causes
from stepmark.job_logs.flight_recorder import parse, read_flight_recorder
from stepmark.job_logs.flight_recorder.findings import findings
from stepmark.job_logs.flight_recorder.groups import groups_of
from stepmark.job_logs.flight_recorder.waits import shown_by

from .flight_samples import dump, entry, write
from .flight_simulator import FAULTS, Job, random_job

REAL = Path(__file__).parents[1] / "data" / "faults"
ROOT = Path(__file__).parents[2]


def problems(paths: list[Path]) -> list[Finding]:
    dumps = read_flight_recorder(sorted(paths))
    return [one for one in findings(dumps) if one.severity is Severity.PROBLEM]


DAMAGE = ("none", "one dump lost", "two dumps lost", "no members")


def simulated(seed: int, damage: str) -> tuple[Job, bool, list[Cause]]:
    """Run a random job; return it, whether its dumps are gloo's, and the causes found."""
    generator = random.Random(seed)
    job = random_job(generator, FAULTS[seed % len(FAULTS)])
    job.run()
    is_gloo = generator.random() < 0.2
    options: dict[str, Any] = {"is_gloo": True}
    if not is_gloo:
        buffer = generator.choice((10_000, 10_000, 4))
        options = {"has_starts": generator.random() < 0.7, "buffer": buffer}
    by_rank = job.dumps(generator, **options)
    for _ in range(DAMAGE.index(damage) % 3):
        del by_rank[generator.choice(list(by_rank))]
    if damage == "no members":
        by_rank = {rank: held | {"pg_config": {}} for rank, held in by_rank.items()}
    dumps = [
        parse(pickle.dumps(held), f"rank{rank}", rank=rank) for rank, held in by_rank.items()
    ]
    problem = Severity.PROBLEM
    return (
        job,
        is_gloo,
        [one for one in causes(*shown_by(groups_of(dumps))) if one.severity is problem],
    )


def verdict(job: Job, is_gloo: bool, cause: Cause) -> str:
    if cause.ranks == {job.wrong}:
        return "named"
    if cause.ranks:
        is_right = cause.is_likely and job.wrong in cause.suspects
        return "one of two" if is_right else "wrong"
    if job.wrong in cause.suspects:
        return "suspected"
    # gloo does not record transfers: the text says that a rank may wait in one.
    is_proven = cause.suspects and cause.rule != "failure-wait"
    has_transfers = any(call.pair for program in job.programs for call in program)
    return "wrong" if is_proven and not (is_gloo and has_transfers) else "unknown"


def check_programs(seeds: range, damage: str = "none") -> Counter[str]:
    shares: Counter[str] = Counter()
    for seed in seeds:
        job, is_gloo, found = simulated(seed, damage)
        verdicts = {verdict(job, is_gloo, cause) for cause in found}
        assert "wrong" not in verdicts, (seed, job.fault, job.wrong, found)
        if job.fault == "none":
            assert not found, (seed, found)
        elif any(job.open(rank) for rank in range(job.size)) or found:
            order = ("named", "one of two", "suspected", "unknown")
            shares[next((word for word in order if word in verdicts), "nothing found")] += 1
    return shares


def test_no_wrong_rank_is_named_in_random_programs() -> None:
    shares = check_programs(range(600))
    total = sum(shares.values())
    assert total > 350
    assert shares["named"] >= 0.45 * total, shares
    assert shares["nothing found"] <= 0.03 * total, shares


@pytest.mark.parametrize("damage", DAMAGE[1:])
def test_no_wrong_rank_is_named_without_all_dumps(damage: str) -> None:
    shares = check_programs(range(1000, 1100), damage)
    assert shares["named"] > 20, shares


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE[1:])
def test_no_wrong_rank_is_named_without_all_dumps_of_many_jobs(damage: str) -> None:
    shares = check_programs(range(30_000, 32_000), damage)
    assert shares["named"] > 400, shares


@pytest.mark.slow
def test_no_wrong_rank_is_named_in_many_random_programs() -> None:
    shares = check_programs(range(10_000, 30_000))
    assert shares["named"] >= 0.45 * sum(shares.values())


# Dumps of real NCCL ranks; the README of the folder says what each job does.


@pytest.mark.parametrize("fault", ["missing", "missing_warn", "missing_quiet", "host_only"])
def test_real_rank_that_sleeps_is_named(fault: str) -> None:
    (held,) = problems(list((REAL / fault).glob("dump*")))
    assert held.rule == "failure-missing-rank"
    assert held.text.startswith("Rank 1 did not join a call")
    assert "It waits for no other rank and is likely the cause" in held.text
    # With two ranks, one that makes a call too many leaves the same dumps.
    assert "unless rank 0, alone in it, makes a call too many" in held.text
    assert "(started, timed out)" in held.text
    assert [line.text[:6] for line in held.evidence] == ["rank 0", "rank 1"]


def test_real_groups_in_opposite_order_are_a_deadlock_with_its_edges() -> None:
    (held,) = problems(list((REAL / "group_order").glob("dump*")))
    assert held.rule == "failure-deadlock"
    assert "rank 0 waits in collective 4 of group 1" in held.text
    assert "rank 1 waits in collective 4 of group 2" in held.text


def test_real_order_is_a_mismatch_and_the_hang_its_consequence() -> None:
    (held,) = problems(list((REAL / "order").glob("dump*")))
    assert held.rule == "call-mismatch"
    assert "2 collectives from 4 to 5 of group 0 default_pg" in held.text
    (waits,) = held.consequences
    assert "in collective 6 of group 0 default_pg" in waits.text
    assert "likely as a consequence" in waits.text


def test_real_roots_that_differ_are_not_recorded_and_the_text_says_so() -> None:
    (held,) = problems(list((REAL / "root").glob("dump*")))
    assert held.rule == "failure-not-completed"
    assert "Collective 4 is a broadcast, whose root is not recorded" in held.text


def test_real_healthy_job_has_no_finding() -> None:
    dumps = read_flight_recorder(sorted((REAL / "healthy").glob("dump*")))
    assert findings(dumps) == []


# Examples


def test_a_rank_without_a_dump_may_be_the_cause(tmp_path: Path) -> None:
    waits = entry(2) | {"state": "started"}
    dumps = {rank: dump([entry(1), waits], 3) for rank in (0, 1)}
    (held,) = problems(write(tmp_path, dumps))
    assert held.rule == "failure-wait"
    assert "rank 2 may be the cause or a victim, rank 2 without a dump" in held.text


def test_unknown_members_are_never_all_there(tmp_path: Path) -> None:
    waits = entry(1, process_group=("7", "undefined"), state="started")
    dumps = {rank: dump([entry(1), waits], 4) for rank in (0, 1)}
    dumps[2] = dump([entry(1)], 4)
    (held,) = problems(write(tmp_path, dumps))
    assert held.rule == "failure-wait"
    assert "the members of the group are not listed: another rank may be missing" in held.text
    assert "no rank is missing" not in held.text


def test_a_chain_of_groups_ends_at_the_rank_that_waits_for_nobody(tmp_path: Path) -> None:
    # Rank 0 waits for 1 in group 1, 1 for 2 in group 2; rank 2 has stopped.
    config = {
        name: {"name": name, "desc": name, "ranks": ranks}
        for name, ranks in (("0", "[0, 1, 2]"), ("1", "[0, 1]"), ("2", "[1, 2]"))
    }
    fronts = {0: "1", 1: "2"}
    dumps = {2: dump([entry(1)], 3, pg_config=config)}
    for rank, group in fronts.items():
        call = entry(1, process_group=(group, group), pg_id=int(group), state="started")
        dumps[rank] = dump([entry(1), call], 3, pg_config=config)
    (held,) = problems(write(tmp_path, dumps))
    assert held.rule == "failure-missing-rank"
    assert held.text.startswith("Rank 2 did not join a call")
    assert "is likely the cause" in held.text
    assert "collective 1 of group 2" in held.text
    assert "in which rank 1 waits" in held.text
    assert "victim: rank 0" in held.text


# Four forked gloo ranks per fault


@pytest.mark.ranks
@pytest.mark.alone  # its faults are delays
def test_forked_gloo_ranks(tmp_path: Path) -> None:
    job_words = ["tests.job_logs.gloo_faults", str(tmp_path)]
    with (tmp_path / "output").open("w") as file:
        streams = (file.fileno(), file.fileno())
        job = fork_server.server().fork_command(job_words, os.environ, str(ROOT), streams)
        assert job.wait(300) == 0
    texts = {}
    for fault in ("healthy", "missing", "sub_group", "dtype", "order", "group_order"):
        texts[fault] = [one.text for one in problems(list(tmp_path.glob(f"{fault}_rank*")))]
    for fault in ("size", "skip", "splits", "pair"):
        texts[fault] = [one.text for one in problems(list(tmp_path.glob(f"{fault}_rank*")))]
    assert texts["healthy"] == texts["splits"] == []  # gloo does not record splits
    for fault, who in (("missing", "Rank 2"), ("sub_group", "Rank 3"), ("skip", "Rank 1")):
        assert texts[fault][0].startswith(f"{who} did not join a call"), texts[fault]
        assert "and is likely the cause" in texts[fault][0]
    assert texts["pair"][0].startswith("Ranks 0-1 did not join a call")
    assert "and are maybe the cause" in texts["pair"][0]
    for fault, words in (("size", "Rank 1"), ("dtype", "Rank 1"), ("order", "Rank 3")):
        assert f"{words} differs from all others" in texts[fault][0]
    assert "all cycles lead through rank 2" in texts["group_order"][0]
    assert all(len(found) <= 1 for found in texts.values())
    # Without the dump of the rank at fault, it is unknown.
    (tmp_path / "missing_rank2").unlink()
    (held,) = problems(list(tmp_path.glob("missing_rank*")))
    assert held.rule == "failure-wait"
