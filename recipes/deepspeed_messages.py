"""What DeepSpeed really sends: every message of small jobs on CPU ranks, for tests to compare.

    python recipes/deepspeed_messages.py --cases tests/data/deepspeed/cases.json \
        --out tests/data/deepspeed/messages.json

Needs deepspeed (DS_BUILD_OPS=0 when it is installed from source), transformers and gloo; no
GPU. Each case is a job of its own model, DeepSpeed settings and number of ranks; some run in
the same processes. What is kept is rank 0's: the messages of deepspeed.initialize and of the
last of three steps, in their order, from torch's dispatcher.
"""

import argparse
import json
import logging
import multiprocessing as mp
import os
import socket
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", TOKENIZERS_PARALLELISM="false")

import deepspeed
import torch
import transformers
from deepspeed.accelerator import get_accelerator

from stepmark.bench.training.messages import MessageRecorder

STEPS = 3
_AT_ONCE = 16  # cases
_SEQUENCE = 16
_TOKENS = 500
_WIDTHS: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 224,
    "vocab_size": 515,
    "max_position_embeddings": 64,
    "use_cache": False,
}
_GPT2: dict[str, Any] = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_inner": 224,
    "n_positions": 32,
    "vocab_size": 512,
    "use_cache": False,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_GPTJ: dict[str, Any] = _GPT2 | {"rotary_dim": 8, "vocab_size": 515}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
# By name: the class's stem in transformers, and its configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _WIDTHS),
    "gpt2": ("GPT2", _GPT2),
    "gptj": ("GPTJ", _GPTJ),
    "qwen2-tied": ("Qwen2", _WIDTHS | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", _WIDTHS),
    "mixtral": ("Mixtral", _WIDTHS | {"num_local_experts": 4}),
    "qwen3-moe": ("Qwen3Moe", _WIDTHS | _EXPERTS | {"num_experts": 4}),
    "deepseek-v3": ("DeepseekV3", _WIDTHS | _EXPERTS | _LATENT),
}


class Recorder(MessageRecorder):
    """With the root of collectives that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def note(self, name: str, values: Sequence[Any], result: Any) -> None:
        before = len(self._seen)
        super().note(name, values, result)
        roots = {"reduce_": 3, "broadcast_": 2}
        root = f" root={values[roots[name]]}" if name in roots else ""
        for kind in self._seen[before:]:
            size = f"{kind.dtype} {kind.call_bytes} {kind.message_bytes}"
            self.lines.append(f"{self.phase} {kind.collective} {size}{root}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    cases: dict[str, dict[str, Any]] = json.loads(asked.cases.read_text())
    found: dict[str, dict[str, list[str]]] = {}
    for ranks in sorted({case["ranks"] for case in cases.values()}):
        same = [name for name, one in cases.items() if one["ranks"] == ranks]
        for at in range(0, len(same), _AT_ONCE):
            found |= recorded({name: cases[name] for name in same[at : at + _AT_ONCE]})
            say(f"{len(found)} of {len(cases)} cases")
    kinds = (deepspeed, torch, transformers)
    versions = {one.__name__: one.__version__.strip() for one in kinds}
    setups = {" ".join(one["setup"]): one["setup"] for one in found.values()}
    places = {key: index for index, key in enumerate(setups)}
    steps = {
        name: {"setup": places[" ".join(found[name]["setup"])], "step": found[name]["step"]}
        for name in cases
    }
    asked.out.write_text(written(versions, list(setups.values()), steps))


def written(versions: object, setups: list[list[str]], steps: dict[str, Any]) -> str:
    """JSON with a line for each list of messages."""
    first = ",\n".join(json.dumps(one) for one in setups)
    second = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in steps.items())
    return (
        f'{{"versions": {json.dumps(versions)},\n"setups": [\n{first}\n],\n'
        f'"steps": {{\n{second}\n}}}}\n'
    )


def recorded(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Of one number of ranks, in the same processes."""
    ranks = next(iter(cases.values()))["ranks"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    answer, told = context.Pipe(duplex=False)
    workers = [
        context.Process(target=work, args=(rank, ranks, port, cases, told), daemon=True)
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    while not answer.poll(1):
        if any(worker.exitcode for worker in workers):
            raise SystemExit(f"a rank ended with {[one.exitcode for one in workers]}")
    found: dict[str, dict[str, list[str]]] = answer.recv()
    for worker in workers:
        worker.join()
    return found


def work(
    rank: int, ranks: int, port: int, cases: dict[str, dict[str, Any]], answer: Any
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
    )
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: [torch.float, torch.bfloat16, torch.half]
    deepspeed.init_distributed("gloo", verbose=False)
    linear = torch.nn.functional.linear
    found: dict[str, dict[str, list[str]]] = {}
    for name, case in cases.items():
        found[name] = steady_step(case)
        # Stage 3 puts its own in place of torch's and leaves it there.
        torch.nn.functional.linear = linear
    if rank == 0:
        answer.send(found)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def steady_step(case: dict[str, Any]) -> dict[str, list[str]]:
    """Lines of deepspeed.initialize and of the last step."""
    config = settings(case)
    recorder = Recorder()
    with recorder:
        recorder.phase = "setup"
        if case.get("zero_init"):
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = built(case["model"])
        else:
            model = built(case["model"])
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        for step in range(STEPS):
            for micro in range(case["accumulation"]):
                tokens = torch.randint(0, _TOKENS, (1, _SEQUENCE))
                recorder.phase = f"{step} fwd.{micro}"
                loss = engine(input_ids=tokens, labels=tokens).loss
                recorder.phase = f"{step} bwd.{micro}"
                engine.backward(loss)
                recorder.phase = f"{step} optim"
                engine.step()
    engine.destroy()
    lines = [line.partition(" ") for line in recorder.lines]
    return {
        "setup": counted(line for phase, _, line in lines if phase == "setup"),
        "step": counted(line for step, _, line in lines if step == str(STEPS - 1)),
    }


def settings(case: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case["accumulation"],
        "zero_optimization": case["zero"],
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }
    if case["dtype"] == "bf16":
        found["bf16"] = {"enabled": True}
    if case["dtype"] == "fp16":
        found["fp16"] = {"enabled": True, "initial_scale_power": 1}
    return found | case.get("more", {})


def built(name: str) -> Any:
    stem, config = MODELS[name]
    torch.manual_seed(0)
    kind = "GPT2LMHeadModel" if stem == "GPT2" else f"{stem}ForCausalLM"
    untied = {} if stem == "GPT2" else {"tie_word_embeddings": False}
    made = getattr(transformers, f"{stem}Config")(**(untied | config))
    return getattr(transformers, kind)(made)


def counted(lines: Any) -> list[str]:
    """Equal neighbours as one, "x3"."""
    found = [(line, len(list(same))) for line, same in groupby(lines)]
    return [line if times == 1 else f"{line} x{times}" for line, times in found]


def say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
