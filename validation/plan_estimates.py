"""How far estimates of `stepmark plan` are from simulations, and whether they find the best.

    python validation/plan_estimates.py [GROUPS]

Groups of a model, a device, a number of GPUs, a batch, a framework and ranges of degrees are
drawn by a seed. Of each group the layouts are estimated, and simulated as long as their
estimate may be too large by a wide margin, so that the fastest layout is known; some others are
simulated by chance. Printed are the errors by axis, and at which place by estimate the fastest
layouts are.
"""

import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from stepmark.ground.errors import ConfigError
from stepmark.layouts.cluster import Cluster
from stepmark.layouts.layout_space import LayoutSpace
from stepmark.layouts.layout_work import Searcher, Simulated
from stepmark.layouts.plan_options import RECOMPUTED, PlanOptions

SEED = 20261129
_MODELS = {
    "llama-3.1-8b": (16, 64, 256),
    "llama-3.1-70b": (64, 256),
    "llama-3.1-405b": (512,),
    "qwen3-30b-a3b": (32, 128),
    "deepseek-v2-lite": (32, 64),
    "deepseek-v3": (512,),
}
_SEQUENCES_PER_GPU = (1, 2, 4, 8)
_CLUSTERS = {"h100-sxm": "dgx-h100", "a100-80gb-sxm": "dgx-a100", "b200": "dgx-b200"}
_MARGIN = 0.2  # by which an estimate may be too large for its layout to be simulated still
_MOST_NEAR = 40  # layouts within the margin, of a group that counts
_OTHERS = 4  # layouts of a group that are simulated by chance
_FIRST = (1, 20, 60)


def draw(rng: random.Random) -> PlanOptions:
    """Return a group."""
    model = rng.choice([*_MODELS])
    gpus = rng.choice(_MODELS[model])
    device = rng.choice([*_CLUSTERS])
    has_experts = model.startswith(("qwen3-30b", "deepseek"))
    return PlanOptions(
        models=(model,),
        gpus=(gpus,),
        gbs=gpus * rng.choice(_SEQUENCES_PER_GPU),
        seq_len=rng.choice((4096, 8192, 16384)),
        device=device,
        network=_CLUSTERS[device],
        framework=rng.choice(("megatron", "pytorch")),
        tp=tuple(sorted(rng.sample((1, 2, 4, 8), 2))),
        pp=tuple(sorted(rng.sample((1, 2, 4, 8, 16), 2))),
        cp=rng.choice(((1,), (1, 2), (2, 4))),
        ep=tuple(sorted(rng.sample((1, 4, 8, 16), 2))) if has_experts else (1,),
        mbs=tuple(sorted(rng.sample((1, 2, 4), 2))),
        recompute=tuple(sorted(rng.sample(RECOMPUTED, 2))),
    )


def of_group(
    options: PlanOptions, rng: random.Random
) -> tuple[int, list[tuple[dict[str, Any], float]]] | None:
    """Return the place of the fastest layout by estimate, and axes and errors of layouts.

    None: no layout fits, or too many are near the best.
    """
    (gpus,) = options.gpus
    cluster = Cluster(options, gpus)
    space = LayoutSpace(options=options, num_gpus=gpus, gpus_per_host=cluster.gpus_per_host)
    searcher = Searcher(cluster)
    estimated = sorted(searcher.share([*space.axes()]).estimated, key=lambda own: own.step_s)
    best_s, place, fits = float("inf"), 0, 0
    errors: list[tuple[dict[str, Any], float]] = []
    for layout in estimated:
        is_near = layout.step_s * (1 - _MARGIN) <= best_s
        if not is_near and rng.random() > _OTHERS / len(estimated):
            continue
        if fits > _MOST_NEAR:
            return None
        result = searcher.simulated(layout)
        if not isinstance(result, Simulated):
            continue
        step_s = result.row["step_s"]
        axes = {**layout.candidate.axes, "micro-batches": layout.candidate.job.num_microbatches}
        errors.append((axes, layout.step_s / step_s - 1))
        fits += is_near
        if step_s < best_s:
            best_s, place = step_s, fits
    return (place, errors) if fits else None


def figures(errors: Iterable[float]) -> str:
    """Return errors as text: both signs, and how much estimates are above simulations."""
    own = sorted(errors)
    sizes = sorted(map(abs, own))
    p95, p99 = (sizes[int(share * len(sizes))] for share in (0.95, 0.99))
    above = own[int(0.99 * len(own))]
    return (
        f"{len(sizes)} layouts, bias {fmean(own):+.2%}, mean {fmean(sizes):.2%}, "
        f"p95 {p95:.1%}, p99 {p99:.1%}, at most {sizes[-1]:.1%}; p99 above {above:+.1%}"
    )


def main() -> None:
    """Draw, compare, print."""
    num_groups = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    rng = random.Random(SEED)
    errors: list[tuple[dict[str, Any], float]] = []
    places: list[int] = []
    while len(places) < num_groups:
        options = draw(rng)
        try:
            result = of_group(options, rng)
        except ConfigError:  # degrees that no layout has
            continue
        if result is None:
            continue
        place, own = result
        places.append(place)
        errors += own
        (gpus,) = options.gpus
        where = f"{options.models[0]} {gpus} {options.device} gbs {options.gbs}"
        mean = fmean(abs(error) for _, error in own)
        text = (
            f"{where} {options.framework}: {len(own)} simulated, mean {mean:.2%}, place {place}"
        )
        print(text, flush=True)
    for framework in ("megatron", "pytorch"):
        of_framework = [each for each in errors if each[0]["framework"] == framework]
        print(f"{framework}: {figures(error for _, error in of_framework)}")
        by_axis = defaultdict[str, list[float]](list)
        for axes, error in of_framework:
            for name in ("tp", "pp", "vpp", "cp", "ep", "dp_replicate"):
                if axes[name] > 1:
                    by_axis[f"{name} > 1"].append(error)
            if axes["micro-batches"] <= 2:
                by_axis["1 or 2 micro-batches"].append(error)
            by_axis[f"{'some' if axes['recompute'] != 'none' else 'no'} recomputation"].append(
                error
            )
        for name, own in by_axis.items():
            print(f"  {name}: {figures(own)}")
    for count in _FIRST:
        num = sum(place <= count for place in places)
        print(f"the best is among the first {count}: {num} of {len(places)} groups")


if __name__ == "__main__":
    began_s = time.monotonic()
    main()
    print(f"{time.monotonic() - began_s:.0f} s")
