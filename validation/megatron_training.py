"""Run a step with megatron/training of a Megatron-LM checkout, for megatron_messages.py.

Its train_step and pretrain_gpt.py's forward_step run unmodified, with only the arguments that
they read. Parsing of the command line, data sets and logs are excluded.
"""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron_recorder import Recorder
from megatron_step import Trainee, phased, within

# It imports triton, and is used only for batch-invariant results.
sys.modules["megatron.core.transformer.custom_layers.batch_invariant_kernels"] = MagicMock()

import pretrain_gpt  # noqa: E402 - of the checkout
from megatron.training import global_vars, training, utils  # noqa: E402


class Arguments(SimpleNamespace):
    """Arguments of which every one that is not given is off."""

    def __getattr__(self, name: str) -> bool:
        return False


def arguments(trainee: Trainee) -> Arguments:
    job = trainee.job
    return Arguments(
        micro_batch_size=job.mbs,
        seq_length=job.model.seq_len,
        decoder_seq_length=None,
        data_parallel_size=job.parallel.data_ranks,
        pipeline_model_parallel_size=job.parallel.pp,
        create_attention_mask_in_dataloader=(
            trainee.settings.create_attention_mask_in_dataloader
        ),
        overlap_moe_expert_parallel_comm=trainee.settings.overlap_moe_expert_parallel_comm,
        save_dgrads_interval=None,
        save_wgrads_interval=None,
        empty_unused_memory_level=0,
    )


def step(trainee: Trainee, recorder: Recorder) -> None:
    variables: Any = global_vars
    variables._GLOBAL_ARGS = arguments(trainee)
    variables._GLOBAL_TIMERS = MagicMock()
    modules: Any = (training, pretrain_gpt)
    modules[0].get_num_microbatches = lambda: trainee.job.num_microbatches
    modules[1].core_transformer_config_from_args = lambda _: trainee.config
    optimizer: Any = trainee.optimizer
    before, optimizer.step = optimizer.step, within(recorder, "optimizer", optimizer.step)
    recorder.phase = "step"
    data = [_batches(trainee) for _ in trainee.chunks]
    with recorder, phased(recorder):
        training.train_step(
            pretrain_gpt.forward_step,
            data if len(data) > 1 else data[0],
            trainee.chunks,
            optimizer,
            MagicMock(),
            trainee.config,
            within(recorder, "schedule", schedules.get_forward_backward_func()),
        )
        # The first collective of training_log.
        utils.reduce_max_stat_across_model_parallel_group(1e-3)
    optimizer.step = before


def _batches(trainee: Trainee) -> Iterator[dict[str, torch.Tensor]] | None:
    """Return the data of the first tp rank; the other tp ranks read none."""
    if parallel_state.get_tensor_model_parallel_rank():
        return None
    return _read(trainee)


def _read(trainee: Trainee) -> Iterator[dict[str, torch.Tensor]]:
    mbs, length = trainee.job.mbs, trainee.job.model.seq_len
    place = parallel_state.get_data_parallel_rank()
    tokens = torch.arange(mbs * length).view(mbs, length) * 7919 + 13 * place
    tokens %= trainee.job.model.vocab_size
    batch = {
        "tokens": tokens,
        "labels": tokens,
        "loss_mask": torch.ones(mbs, length),
        "position_ids": torch.arange(length).expand(mbs, length).contiguous(),
    }
    if trainee.settings.create_attention_mask_in_dataloader:
        mask = torch.ones(mbs, 1, length, length, dtype=torch.bool)
        batch["attention_mask"] = mask.triu(1)
    while True:
        yield dict(batch)
