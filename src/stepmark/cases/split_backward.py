"""What a backward pass in two parts, of pipelines with zero bubbles, cannot be combined with.

torch 2.13, torch/distributed/pipelining/_backward.py: each weight's gradient comes from a run
of the autograd graph of its own, after the one for the stage's input.
"""

from collections.abc import Iterator

from stepmark.cases.training import CompileScope, Recompute
from stepmark.model.model import ModelConfig
from stepmark.model.parallel import PipelineSchedule

_OTHERS = "1f1b, interleaved or gpipe"


def split_refusals(
    schedule: PipelineSchedule,
    model: ModelConfig,
    *,
    recompute: Recompute,
    compiles: CompileScope,
    is_narrow: bool,
    reshard: str,
) -> Iterator[tuple[str, object, str]]:
    """Yield field, value and rule.

    is_narrow: products in FP8 or narrower. reshard: of FSDP after a forward pass; no without.
    """
    if not schedule.splits_backward:
        return
    if reshard != "no":
        # stage_backward_input looks for the parameters of that moment, which are those of the
        # shards then; the graph does not have them, and their gradients are missing.
        what = f"no with {schedule}: torch would drop the gradients of resharded weights"
        yield "reshard_after_forward", reshard, what
    if recompute is not Recompute.NONE:
        # Each run of the graph would recompute what it reaches.
        yield "recompute", recompute, f"none with {schedule}, which would recompute many times"
    if compiles is not CompileScope.NONE:
        allowed = f"none with {schedule}: torch does not split a compiled backward pass"
        yield "compile", compiles, allowed
    if is_narrow:
        # Those are functions of their own, which compute both gradients whenever they run.
        what = "which would compute both gradients of a narrow product twice"
        yield "pp_schedule", schedule, f"{_OTHERS}: not {schedule}, {what}"
    words = {
        "sinks": model.has_sinks,
        "an indexer": bool(model.mla and model.mla.indexer),
        "scans": any(layer.scan for layer in model.pattern),
    }
    if has := [word for word, is_there in words.items() if is_there]:
        what = f"since {model.name} has {', '.join(has)}, whose weights are not split"
        yield "pp_schedule", schedule, f"{_OTHERS}, {what}"
