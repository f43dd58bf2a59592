"""Laws of the ledger: it adds up, and every nanosecond has one line."""

import random

import pytest

from stepmark.timeline.ledger import Group, Idle, Ledger, work_of

from .swept_ledger import Event, ledger

NAMES = {
    Group.COMPUTE: ("matmul", "attention"),
    Group.COMM: ("all_gather", "all_reduce"),
    Group.COPIES: ("copy",),
}


def brute_force(events: list[Event], start: int, end: int) -> dict[tuple[Group, str], int]:
    """Decide nanosecond by nanosecond."""
    lines: dict[tuple[Group, str], int] = {}
    for now in range(start, end):
        running = {
            group: next(
                (
                    event.name
                    for _, _, event in sorted(
                        (max(event.start_ns, start), index, event)
                        for index, event in enumerate(events)
                        if event.group is group and event.start_ns <= now < event.end_ns
                    )
                ),
                "",
            )
            for group in NAMES
        }
        if running[Group.COMPUTE]:
            group = Group.OVERLAPPED if running[Group.COMM] else Group.COMPUTE
            key = group, running[Group.COMPUTE]
        elif running[Group.COMM]:
            key = Group.COMM, running[Group.COMM]
        elif running[Group.COPIES]:
            key = Group.COPIES, running[Group.COPIES]
        else:
            key = Group.IDLE, "host"
        lines[key] = lines.get(key, 0) + 1
    return lines


@pytest.mark.parametrize("seed", range(40))
def test_every_nanosecond_has_one_line(seed: int) -> None:
    rng = random.Random(seed)
    events = []
    for _ in range(rng.randrange(12)):
        group = rng.choice(list(NAMES))
        start = rng.randrange(-5, 60)
        events.append(
            Event(group, rng.choice(NAMES[group]), start, start + rng.randrange(0, 25))
        )
    made = ledger(events, 0, 50, lambda first, last: [(Idle.HOST, last - first)])
    assert made.lines == brute_force(events, 0, 50)
    assert sum(made.lines.values()) == made.window_ns == 50
    assert sum(made.total(group) for group in Group) == 50


def test_a_ledger_that_does_not_add_up_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="add up to 5 ns, the window is 6 ns"):
        Ledger(window_ns=6, lines={(Group.IDLE, "host"): 5})


@pytest.mark.parametrize(
    ("kernel", "role", "phase", "work"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "mlp.up", "fwd", "matmul"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "head", "dgrad", "matmul"),
        ("cudnn_native_sdpa_sm90_flash_fprop", "attention.core", "fwd", "attention"),
        ("triton_red_fused__log_softmax_0", "output", "fwd", "loss"),
        ("triton_poi_fused_gelu_1", "block", "fwd", "norm and elementwise"),
        ("multi_tensor_apply_kernel<FusedAdam>", "update", "optim", "optimizer"),
        ("aten::_foreach_norm", "clip", "optim", "optimizer"),
    ],
)  # fmt: skip
def test_work_of_kernels(kernel: str, role: str, phase: str, work: str) -> None:
    assert work_of(kernel, role, phase) == work
