"""From when what the schedule issues beside the computation may run, and until when it may.

PyTorch lets an asynchronous collective or transfer wait for the current stream at the call
(c10d, ProcessGroupNCCL.cpp, syncStream). Source of the rest: megatron-core 0.16.1,
pipeline_parallel/p2p_communication.py (_communicate, batch_p2p_sync). Read only.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from stepmark.workload.pipeline import Act, Action, Span, Tick
from stepmark.workload.rules.megatron.steps import PASSED

_COMPUTES = (Act.FORWARD, Act.BACKWARD, Act.WAIT)
_TRANSFERS = (Act.SEND_FORWARD, Act.RECV_FORWARD, Act.SEND_BACKWARD, Act.RECV_BACKWARD)


def anchored(
    spans: Iterable[Span], beside: Callable[[Action], tuple[str, ...]], *, blocking: bool
) -> tuple[Span, ...]:
    """Spans whose actions beside the computation are after what was computed before.

    beside: names of what an action leaves in flight. blocking: a call of transfers waits for
    all of that (torch.cuda.synchronize) and not only for its own.
    """
    anchors = _Anchors(beside, blocking)
    return tuple(
        replace(span, ticks=tuple(tuple(anchors.tick(tick)) for tick in span.ticks))
        for span in spans
    )


@dataclass(slots=True)
class _Anchors:
    """begun: the step has computed or waited, so there is something to be after."""

    beside: Callable[[Action], tuple[str, ...]]
    blocking: bool
    begun: bool = False
    flying: dict[str, None] = field(default_factory=dict)

    def tick(self, tick: Tick) -> Iterator[Action]:
        for action, following in zip(tick, (*tick[1:], None), strict=True):
            moves = action.act in _TRANSFERS
            computes = action.act in _COMPUTES or (moves and self.blocking)
            yield action if computes or not self.begun else replace(action, after=(PASSED,))
            self.begun = self.begun or computes
            if not self.blocking:
                continue
            if action.act is Act.FORWARD and action.edge:  # waits for its own parameters
                for name in self.beside(Action(act=Act.GATHER, chunk=action.chunk)):
                    self.flying.pop(name, None)
            self.flying.update(dict.fromkeys(self.beside(action)))
            if moves and self.flying and not (following and following.fused):
                yield Action(act=Act.WAIT, after=tuple(self.flying))
                self.flying.clear()
