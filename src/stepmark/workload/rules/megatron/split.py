"""Which layers each pipeline stage and model chunk has.

Source: megatron-core 0.16.1, transformer/transformer_block.py (get_num_layers_to_build) and
transformer_layer.py (get_transformer_layer_offset). Compared with
a run of megatron-core (tests/data/megatron).
"""

from dataclasses import dataclass

from stepmark.core.errors import ConfigError
from stepmark.workload.rules.megatron.settings import Megatron, Plan


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
    if _is_uneven(settings):
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
            raise ConfigError("pp", pp, _allowed(total, chunks))
        sizes = [[counted // places] * chunks for _ in range(pp)]
        sizes[0][0] -= embedding
        sizes[-1][-1] -= loss
    if sizes[0][0] < 0 or sizes[-1][-1] < 0:
        raise ConfigError("pp", pp, f"fewer stages or chunks for {total} layers")
    return _numbered(sizes), notes


def _is_uneven(settings: Megatron) -> bool:
    return (
        settings.decoder_first_pipeline_num_layers is not None
        or settings.decoder_last_pipeline_num_layers is not None
    )


def _uneven(settings: Megatron, total: int, pp: int, chunks: int) -> list[list[int]]:
    """First and last stage as told, the others alike."""
    told = {
        0: settings.decoder_first_pipeline_num_layers,
        pp - 1: settings.decoder_last_pipeline_num_layers,
    }
    known = {stage: size for stage, size in told.items() if size is not None}
    rest, left = total - sum(known.values()), pp - len(known)
    if rest < 0 or (rest % left if left else rest):
        raise ConfigError(
            "decoder_first/last_pipeline_num_layers",
            " and ".join(map(str, known.values())),
            f"what leaves {left} other stages equal parts of {total} layers",
        )
    per_stage = [known.get(stage, rest // left if left else 0) for stage in range(pp)]
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


def _allowed(total: int, chunks: int) -> str:
    fits = [pp for pp in range(1, total + 1) if total % (pp * chunks) == 0]
    with_ends = [pp for pp in range(2, total + 3) if (total + 2) % (pp * chunks) == 0]
    words = f"a number whose product with vpp ({chunks}) divides {total} layers"
    shown = ", ".join(map(str, fits[:8])) or "none"
    also = ", ".join(map(str, with_ends[:8]))
    if also:
        shown += f"; with embedding and head as a layer each {also}"
    return f"{words} ({shown})"
