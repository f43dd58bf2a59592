"""Bubbles of torch's pipeline schedules, by their closed forms."""

import pytest
from validation.pipeline_bubbles import Drill, simulated_s

from stepmark.model.parallel import PipelineSchedule as Schedule

# In forward passes of a whole rank, with F for each of a stage's three passes.
BUBBLES = {
    (Schedule.ONE_F_ONE_B, 1): lambda pp: 3 * (pp - 1),
    (Schedule.GPIPE, 1): lambda pp: 3 * (pp - 1),
    (Schedule.INTERLEAVED, 2): lambda pp: 3 * (pp - 1) / 2,
    (Schedule.INTERLEAVED, 3): lambda pp: 3 * (pp - 1) / 3,
    (Schedule.ZB1P, 1): lambda pp: pp - 1,  # ZB-H1: arXiv:2401.10241, table 1
    (Schedule.ZB1P, 2): lambda pp: (pp - 1) / 2,
    (Schedule.ZBV, 2): lambda pp: (pp - 1) / 2,  # of the first stage, whose pass is not split
    (Schedule.DUALPIPE_V, 2): lambda pp: pp - 1,
}


@pytest.mark.parametrize(("schedule", "stages"), BUBBLES)
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_bubbles_are_those_of_the_schedules(schedule: Schedule, stages: int, pp: int) -> None:
    pass_s = 1 / stages
    drill = Drill(
        schedule=schedule,
        pp=pp,
        num_microbatches=2 * pp,
        stages_per_rank=stages,
        forward_s=pass_s,
        input_s=pass_s,
        weight_s=pass_s,
    )
    bubble_s = simulated_s(drill) - drill.busy_s
    assert bubble_s == pytest.approx(BUBBLES[schedule, stages](pp), rel=1e-6)
    assert bubble_s == pytest.approx(3 * (pp - 1) * schedule.bubble(stages), rel=1e-6)


@pytest.mark.parametrize("weight_s", [0.5, 1.0])
def test_longer_gradients_of_weights_fill_more_of_zb1p(weight_s: float) -> None:
    """(p - 1)(F + I - W): arXiv:2401.10241, table 1."""
    drill = Drill(
        schedule=Schedule.ZB1P,
        pp=4,
        num_microbatches=12,
        stages_per_rank=1,
        forward_s=1.0,
        input_s=1.2,
        weight_s=weight_s,
    )
    bubble_s = simulated_s(drill) - drill.busy_s
    assert bubble_s == pytest.approx(3 * (1.0 + 1.2 - weight_s), rel=1e-6)
