"""Text that torch's flight-recorder analyzer prints: torchfrtrace, tools/flight_recorder.

Each version since August 2024 prints one block per collective with a problem. The formats are
those of types.py and utils.py in https://github.com/pytorch/pytorch, folder
torch/distributed/flight_recorder/components.
"""

from dataclasses import dataclass
from enum import StrEnum

from stepmark.findings.finding import Evidence

Sizes = tuple[tuple[int, ...], ...]  # dimensions of each tensor


class TraceProblem(StrEnum):
    """What a block states.

    UNDECIDED: dumps are missing, so the analyzer does not decide. NO_ERROR: all ranks made the
    same call, and it did not finish for another reason. MISSING_DUMPS: the analyzer stopped
    because files are missing. ABORTED: it stopped after ten mismatches of a group.
    """

    MISSING_RANKS = "missing ranks"
    MISMATCH = "mismatch"
    UNDECIDED = "undecided"
    NO_ERROR = "no error"
    MISSING_DUMPS = "missing dumps"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchSide:
    """One side of a mismatch. `words`: its value as printed, such as all_reduce or [[1024]].

    ranks: global ranks that made this call; () unknown. is_remainder: these are the ranks that
    the analyzer does not name: each made the expected call, or left no dump.
    """

    ranks: tuple[int, ...]
    words: str
    is_remainder: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMismatch:
    """What differs in one collective.

    error: COLLECTIVE_TYPE_MISMATCH, SIZE_OR_SYNTAX_MISMATCH, COLLECTIVE_STATE_MISMATCH or
    COLLECTIVE_DTYPE_MISMATCH. subject: "collective type", "input sizes", "dtypes", "state", ...,
    "" where the analyzer only names the error. sides: first the call of the rank that the
    analyzer read first, then those that differ from it, which it calls culprits: with two
    sides either may be wrong. A side without words is "" .
    """

    error: str
    subject: str
    sides: tuple[MismatchSide, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """One block. Values are None, "" or () where it does not state them.

    group, description: of the process group ("0", "default_pg"). kind: torch's name without
    backend and peers ("all_reduce", "send"). Ranks are global. expected_ranks: members of the
    group. num_expected: their number, which early versions print alone. state: of the rank
    that the analyzer read first. input_numel, output_numel: elements of all ranks, of an
    all-to-all whose sums differ. is_whole: False where the block is cut.
    """

    problem: TraceProblem
    sequence: int | None
    record_id: int | None
    group: str
    description: str
    backend: str
    kind: str
    expected_ranks: tuple[int, ...]
    num_expected: int | None
    missing_ranks: tuple[int, ...]
    ranks_without_dump: tuple[int, ...]
    state: str
    input_sizes: Sizes | None
    output_sizes: Sizes | None
    input_numel: int | None
    output_numel: int | None
    mismatches: tuple[CallMismatch, ...]
    stack: tuple[str, ...]  # "function at file:line", innermost first
    is_whole: bool
    evidence: tuple[Evidence, ...]  # its first line, then those of ranks and errors


def looks_like_trace_text(head: bytes) -> bool:
    """Return whether a file that begins so has blocks of the analyzer."""
    raise NotImplementedError


def read_trace_text(text: str, file: str) -> tuple[TracedCall, ...]:
    """Return the blocks of a file in its order. Raises ConfigError where none can be read."""
    raise NotImplementedError
