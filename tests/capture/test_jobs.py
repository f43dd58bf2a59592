"""Small jobs, captured on fake ranks, send what four real ranks of the same code send.

Of every message: collective, ranks, number of elements, type, and order. See on_ranks.
"""

import importlib
from pathlib import Path
from typing import Any

import pytest
from tests.capture import on_ranks
from tests.capture.test_truth import captured, without_phase
from tests.ranks_pool import Pool
from tests.selected import parameters, slowly

from stepmark.capture.run import capture

NUM_RANKS = 4
FILES = Path(__file__).with_name("jobs")
PACKAGE = "tests.capture.jobs"
JOBS = sorted(path.stem for path in FILES.glob("[a-z]*.py"))
# Other models of transformers send gradients in buckets, too; test_truth has tp of sequences.
ALSO_ELSEWHERE = ("hf_vit", "tp_sequence")
Message = dict[str, Any]


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest) -> list[dict[str, list[list[Message]]]]:
    """By rank, then selected job: the messages of the setup and of each step."""
    names = sorted(parameters(request, "name"))
    # transformers takes as long as torch; each job with it imports more of it.
    imports = [f"{PACKAGE}.{name}" for name in names if name.startswith("hf_")]
    with Pool(NUM_RANKS, environment=on_ranks.ENVIRONMENT, imports=imports) as pool:
        return pool.run(on_ranks.sent_by_jobs, names, timeout_s=60)


def test_there_are_many_jobs() -> None:
    assert len(JOBS) >= 25


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from imports of a job
@pytest.mark.parametrize("name", slowly(JOBS, ALSO_ELSEWHERE))
def test_a_job_sends_what_real_ranks_send(
    name: str, real: list[dict[str, list[list[Message]]]]
) -> None:
    job = importlib.import_module(f"{PACKAGE}.{name}")
    counts = getattr(job, "TOKENS_PER_EXPERT", ())
    for rank in (0, NUM_RANKS - 1):
        if rank and name.startswith("hf_"):
            continue  # their ranks are alike
        parts = real[rank][name]
        made = capture(job.build, NUM_RANKS, rank, file=job.__file__, tokens_per_expert=counts)
        stage = made.stage_of(rank) if len(made.stages) > 1 else 0
        *setup, step = parts
        assert step or any(setup)
        assert without_phase(captured(made, rank, made.expand(stage))) == step
        before = captured(made, rank, made.expand(stage, setup=True))
        assert without_phase(before) == [one for part in setup for one in part]
