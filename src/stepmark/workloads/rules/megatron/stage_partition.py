"""Partition of the layers into pipeline stages and model chunks.

Source: megatron-core 0.16.1, transformer/transformer_block.py (get_num_layers_to_build),
transformer_layer.py (get_transformer_layer_offset) and transformer_config.py (refused
splits). Compared with a run of megatron-core (tests/data/megatron).

Megatron-LM refuses layers that do not divide; its users give a split. Where none is given the
one of NVIDIA's recipes is taken: equal stages or chunks, and a last one with what they leave.
"""

from dataclasses import dataclass, replace

from stepmark.ground.errors import ConfigError
from stepmark.workloads.rules.megatron.pipeline_layout import sizes_of, written
from stepmark.workloads.rules.megatron.plan import Plan
from stepmark.workloads.rules.megatron.settings import Megatron

_FIRST = "decoder_first_pipeline_num_layers"
_LAST = "decoder_last_pipeline_num_layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive layers, with the embedding before or the head after them.

    has_norm: the last norm, which is with the head, or in models with multi-token prediction
    behind the last layer (has_final_layernorm_in_this_stage). num_mtp: modules of multi-token
    prediction, which are with the head and are counted on behind the last layer.
    """

    first_layer: int
    num_layers: int
    has_embedding: bool
    has_head: bool
    has_norm: bool
    num_mtp: int = 0

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def units(self) -> range:
        """Layers and modules of multi-token prediction."""
        return range(self.first_layer, self.layers.stop + self.num_mtp)


def partition(plan: Plan) -> tuple[tuple[tuple[Chunk, ...], ...], tuple[str, ...]]:
    """Return chunks by stage, and notes of choices that the settings leave open.

    Where layers do not divide by stages and chunks, but do with embedding and head as one
    layer each, these take a layer's place; else the last stage has what the others leave, or
    where its chunks would differ the last chunk. Raises ConfigError where no sizes exist.
    """
    settings = plan.settings
    pp = plan.job.parallel.pp
    chunks = settings.virtual_pipeline_model_parallel_size
    total = plan.model.num_layers
    embedding = settings.account_for_embedding_in_pipeline_split
    loss = settings.account_for_loss_in_pipeline_split
    notes: tuple[str, ...] = ()
    if layout := settings.pipeline_model_parallel_layout:
        sizes = sizes_of(layout, total, plan.model.num_mtp_layers, pp)
    elif any(getattr(settings, name) is not None for name in (_FIRST, _LAST)):
        sizes = _uneven(settings, total, pp, chunks)
    else:
        places = pp * chunks
        counts_ends = not (embedding or loss) and total % places and (total + 2) % places == 0
        if counts_ends:
            embedding = loss = True
            notes = (
                f"{total} layers + embedding + head = {pp} stages x {chunks} chunks"
                f" x {(total + 2) // places}: embedding and head take a layer's place each"
                "; Megatron-LM refuses this without account_for_embedding_in_pipeline_split"
                " and account_for_loss_in_pipeline_split",
            )
        counted = total + embedding + loss
        last = 0 if embedding or loss else _last_stage(total, pp, chunks)
        if counted % places and last:
            sizes = _uneven(
                replace(settings, decoder_last_pipeline_num_layers=last), total, pp, chunks
            )
            notes = (
                f"{total} layers do not divide by {pp} stages: the last stage has {last},"
                f" the others {sum(sizes[0])} each; Megatron-LM refuses this without"
                f" --{_LAST} {last}".replace("_", "-"),
            )
        elif counted % places:
            counts_an_end = embedding or loss
            by_chunk = _last_chunk(total, places) if chunks > 1 and not counts_an_end else []
            if not by_chunk:
                raise ConfigError("pp", pp, _allowed(total, pp, chunks))
            sizes = [by_chunk[stage::pp] for stage in range(pp)]
            notes = (
                f"{total} layers do not divide by {pp} stages x {chunks} chunks: a chunk has"
                f" {by_chunk[1]}, the first {by_chunk[0]}, the last {by_chunk[-1]}; Megatron-LM"
                f" refuses this without --pipeline-model-parallel-layout '{written(by_chunk)}'",
            )
        else:
            sizes = [[counted // places] * chunks for _ in range(pp)]
            sizes[0][0] -= embedding
            sizes[-1][-1] -= loss
    if sizes[0][0] < 0 or sizes[-1][-1] < 0:
        raise ConfigError("pp", pp, f"smaller, or vpp: {total} layers are too few")
    return _numbered(sizes, plan.model.num_mtp_layers), notes


def _uneven(settings: Megatron, total: int, pp: int, chunks: int) -> list[list[int]]:
    """Return the given sizes of first and last stage, and equal ones of the others."""
    first, last = (getattr(settings, name) for name in (_FIRST, _LAST))
    sizes = {name: size for name, size in ((_FIRST, first), (_LAST, last)) if size is not None}
    rest = total - sum(sizes.values())
    left = pp - len(sizes)
    if left < 0 or rest < 0 or bool(rest) != bool(left) or (left and rest % left):
        (name, size), *other = sizes.items()
        also = "".join(f", with {flag} {value}" for flag, value in other)
        allowed = f"a number that leaves equal parts of {total} layers, not none, to the others"
        if left <= 0:
            allowed = f"a number that adds up to {total} layers over pp {pp}"
        raise ConfigError(name, size, allowed + also)
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


def _numbered(sizes: list[list[int]], num_mtp: int) -> tuple[tuple[Chunk, ...], ...]:
    """Number the layers: they run through all stages' first chunks, then the second ones.

    Without a layout multi-token prediction is in the last chunk (multi_token_prediction.py,
    get_mtp_num_layers_to_build).
    """
    pp = len(sizes)
    chunks = len(sizes[0])
    total = sum(map(sum, sizes))
    stages: list[list[Chunk]] = [[] for _ in range(pp)]
    layer = 0
    for number in range(chunks):
        for stage in range(pp):
            is_last = stage == pp - 1 and number == chunks - 1
            size = sizes[stage][number]
            has_last_layer = size > 0 and layer + size == total
            chunk = Chunk(
                first_layer=layer,
                num_layers=size,
                has_embedding=stage == 0 and number == 0,
                has_head=is_last,
                has_norm=has_last_layer if num_mtp else is_last,
                num_mtp=num_mtp if is_last else 0,
            )
            stages[stage].append(chunk)
            layer += chunk.num_layers
    return tuple(tuple(row) for row in stages)


def _allowed(total: int, pp: int, chunks: int) -> str:
    if pp * chunks > total + 2:
        most = (total + 2) // chunks
        return f"at most {most} with vpp {chunks}: {total} layers, embedding, head"
    fits = [pp for pp in range(1, total + 1) if total % (pp * chunks) == 0]
    with_ends = [pp for pp in range(2, total + 3) if (total + 2) % (pp * chunks) == 0]
    words = f"a number whose product with vpp ({chunks}) divides {total} layers"
    examples = ", ".join(map(str, fits[:8])) or "none"
    also = ", ".join(map(str, with_ends[:8]))
    if also:
        examples += f"; with embedding and head as a layer each {also}"
    uneven = f"an uneven split by --{_FIRST} or --{_LAST}".replace("_", "-")
    return f"{words} ({examples}); or {uneven}"


def _last_chunk(total: int, places: int) -> list[int]:
    """Return the layers of each chunk, of which the last has what the others leave; []: none.

    As in NVIDIA's recipes of DeepSeek-V3 and Kimi K2 (NVIDIA-NeMo/Megatron-Bridge at 067f987,
    recipes/kimi/h100/kimi_k2.py, perf_recipes/deepseek/h100/deepseek_v3.py): of 61 layers 15
    chunks of 4 and one of 1, or 7 of 8 and one of 5, or 1, then 30 of 2 and a last one of none.
    """
    size = -(-total // places)
    last = total - size * (places - 1)
    first = size + min(last, 0)
    if first < 0:
        return []
    return [first, *[size] * (places - 2), max(last, 0)]


def _last_stage(total: int, pp: int, chunks: int) -> int:
    """Return the layers of a last stage with which the others have equally many; 0: none.

    As large as the others can be, as in NVIDIA's recipe of DeepSeek-V3: 15 stages of 4 layers
    and one of 1 (NVIDIA-NeMo/Megatron-Bridge, recipes/deepseek/deepseek_v3.py).
    """
    for size in range(-(-total // pp), 0, -1):
        last = total - size * (pp - 1)
        if last > 0 and last % chunks == 0 and size % chunks == 0:
            return last
    return 0
