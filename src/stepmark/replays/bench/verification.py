"""Verify the messages of a program: each once, with data whose right result is known.

A message's data is drawn from its number among those of its communicator (of sends: of its two
ranks), so that a result of another message is wrong, too. An all-to-all-v has equal parts.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from stepmark.cases.comm_case import CommCase
from stepmark.cases.message import RECV, SEND
from stepmark.cases.record import Check
from stepmark.collectives.bench import data
from stepmark.measuring.verify import TORCH_DTYPE, merge
from stepmark.model.collectives import FACTS, ONE_BUFFER, Collective
from stepmark.replays.bench.engine import Program, calls_of, is_message, only_sends
from stepmark.replays.bench.messages import Work, elements, message, peer_of, redop_of
from stepmark.step.rank_program import Step

_NOTHING = Check(max_rel_err=0.0, tolerance=0.0, num_wrong=0, num_compared=0, reference="")


def verify(program: Program, rank: int, backend: str, device: torch.device) -> Check:
    """Run the program's messages once; return what of all that this rank received is wrong."""
    buffers = _CheckedBuffers(rank, backend, device)
    pending: list[tuple[list[Work], list[Callable[[], Check]]]] = []
    checks = [_NOTHING]
    for call in calls_of(program.steps):
        steps = [step for step in (program.steps[index] for index in call) if is_message(step)]
        if not steps:
            continue
        works = program.messenger.issue(steps, buffers)
        pending.append((works, buffers.drain()))
        if not only_sends(steps):
            checks += _ended(*pending.pop())
    for works, left in pending:
        checks += _ended(works, left)
    # The first names the reference: one that compared anything.
    return merge(sorted(checks, key=lambda check: not check.num_compared))


def _ended(works: list[Work], checks: list[Callable[[], Check]]) -> list[Check]:
    for work in works:
        work.wait()
    return [check() for check in checks]


def _check(case: CommCase, index: int, recv: Tensor, number: int, _send: Tensor) -> Check:
    """Check what was received; until then what is sent stays, too."""
    return data.check(case, index, recv, number)


class _CheckedBuffers:
    """Tensors of its own for each message, filled; `drain` returns the checks of the newest."""

    def __init__(self, rank: int, backend: str, device: torch.device) -> None:
        self._rank = rank
        self._backend = backend
        self._device = device
        self._rounds = Counter[object]()
        self._checks: list[Callable[[], Check]] = []

    def pair(self, step: Step) -> tuple[Tensor, Tensor]:
        op = message(step)
        members = sorted(step.members)  # the order of a process group
        case = self._case(step, members)
        index = members.index(self._rank)
        key: object = op.group
        if op.collective in (SEND, RECV):
            index = int(op.collective == RECV)
            peer = peer_of(step, self._rank)
            key = (
                op.group,
                *((self._rank, peer) if op.collective == SEND else (peer, self._rank)),
            )
        send, recv = (
            torch.empty(count, dtype=TORCH_DTYPE[op.dtype], device=self._device)
            for count in elements(op, len(step.members))
        )
        data.poison(recv)
        data.poison(send)
        filled = recv if case.collective in ONE_BUFFER else send
        if case.collective is not Collective.BROADCAST or index == case.root:
            data.fill(case, index, filled, self._rounds[key])
        number = self._rounds[key]
        self._rounds[key] += 1
        self._checks.append(partial(_check, case, index, recv, number, send))
        return send, recv

    def drain(self) -> list[Callable[[], Check]]:
        checks = self._checks
        self._checks = []
        return checks

    def _case(self, step: Step, members: list[int]) -> CommCase:
        op = message(step)
        size = len(members)
        pair = None
        if op.collective in (SEND, RECV):
            collective = Collective.P2P
            size = 2
            pair = (0, 1)
        elif op.collective == Collective.ALL_TO_ALL_V:
            collective = Collective.ALL_TO_ALL
        else:
            collective = Collective(op.collective)
        is_rooted = FACTS[collective].rooted
        return CommCase(
            collective=collective,
            count=op.count,
            dtype=op.dtype,
            num_ranks=size,
            world_size=size,
            redop=redop_of(op, self._backend),
            root=members.index(step.members[op.root or 0]) if is_rooted else -1,
            pair=pair,
            backend=self._backend,
        )
