"""Record the copies of offloaded activations by megatron-core 0.16.1, for tests/data.

PipelineOffloadManager and ChunkOffloadHandler of core/pipeline_parallel/
fine_grained_activation_offload.py run without a GPU: streams, events and tensors are stand-ins,
and their methods are called in the order of a stage's passes, as autograd functions of the
model call them. Of three steps the last one is recorded.

    python validation/megatron_offload.py MODULE.PY tests/data/megatron_offload.json
"""

import json
import random
import sys
import types
from pathlib import Path
from typing import Any

import torch

from stepmark.workloads.pipeline import Pipeline, passes_of, schedule
from stepmark.workloads.rules.megatron.settings import OFFLOAD_MODULES

NUM_CASES = 40
LARGE = 1000  # elements of a tensor; those with fewer than a tenth are not offloaded
# Groups inside of others are between these.
OUTER = {
    "attn_norm": ("qkv_linear", "core_attn", "attn_proj"),
    "mlp_norm": ("expert_fc1", "moe_act"),
}
OF_EXPERTS = ("mlp_norm", "expert_fc1", "moe_act")


class StandIn:
    """Anything of torch.cuda, whose methods do nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take any arguments."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: StandIn()

    def __enter__(self) -> "StandIn":
        return self

    def __exit__(self, *args: object) -> None:
        """Do nothing."""


class Tensor(StandIn):
    """A saved tensor."""

    shape = (LARGE,)

    def numel(self) -> int:
        return LARGE

    def element_size(self) -> int:
        return 2


def load(path: str) -> Any:
    """Return megatron-core's module with stand-ins for what it imports and calls of CUDA."""
    graphs: Any = types.ModuleType("megatron.core.transformer.cuda_graphs")
    graphs.is_graph_capturing = lambda: False
    for name in ("megatron", "megatron.core", "megatron.core.transformer"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules[graphs.__name__] = graphs
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = cuda.stream = cuda.current_stream = StandIn
    cuda.nvtx = StandIn()
    module: Any = types.ModuleType("offload")
    sys.modules["offload"] = module
    exec(compile(Path(path).read_text(), path, "exec"), module.__dict__)
    module.print_offload_summary_table = lambda total: None
    handler = module.ChunkOffloadHandler
    handler.offload = lambda self, tensor, use_cpu_pool: ("host", tensor, use_cpu_pool)
    handler.reload = lambda self, state: state[1]
    return module


def events(names: list[str]) -> list[tuple[str, bool]]:
    """Return starts (true) and ends of a layer's groups in the order of its modules."""
    made: list[tuple[str, bool]] = []
    waiting = ""
    for name in [*names, ""]:
        if waiting and name not in OUTER[waiting]:
            made.append((waiting, False))
            waiting = ""
        if name:
            made.append((name, True))
        if name in OUTER:
            waiting = name
        elif name:
            made.append((name, False))
    return made


class Stage:
    """A stage's passes, which call the manager. chunks: of each the groups of its layers."""

    def __init__(self, module: Any, chunks: list[list[list[str]]]) -> None:
        self.chunks = chunks
        manager = module.PipelineOffloadManager
        manager.reset_instance()
        self.manager = manager.get_instance()
        self.saved: dict[tuple[int, int], dict[tuple[int, str], tuple[Any, Any]]] = {}

    def forward(self, chunk: int, microbatch: int) -> list[list[Any]]:
        """Return the layers and groups that are sent."""
        num_chunks = len(self.chunks)
        self.manager.init_model_chunk_offload_handler(
            num_chunks if num_chunks > 1 else None, chunk, LARGE // 10
        )
        sent = []
        saved = self.saved[chunk, microbatch] = {}
        for layer, names in enumerate(self.chunks[chunk]):
            for name, is_start in events(names):
                if is_start:
                    handler = self.manager.pop_forward_chunk(name=name)
                    handler.on_group_start_forward(name)
                    saved[layer, name] = (handler, handler.tensor_push(Tensor()))
                    continue
                handler = self.manager.cur_forward_chunk()
                before = len(handler._groups_to_reload)
                handler.on_group_commit_forward([])
                if len(handler._groups_to_reload) > before:
                    sent.append([layer, name])
        return sent

    def backward(self, chunk: int, microbatch: int) -> list[list[Any]]:
        """Return layers and groups that copy their own tensors, and whose copies they begin."""
        made = []
        saved = self.saved.pop((chunk, microbatch))
        for layer in reversed(range(len(self.chunks[chunk]))):
            for name, is_start in reversed(events(self.chunks[chunk][layer])):
                handler, tag = saved[layer, name]
                if not is_start:
                    handler.on_group_commit_backward(name)
                    group = handler.offload_groups[tag[0] - 1]
                    if isinstance(group._tensors[tag], tuple):
                        made.append(["own", layer, name, name])
                    handler.tensor_pop(tag)
                    continue
                loaded = self.loaded_by(handler)
                made += [["load", layer, name, each] for each in loaded]
        return made

    def loaded_by(self, handler: Any) -> list[str]:
        """Return the groups whose copies to the device begin at the end of a group backward."""
        chunks = self.manager._cached_chunks_backward
        before = [list(each._groups_to_reload) for each in chunks]
        handler.on_group_start_backward()
        loaded = []
        for each, groups in zip(chunks, before, strict=True):
            for group in groups[len(each._groups_to_reload) :]:
                loaded += [group._name] if group._tensors else []
        return loaded


def record(module: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Return the case with the copies of each pass."""
    pipeline = Pipeline(
        num_stages=case["pp"], num_microbatches=case["microbatches"], num_chunks=case["vpp"]
    )
    order = [*passes_of(schedule(pipeline, case["stage"]))]
    stage = Stage(module, case["chunks"])
    for _ in range(3):
        stage.manager.reset()
        passes = []
        for chunk, microbatch, is_forward in order:
            run = stage.forward if is_forward else stage.backward
            passes.append([chunk, microbatch, is_forward, run(chunk, microbatch)])
    return {**case, "passes": passes}


# Chunks of so few groups that one has no copy to the device when it needs it.
SPARSE: tuple[dict[str, Any], ...] = (
    {
        **{"pp": 2, "vpp": 3, "stage": 0, "microbatches": 4},
        "chunks": [
            [["attn_proj", "mlp_norm", "expert_fc1"], ["attn_proj"]],
            [["attn_proj"]],
            [],
        ],
    },
    {
        **{"pp": 4, "vpp": 4, "stage": 3, "microbatches": 8},
        "chunks": [[["attn_norm", "mlp_norm", "moe_act"]], [["attn_norm"]]] * 2,
    },
)


def cases() -> list[dict[str, Any]]:
    """Return stages with random groups and schedules."""
    chance = random.Random(0)
    made = [*SPARSE]
    for _ in range(NUM_CASES):
        pp = chance.choice([1, 1, 2, 3, 4])
        vpp = chance.choice([1, 2, 3]) if pp > 1 else 1
        count = chance.choice([1, 2, 3, 5])
        names = [name for name in OFFLOAD_MODULES if chance.random() < 0.4] or ["core_attn"]
        is_mixed = chance.random() < 0.5
        chunks = []
        for _ in range(vpp):
            layers = []
            for _ in range(chance.choice([1, 2, 3])):
                is_dense = is_mixed and chance.random() < 0.5
                layers.append([x for x in names if not (is_dense and x in OF_EXPERTS)])
            chunks.append(layers)
        made.append(
            {
                "pp": pp,
                "vpp": vpp,
                "stage": chance.randrange(pp),
                "microbatches": pp * count if vpp > 1 else count,
                "chunks": chunks,
            }
        )
    return made


if __name__ == "__main__":
    source, target = sys.argv[1:]
    offload = load(source)
    lines = [json.dumps(record(offload, case), separators=(",", ":")) for case in cases()]
    Path(target).write_text("[\n" + ",\n".join(lines) + "\n]\n")
