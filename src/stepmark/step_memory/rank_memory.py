"""Bytes of a training step on one rank, by purpose, when most are allocated."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on a rank of a pipeline stage, by purpose when most are allocated."""

    stage: int = 0
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    gathered_bytes: int = 0  # weights and gradients on the way, or autocast's copies of weights
    activations_bytes: int  # saved from forward to backward
    working_bytes: int  # gradients of activations, what is recomputed, rotary tables
    head_bytes: int  # logits, their log-softmax and gradient
    rounding_bytes: int = 0  # of blocks that are larger than their tensors
    reserved_bytes: int = 0  # segments, at most; 0: not estimated
    resting_bytes: int = 0  # of these between steps; 0: not estimated

    @property
    def kinds(self) -> dict[str, int]:
        """Return the bytes that are allocated by purpose, without the suffix."""
        own = asdict(self)
        del own["stage"], own["reserved_bytes"], own["resting_bytes"]
        return {name.removesuffix("_bytes"): size for name, size in own.items()}

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes of all blocks, torch's max_memory_allocated()."""
        return sum(self.kinds.values())


# Of the bytes of passes, which come and go, torch's allocator reserves this much more: chosen
# on published layouts of nanotron (validation/published_steps.py memory).
_FRAGMENTS = 0.15


def with_fragments(state: int, passing: int) -> int:
    """Return the bytes that are reserved for those that stay and those that come and go."""
    return state + round((1 + _FRAGMENTS) * passing)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMemory:
    """Bytes of one model chunk's passes over a micro-batch.

    saved: from its forward pass to its backward pass. working: more in its backward pass.
    head: more for logits and loss, in either pass; 0: it has none. copied: more in either pass,
    which is on its way to the host or back.
    """

    saved: int
    working: int
    head: int = 0
    copied: int = 0


def fullest(
    passes: Iterable[tuple[int, bool]], chunks: Sequence[ChunkMemory]
) -> Mapping[str, int]:
    """Return activations, working and head bytes when they are most, over a stage's passes.

    passes: (chunk, whether it is a forward pass), in the order in which they run.
    """
    saved = 0
    most = (0, 0, 0)
    for number, is_forward in passes:
        chunk = chunks[number]
        saved += chunk.saved if is_forward else 0
        working = 0 if is_forward else max(0, chunk.working - chunk.head)
        working += chunk.copied
        if saved + working + chunk.head > sum(most):
            most = saved, working, chunk.head
        saved -= 0 if is_forward else chunk.saved
    return dict(zip(("activations", "working", "head"), most, strict=True))
