"""How far estimates of `stepmark plan` are from simulations, and whether they find the best.

    python validation/plan_estimates.py [GROUPS] [LAYOUTS]

Groups of a model, a number of GPUs, a batch and a framework are drawn by a seed, and of each
group layouts that fit; all of them are estimated and simulated. Printed are the errors of each
framework, and in how many groups the fastest simulated layout is among the first by estimate.
"""

import random
import sys
import time
from collections import defaultdict
from statistics import fmean

from stepmark.ground.errors import ConfigError
from stepmark.layouts.candidate import Candidate
from stepmark.layouts.cluster import Cluster
from stepmark.layouts.layout_space import LayoutSpace
from stepmark.layouts.least_memory import least_bytes
from stepmark.layouts.plan_options import PlanOptions
from stepmark.layouts.stage_costs import Estimator
from stepmark.predictions.framework_job import basis_of
from stepmark.predictions.predict import costs_of
from stepmark.predictions.predict_inputs import inputs_of
from stepmark.predictions.simulation import simulate

SEED = 20261129
_MODELS = {
    "llama-3.1-8b": (16, 64, 256),
    "llama-3.1-70b": (64, 256, 1024),
    "llama-3.1-405b": (512, 1024),
    "qwen3-30b-a3b": (32, 128),
    "deepseek-v3": (512, 1024),
}
_SEQUENCES_PER_GPU = (1, 4, 16)
_CLUSTERS = {"h100-sxm": "dgx-h100", "a100-80gb-sxm": "dgx-a100"}
_FIRST = (3, 10)


def draw(rng: random.Random) -> PlanOptions:
    """Return a group."""
    model = rng.choice([*_MODELS])
    gpus = rng.choice(_MODELS[model])
    device = rng.choice([*_CLUSTERS])
    return PlanOptions(
        models=(model,),
        gpus=(gpus,),
        gbs=gpus * rng.choice(_SEQUENCES_PER_GPU),
        seq_len=rng.choice((4096, 8192)),
        device=device,
        network=_CLUSTERS[device],
        framework=rng.choice(("megatron", "pytorch")),
    )


def simulated_s(cluster: Cluster, candidate: Candidate) -> float:
    """Return the seconds of a step, as `stepmark predict` simulates it."""
    workload = candidate.workload()
    costs, _ = costs_of(inputs_of(basis_of(cluster.job(candidate)), workload))
    return simulate(workload, costs).step_s


def main() -> None:
    """Draw, compare, print."""
    num_groups = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    num_layouts = int(sys.argv[2]) if len(sys.argv) > 2 else 30
    rng = random.Random(SEED)
    errors = defaultdict[str, list[float]](list)
    is_first = defaultdict[int, list[bool]](list)
    while len(is_first[_FIRST[0]]) < num_groups:
        options = draw(rng)
        (gpus,) = options.gpus
        cluster = Cluster(options, gpus)
        space = LayoutSpace(options=options, num_gpus=gpus, gpus_per_host=cluster.gpus_per_host)
        layouts = [*space.layouts([*space.axes()])]
        rng.shuffle(layouts)
        estimator = Estimator(cluster.seconds, cluster.send_s)
        times = list[tuple[float, float]]()
        for layout in layouts:
            try:
                if least_bytes(layout) > cluster.device.hbm_bytes:
                    continue
                if layout.needed_bytes > cluster.device.hbm_bytes:
                    continue
                times.append((estimator.step_s(layout), simulated_s(cluster, layout)))
            except ConfigError:
                continue
            if len(times) == num_layouts:
                break
        if len(times) < num_layouts:
            continue
        errors[options.framework] += [estimate / step - 1 for estimate, step in times]
        best_s = min(step for _, step in times)
        for count in _FIRST:
            firsts = sorted(times)[:count]
            is_first[count].append(min(step for _, step in firsts) <= best_s)
        where = f"{options.models[0]} {gpus} {options.device} gbs {options.gbs}"
        of_group = [abs(estimate / step - 1) for estimate, step in times]
        print(f"{where} {options.framework}: mean {fmean(of_group):.1%}", flush=True)
    for framework, own in errors.items():
        sizes = sorted(map(abs, own))
        p95, p99 = (sizes[int(share * len(sizes))] for share in (0.95, 0.99))
        print(
            f"{framework}: {len(sizes)} layouts, bias {fmean(own):+.2%}, mean "
            f"{fmean(sizes):.2%}, p95 {p95:.1%}, p99 {p99:.1%}, at most {sizes[-1]:.1%}"
        )
    for count, found in is_first.items():
        text = f"the best of {num_layouts} is among the first {count}"
        print(f"{text}: {sum(found)} of {len(found)} groups")


if __name__ == "__main__":
    began_s = time.monotonic()
    main()
    print(f"{time.monotonic() - began_s:.0f} s")
