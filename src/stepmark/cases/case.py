"""Case of an operator: one measurement to make. The content of a case is its identity."""

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from stepmark.cases.fields import Role, field_of, identity
from stepmark.ground.dtypes import DType
from stepmark.model.ops import FAMILY_OF, Op, Phase
from stepmark.model.ops.fields import identity_fields

# A sustained rate needs this much work of its own kernel before the first sample.
SOAK_S = 2.0
# At most. At the power limit two runs then differ by 1.0 %, after 3 s by 0.7 % (H200).
SAMPLE_S = 1.5
# Of the time that a budget leaves for soak and samples, at most this share is soak.
SOAK_SHARE = 0.3


class Rate(StrEnum):
    """How hard the device works while it is timed.

    burst: at most 20 ms of work after 1 s idle. sustained: after a soak of its kernel. half:
    10 ms of work, then idle as long, again and again: full clock at a known load.
    """

    BURST = "burst"
    SUSTAINED = "sustained"
    HALF = "half"


class ClockName(StrEnum):
    """Timing method of operators; docs/definitions.md says what each includes."""

    AUTO = "auto"
    ROTATE = "event-rotate"
    FLUSH = "event-flush"
    HOT = "event-hot"
    GRAPH = "graph-rotate"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Place of an operator in a model. Several labels may share one case."""

    model: str = ""
    role: str = ""
    phase: Phase | None = None
    # How often this operator runs in one forward and backward pass of one layer (or of the
    # head, loss or optimizer) for one microbatch.
    count: int = 1
    # The same in a whole step of one rank and one micro-batch; None where no model has it.
    per_step: int | None = None
    mbs: int | None = None


def identity_hash(identity: object) -> str:
    """Return the SHA-256 of the canonical JSON of an identity."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), default=identity_fields)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCase:
    """One operator: how it is run, how it is timed."""

    kind: ClassVar[str] = "op"  # the tag in plan.jsonl and the key of the bench
    op: Op = field_of(Role.ELSEWHERE)
    backend: str = field_of(Role.SETTING)
    device: str = field_of(Role.ELSEWHERE, "cuda")  # or cpu
    num_ranks: int = field_of(Role.STRICT, 1)
    clock: ClockName = field_of(Role.SETTING, ClockName.AUTO)
    rate: Rate = field_of(Role.STRICT, Rate.SUSTAINED, name="rate_kind")
    # Places in models that this measurement stands for.
    labels: tuple[Label, ...] = field_of(None, ())
    # e.g. "1/64" when the shape is a scaled-down stand-in; shown in every row.
    scale: str = field_of(None, "")

    @property
    def family(self) -> str:
        return FAMILY_OF[type(self.op)]

    @property
    def dtype(self) -> DType:
        return self.op.dtype

    @property
    def case_id(self) -> str:
        """SHA-256 of the canonical JSON of what is measured and how. Labels do not count."""
        return identity_hash({"family": self.family, **identity(self)})
