"""Record every message that DeepSpeed sends in small jobs on CPU ranks, for the tests.

    python validation/deepspeed_messages.py --cases tests/data/deepspeed/cases.json \
        --out tests/data/deepspeed/messages.json

It needs deepspeed (DS_BUILD_OPS=0 when installed from source), transformers and gloo, but no
GPU. Each case is a job with its model, DeepSpeed settings and number of ranks; several cases
run in the same processes. The file holds rank 0's messages of deepspeed.initialize and of the
last of three steps, in order, as torch's dispatcher sees them.
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

from stepmark.training.messages import MessageRecorder

STEPS = 3
_AT_ONCE = 16  # cases in the same processes
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
# Name -> stem of the class in transformers, and its configuration.
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
    """Recorder that adds the root of collectives that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def note(self, name: str, values: Sequence[Any], result: Any) -> None:
        before = len(self._kinds)
        super().note(name, values, result)
        roots = {"reduce_": 3, "broadcast_": 2}
        root = f" root={values[roots[name]]}" if name in roots else ""
        for kind in self._kinds[before:]:
            size = f"{kind.dtype} {kind.call_bytes} {kind.message_bytes}"
            self.lines.append(f"{self.phase} {kind.collective} {size}{root}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    cases: dict[str, dict[str, Any]] = json.loads(asked.cases.read_text())
    messages: dict[str, dict[str, list[str]]] = {}
    for ranks in sorted({case["ranks"] for case in cases.values()}):
        same = [name for name, case in cases.items() if case["ranks"] == ranks]
        for at in range(0, len(same), _AT_ONCE):
            messages |= recorded({name: cases[name] for name in same[at : at + _AT_ONCE]})
            say(f"{len(messages)} of {len(cases)} cases")
    packages = (deepspeed, torch, transformers)
    versions = {package.__name__: package.__version__.strip() for package in packages}
    setups = {" ".join(lines["setup"]): lines["setup"] for lines in messages.values()}
    numbers = {key: index for index, key in enumerate(setups)}
    steps = {
        name: {
            "setup": numbers[" ".join(messages[name]["setup"])],
            "step": messages[name]["step"],
        }
        for name in cases
    }
    asked.out.write_text(written(versions, list(setups.values()), steps))


def written(versions: object, setups: list[list[str]], steps: dict[str, Any]) -> str:
    """Return JSON with a line per list of messages."""
    first = ",\n".join(map(json.dumps, setups))
    second = ",\n".join(f"{json.dumps(key)}: {json.dumps(step)}" for key, step in steps.items())
    return (
        f'{{"versions": {json.dumps(versions)},\n"setups": [\n{first}\n],\n'
        f'"steps": {{\n{second}\n}}}}\n'
    )


def recorded(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Record cases of the same number of ranks in the same processes."""
    ranks = next(iter(cases.values()))["ranks"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    workers = [
        context.Process(target=work, args=(rank, ranks, port, cases, sender), daemon=True)
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    while not receiver.poll(1):
        if any(worker.exitcode for worker in workers):
            raise SystemExit(
                f"a rank ended: exit codes {[worker.exitcode for worker in workers]}"
            )
    messages: dict[str, dict[str, list[str]]] = receiver.recv()
    for worker in workers:
        worker.join()
    return messages


def work(
    rank: int, ranks: int, port: int, cases: dict[str, dict[str, Any]], sender: Any
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
    messages: dict[str, dict[str, list[str]]] = {}
    for name, case in cases.items():
        messages[name] = steady_step(case)
        # Stage 3 replaces torch's function and does not restore it.
        torch.nn.functional.linear = linear
    if rank == 0:
        sender.send(messages)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def steady_step(case: dict[str, Any]) -> dict[str, list[str]]:
    """Return the messages of deepspeed.initialize and of the last step."""
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
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case["accumulation"],
        "zero_optimization": case["zero"],
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }
    if case["dtype"] == "bf16":
        config["bf16"] = {"enabled": True}
    if case["dtype"] == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 1}
    return config | case.get("more", {})


def built(name: str) -> Any:
    stem, config = MODELS[name]
    torch.manual_seed(0)
    kind = "GPT2LMHeadModel" if stem == "GPT2" else f"{stem}ForCausalLM"
    untied = {} if stem == "GPT2" else {"tie_word_embeddings": False}
    widths = getattr(transformers, f"{stem}Config")(**(untied | config))
    return getattr(transformers, kind)(widths)


def counted(lines: Any) -> list[str]:
    """Join equal neighbours into one line with a count, such as "x3"."""
    runs = [(line, len(list(same))) for line, same in groupby(lines)]
    return [line if times == 1 else f"{line} x{times}" for line, times in runs]


def say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
