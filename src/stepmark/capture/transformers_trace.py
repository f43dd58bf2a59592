"""Trace a causal language model of transformers on the meta device: no data, no weights.

A process of its own, which stepmark.workloads.formats.huggingface.traced starts: it reads a
TraceRequest from stdin and writes a TraceAnswer to stdout. Only classes of transformers run,
never code of a repository, and nothing is downloaded. Code that reads values of tensors fails,
because a meta tensor has none, and is refused.
"""

import contextlib
import inspect
import os
import re
import resource
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from stepmark.capture.transformers_recorder import IMPLEMENTATION, TraceRecorder, is_norm
from stepmark.ground.errors import ConfigError
from stepmark.workloads.formats.huggingface.trace import (
    Trace,
    TraceAnswer,
    TracedParam,
    TraceRefusal,
    TraceRequest,
)

# Keys that choose code or the format of weights, on which shapes do not depend.
_IGNORED = ("auto_map", "quantization_config", "attn_implementation", "dtype", "torch_dtype")
# Keys of every config, whether or not its class declares them.
_COMMON = frozenset(
    {
        *("architectures", "transformers_version", "use_cache", "name_or_path", "id2label"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "torchscript", "label2id"),
        *("gradient_checkpointing", "initializer_range", "rope_scaling", "rope_theta"),
        *("tie_word_embeddings", "max_length", "min_length", "do_sample", "num_labels"),
        *("task_specific_params", "is_encoder_decoder", "is_decoder", "model_name"),
    }
)
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
_MAX_BYTES = 16 * 2**30  # of this process; the largest models take less than 2 GiB


def trace(request: TraceRequest) -> Trace:
    """Return what the class of this config computes. Raises ConfigError."""
    recorder = TraceRecorder(request.seq_len)
    model, unread = build(request)
    layers = _layer_list(model)
    with recorder.recording(model, layers):
        logits = _logits(model, request)
    return Trace(
        version=transformers.__version__,
        name=type(model).__name__,
        vocab_size=logits.shape[-1],
        layers=layers,
        params=list(_params(model)),
        calls=recorder.calls,
        unread=unread,
        loops=recorder.modules_with_loops,
        masked=recorder.masked_modules,
    )


def build(request: TraceRequest) -> tuple[PreTrainedModel, list[str]]:
    """Return the model without weights, and the keys that its config does not declare."""
    raw = _shapes(request.config)
    family = str(raw.pop("model_type", ""))
    if family not in CONFIG_MAPPING:
        rule = f"a family of transformers {transformers.__version__}; code that comes with"
        raise ConfigError("model_type", family, f"{rule} weights (auto_map) is never run")
    whole = CONFIG_MAPPING[family].from_dict(raw)
    config = _of_text(whole, family)
    model = _on_meta(config, getattr(torch, request.dtype))
    _check_positions(model, config, request.seq_len)
    model.train(False)
    return model, sorted(raw.keys() - _declared(whole) - _COMMON)


def _on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the config's class. Some have attention of their own, by names that they know."""
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    model: PreTrainedModel
    with torch.device("meta"):
        try:
            model = kind._from_config(config, attn_implementation=IMPLEMENTATION, dtype=dtype)
        except KeyError as error:
            if error.args != (IMPLEMENTATION,):
                raise
            model = kind._from_config(config, attn_implementation="eager", dtype=dtype)
    return model


def _shapes(config: Mapping[str, object]) -> dict[str, object]:
    """Return the keys that shapes depend on; of a model that sees, with the decoder's ties."""
    raw = {
        key: value
        for key, value in config.items()
        if key not in _IGNORED and not key.startswith("_")
    }
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return raw
    if "tie_word_embeddings" in raw:
        text = {"tie_word_embeddings": raw["tie_word_embeddings"], **text}
    is_known = raw.get("model_type") in CONFIG_MAPPING
    return {**raw, "text_config": text} if is_known else _shapes(text)


def _of_text(config: PreTrainedConfig, family: str) -> PreTrainedConfig:
    """Return the part of the config that has a causal language model. Raises ConfigError."""
    for part in (config.get_text_config(decoder=True), config):
        if type(part) in AutoModelForCausalLM._model_mapping:
            return part
    rule = f"a family with a causal language model in transformers {transformers.__version__}"
    raise ConfigError("model_type", family, rule)


def _declared(config: PreTrainedConfig) -> set[str]:
    names = set(config.attribute_map)
    for kind in type(config).__mro__:
        names |= set(vars(kind).get("__annotations__", {}))
    return names | set(inspect.signature(type(config).__init__).parameters)


def _check_positions(model: nn.Module, config: PreTrainedConfig, seq_len: int) -> None:
    """Raise ConfigError for more positions than a learned table has: meta checks no index."""
    lengths = (getattr(config, key, None) for key in _LENGTHS)
    longest = next((length for length in lengths if isinstance(length, int)), seq_len)
    for path, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding)
        if is_table and seq_len > longest and re.search(r"pos|\bwpe$", path):
            raise ConfigError("seq-len", seq_len, f"at most {longest}, the rows of {path}")


def _layer_list(model: nn.Module) -> str:
    """Return the path of the list of layers: the outermost with the most parameters."""
    sizes = {
        path: sum(param.numel() for param in module.parameters())
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and not any(map(str.isdecimal, path.split(".")))
    }
    return max(sizes, key=lambda path: sizes[path], default="")


def _params(model: nn.Module) -> Iterator[TracedParam]:
    """Yield the parameters of all modules, a tied one by each of its names."""
    names: dict[int, str] = {}
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            whole = f"{path}.{name}" if path else name
            yield TracedParam(
                name=whole,
                module=path,
                shape=tuple(param.shape) or (1,),
                is_norm=is_norm(module),
                is_trained=param.requires_grad,
                tied=names.get(id(param), ""),
            )
            names.setdefault(id(param), whole)


def _logits(model: PreTrainedModel, request: TraceRequest) -> Tensor:
    """Call the model on a micro-batch and return its logits."""
    shape = (request.mbs, request.seq_len)
    tokens = torch.zeros(shape, dtype=torch.long, device="meta")
    output = model(input_ids=tokens, use_cache=False)
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or tuple(logits.shape[:-1]) != shape:
        raise ConfigError("model_type", type(model).__name__, "a class that returns logits")
    return logits


@contextlib.contextmanager
def _refusing(family: str) -> Iterator[None]:
    """Raise errors of the family's code as one sentence, with the line of its file."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "transformers" in frame.filename] or frames
        place = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
        words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        if isinstance(error, NotImplementedError) or "meta tensor" in words:
            words = "it depends on values of tensors, which a trace has not"
        rule = f"a family whose forward pass can be traced without data; {place}: {words}"
        raise ConfigError("model_type", family, rule) from error


def _answer(request: TraceRequest) -> TraceAnswer:
    try:
        with _refusing(str(request.config.get("model_type"))):
            return TraceAnswer(trace=trace(request))
    except ConfigError as error:
        refusal = TraceRefusal(error.field, error.value, error.allowed)
        return TraceAnswer(refusal=refusal)


def main() -> None:
    """Answer the request of stdin on stdout; what classes print goes to stderr."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_BYTES, _MAX_BYTES))
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=TraceRequest)
    with contextlib.redirect_stdout(sys.stderr):
        answer = _answer(request)
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    sys.stdout.flush()
    os._exit(0)  # modules of a large model take seconds to be released


if __name__ == "__main__":
    main()
