"""FLOP/s of a training log in every convention, and MFU where the device is known."""

from dataclasses import replace
from statistics import median

from stepmark.cases.flops import of_model
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.job_logs.training_log.steady_state import SteadyState
from stepmark.job_logs.training_log.training_log import TrainingLog
from stepmark.model.device import find_device_by_alias, unknown_device
from stepmark.tables.columns import FLOPS, PERCENT, Row, given
from stepmark.workloads.models import read_models

COLUMNS = (
    given("convention"),
    given("flops_per_token", FLOPS, "FLOPs a token"),
    given("flops_per_s", FLOPS, "FLOP/s of a GPU"),
    given("mfu_pct", PERCENT, "MFU, % of BF16"),
)


def flops_rows(
    log: TrainingLog, steady: SteadyState, model_name: str, device_name: str | None
) -> list[Row]:
    """Return a row per convention, by the peak of BF16. Raises ConfigError.

    A log does not state what is recomputed, so hardware FLOPs (hfu) are unknown.
    """
    models = read_models(model_name)
    if len(models) != 1:
        raise ConfigError("model", model_name, "one model")
    rates = [own.tokens_per_s_gpu for own in log.steps[steady.num_warmup :]]
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates) or log.facts.seq_len is None:
        facts = "the global batch, the sequence length and the number of GPUs"
        raise ConfigError(
            "model", model_name, f"left out: the log does not state all of {facts}"
        )
    peak = None
    if device_name is not None:
        device = find_device_by_alias(device_name)
        if device is None:
            raise unknown_device(device_name)
        peak = device.peak(DType.BF16)
    flops = of_model(replace(models[0], seq_len=log.facts.seq_len), again=0.0).by_convention()
    rate = median(known)
    return [
        {
            "convention": name,
            "flops_per_token": per_token,
            "flops_per_s": rate * per_token,
            "mfu_pct": peak and 100 * rate * per_token / peak,
        }
        for name, per_token in flops.items()
        if name != "hfu"
    ]
