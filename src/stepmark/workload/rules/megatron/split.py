"""Which layers each pipeline stage and model chunk has.

Source: megatron-core 0.16.1, transformer/transformer_block.py (get_num_layers_to_build),
transformer_layer.py (get_transformer_layer_offset) and transformer_config.py (which splits are
refused). Compared with a run of megatron-core (tests/data/megatron).
"""

from dataclasses import dataclass

from stepmark.core.errors import ConfigError
from stepmark.workload.rules.megatron.settings import Megatron, Plan

_FIRST, _LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive layers, and what stands before and after them."""

    first_layer: int
    num_layers: int
    has_embedding: bool
    has_head: bool

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)


def split(plan: Plan) -> tuple[tuple[tuple[Chunk, ...], ...], tuple[str, ...]]:
    """Chunks by stage, and notes of what was chosen.

    Where layers do not divide by stages and chunks, but do with embedding and head as one
    each, these take a layer's place. Raises ConfigError where neither holds.
    """
    settings, pp = plan.settings, plan.job.parallel.pp
    chunks = settings.virtual_pipeline_model_parallel_size
    total = plan.model.num_layers
    embedding = settings.account_for_embedding_in_pipeline_split
    loss = settings.account_for_loss_in_pipeline_split
    notes: tuple[str, ...] = ()
    if any(getattr(settings, name) is not None for name in (_FIRST, _LAST)):
        sizes = _uneven(settings, total, pp, chunks)
    else:
        places = pp * chunks
        chosen = not (embedding or loss) and total % places and (total + 2) % places == 0
        if chosen:
            embedding = loss = True
            notes = (
                f"{total} layers + embedding + head = {pp} stages x {chunks} chunks"
                f" x {(total + 2) // places}: embedding and head take a layer's place each"
                " (account_for_embedding_in_pipeline_split and"
                " account_for_loss_in_pipeline_split)",
            )
        counted = total + embedding + loss
        if counted % places:
            raise ConfigError("pp", pp, _allowed(total, pp, chunks))
        sizes = [[counted // places] * chunks for _ in range(pp)]
        sizes[0][0] -= embedding
        sizes[-1][-1] -= loss
    if sizes[0][0] < 0 or sizes[-1][-1] < 0:
        raise ConfigError("pp", pp, f"fewer stages or chunks for {total} layers")
    return _numbered(sizes), notes


def _uneven(settings: Megatron, total: int, pp: int, chunks: int) -> list[list[int]]:
    """First and last stage as told, the others alike."""
    first, last = (getattr(settings, name) for name in (_FIRST, _LAST))
    given = {name: size for name, size in ((_FIRST, first), (_LAST, last)) if size is not None}
    rest, left = total - sum(given.values()), pp - len(given)
    if left < 0 or rest < 0 or bool(rest) != bool(left) or (left and rest % left):
        (name, size), *other = given.items()
        beside = "".join(f", with {one} {value}" for one, value in other)
        allowed = f"what leaves {left} other stages equal parts of {total} layers, not none"
        if left <= 0:
            allowed = f"what adds up to {total} layers of {pp} stages"
        raise ConfigError(name, size, allowed + beside)
    per_stage = [rest // left if left else 0] * pp
    if first is not None:
        per_stage[0] = first
    if last is not None:
        per_stage[-1] = last
    for size in per_stage:
        if size % chunks:
            raise ConfigError(
                "virtual_pipeline_model_parallel_size", chunks, f"a divisor of {size} layers"
            )
    return [[size // chunks] * chunks for size in per_stage]


def _numbered(sizes: list[list[int]]) -> tuple[tuple[Chunk, ...], ...]:
    """Layers run through all stages' first chunks, then through their second ones."""
    pp, chunks = len(sizes), len(sizes[0])
    found: list[list[Chunk]] = [[] for _ in range(pp)]
    layer = 0
    for chunk in range(chunks):
        for stage in range(pp):
            made = Chunk(
                first_layer=layer,
                num_layers=sizes[stage][chunk],
                has_embedding=stage == 0 and chunk == 0,
                has_head=stage == pp - 1 and chunk == chunks - 1,
            )
            found[stage].append(made)
            layer += made.num_layers
    return tuple(tuple(row) for row in found)


def _allowed(total: int, pp: int, chunks: int) -> str:
    fits = [pp for pp in range(1, total + 1) if total % (pp * chunks) == 0]
    with_ends = [pp for pp in range(2, total + 3) if (total + 2) % (pp * chunks) == 0]
    words = f"a number whose product with vpp ({chunks}) divides {total} layers"
    shown = ", ".join(map(str, fits[:8])) or "none"
    also = ", ".join(map(str, with_ends[:8]))
    if also:
        shown += f"; with embedding and head as a layer each {also}"
    return f"{words} ({shown}); or {_way_out(total, pp, chunks)}"


def _way_out(total: int, pp: int, chunks: int) -> str:
    """Flags that make an uneven split, with a number where one of them is enough."""
    uneven = f"an uneven split by --{_FIRST} or --{_LAST}".replace("_", "-")
    for size in range(-(-total // pp), 0, -1):
        last = total - size * (pp - 1)
        if last > 0 and last % chunks == 0 and size % chunks == 0:
            return f"{uneven}, e.g. {last}"
    return uneven
