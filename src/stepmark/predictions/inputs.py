"""What a step is predicted from: what it does, and what its parts cost."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from stepmark.cases.comm_curve import Curve
from stepmark.cases.flops import TokenFlops, of_model, per_token
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import Precision
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.device import DeviceSpec, load_devices
from stepmark.model.network import Network
from stepmark.model.ops import Attention, Bmm, Gemm, GroupedGemm, Phase
from stepmark.predictions.costs import CostOf, first_of
from stepmark.predictions.factors import Factors
from stepmark.predictions.predict_options import show_what_if
from stepmark.step.roofline import roofline_time
from stepmark.step.workload import ComputeOp, Operation, Workload
from stepmark.timeline.ledger import Work
from stepmark.timeline.step_cost import OpCost, PowerModel
from stepmark.workloads.file_times import FileTimes

# Between kernels that are launched already, without a profiler: measured on an H200
# (docs/diary). It stands in where no calibration has it.
_GAP_S = 1.2e-6
# Compute capability of datacenter GPUs, and the width of heads of FP8 attention on the first.
_HOPPER, _BLACKWELL = 9, 10
_HOPPER_WIDTH = 128
HostOf = Callable[[Operation], float]  # seconds in which the host issues an operation
_Product = Gemm | GroupedGemm | Bmm | Attention


def no_host(_op: Operation) -> float:
    """Return the host's time where it is ahead of the device."""
    return 0.0


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a step does, and what its parts cost.

    case: None for a workload file, whose times are then `file`. compute: sources of costs of
    operations, the best first. What a calibration measures has the value of what is not known
    without one: calibration: its run; calibrated_on: its date and age; curves: of collectives;
    compute_slowdown, comm_slowdown: as in Costs; is_host: computation runs on it; memory: cases
    of few layers with their allocated and reserved bytes; memory_bytes: of the device;
    host_factor: on host_s, by the calibrated step; step: that step and its measured seconds;
    comm_copies: seconds of copies on the streams of collectives per byte of their messages, by
    collective. link: factor on the bandwidth of messages; host: its name, where one is chosen;
    what_if: how the device was changed. factors: on costs, fitted to anchors. network: links
    between ranks; None where they are not known. notes: on the choice of all this.
    """

    name: str
    workload: Workload
    compute: tuple[CostOf, ...]
    device_name: str
    device: DeviceSpec | None = None
    case: TrainCase | None = None
    file: FileTimes | None = None
    times_of_file: bool = False  # they are the costs
    sends_by_network: bool = False  # but for messages, which a chosen network sends
    host_s: HostOf = no_host
    host_factor: float = 1.0
    host_is_known: bool = False
    host: str = ""
    gap_s: float = _GAP_S
    is_host: bool = False
    compute_slowdown: Mapping[Work, float] = field(default_factory=dict)
    comm_slowdown: float | None = None
    curves: tuple[Curve, ...] = ()
    network: Network | None = None
    link: float = 1.0
    factors: Factors = field(default_factory=dict)
    what_if: str = ""
    power: PowerModel | None = None
    memory: tuple[tuple[TrainCase, int, int], ...] = ()
    memory_bytes: int | None = None
    calibration: str = ""
    calibrated_on: str = ""
    step: tuple[TrainCase, float] | None = None
    comm_copies: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        return self.case.num_ranks if self.case else self.workload.world_size

    @property
    def is_on_cpu(self) -> bool:
        """Return whether the step is one of CPUs; workload files are of GPUs."""
        return self.case is not None and self.case.device == "cpu"

    @property
    def peak_flops_per_s(self) -> float | None:
        """Return the peak of the step's products; that of bf16 for narrower ones."""
        if self.device is None:
            return None
        if self.case is not None:
            is_fp32 = self.case.precision is Precision.FP32
        else:
            is_fp32 = {op.dtype for op, _ in self.products} == {DType.FP32}
        return self.device.peak(DType.FP32 if is_fp32 else DType.BF16)

    @property
    def narrow_dtypes(self) -> tuple[DType, ...]:
        """Types of products that are narrower than 16 bits, each once."""
        dtypes: dict[DType, None] = {}
        for op, _ in self.products:
            if op.dtype.is_narrow:
                dtypes[op.dtype] = None
        return tuple(dtypes)

    def check_products(self) -> None:
        """Raise ConfigError for products of a type that the device does not multiply."""
        device = self.device
        if device is None:
            return
        for dtype in self.narrow_dtypes:
            if device.peak(dtype) is None:
                names = ", ".join(
                    key for key, other in load_devices().items() if other.peak(dtype)
                )
                allowed = f"a device with a peak of {dtype} products: {names}"
                raise ConfigError("device", device.key, allowed)
        self._check_attention(device)

    def _check_attention(self, device: DeviceSpec) -> None:
        """Raise ConfigError for FP8 attention that no fused kernel of the device has.

        TransformerEngine 2.11, common/fused_attn/fused_attn.cpp (nvte_get_fused_attn_backend)
        and pytorch/attention/dot_product_attention/utils.py (get_attention_backend).
        """
        ops = [
            op
            for op, _ in self.products
            if isinstance(op, Attention) and op.dtype.is_fp8 and op.phase is Phase.FWD
        ]
        if not ops:
            return
        is_tensorwise = self.workload.settings.get("fp8_recipe") == "tensorwise"
        fits = all(
            op.head_dim_qk == _HOPPER_WIDTH and not op.seq_q % _HOPPER_WIDTH for op in ops
        )
        major, _ = device.capability
        if device.vendor != "nvidia" or major not in (_HOPPER, _BLACKWELL):
            allowed = "one of compute capability 9 or 10 with FP8 attention"
            raise ConfigError("device", device.key, allowed)
        if major == _HOPPER and (is_tensorwise or not fits):
            allowed = (
                "one of compute capability 10 with FP8 attention by tensorwise scaling, and of"
                f" heads or sequences that are not {_HOPPER_WIDTH} wide or a multiple of it"
            )
            raise ConfigError("device", device.key, allowed)

    @property
    def tokens(self) -> int | None:
        """Return the tokens of an optimizer step; None where they are not known."""
        if self.case is None:
            return self.workload.tokens
        return self.case.tokens_per_step * self.case.grad_accum

    @property
    def seq_len(self) -> int | None:
        """Return the tokens of a sequence; None where the model is not known."""
        model = self.case.model if self.case else self.workload.model
        return model.seq_len if model else None

    @cached_property
    def token_flops(self) -> TokenFlops | None:
        """FLOPs of a token; None where the model is not known."""
        if self.case is not None:
            return per_token(self.case)
        model = self.workload.model
        if model is None or not self.tokens:
            return None
        ranks = self.workload.world_size / len(self.workload.stages)
        again = sum(
            count * (op.flops or 0) / (self._imbalance if isinstance(op, GroupedGemm) else 1)
            for (op, reruns), count in self.products.items()
            if reruns
        )
        is_frozen = bool(self.workload.settings.get("lora_rank"))
        return of_model(model, again * ranks / self.tokens, is_frozen=is_frozen)

    @property
    def _imbalance(self) -> float:
        """Rows of the experts of the workload's ranks over the mean of all ranks."""
        settings = self.workload.settings
        imbalance = float(settings.get("imbalance") or 1)
        capacity = settings.get("moe_expert_capacity_factor")
        return min(imbalance, max(1.0, float(capacity))) if capacity else imbalance

    @cached_property
    def products(self) -> Mapping[tuple[_Product, bool], int]:
        """Products of a rank of every stage and whether it reruns them, with their number."""
        counts = Counter[tuple[_Product, bool]]()
        for op, count in self.workload.issued().items():
            if isinstance(op, ComputeOp) and isinstance(op.op, _Product):
                counts[op.op, op.recompute] += count
        return counts


def changed(inputs: Inputs, changes: Mapping[str, float]) -> Inputs:
    """Return the inputs with another device, as --what-if has it. Raises ConfigError."""
    if not changes:
        return inputs
    cost_of = first_of(inputs.compute)
    device = inputs.device
    faster = None
    if device:
        flops = changes.get("flops", 1.0)
        bandwidth = device.hbm_bytes_per_s and changes.get("hbm", 1.0) * device.hbm_bytes_per_s
        peaks = {dtype: flops * peak for dtype, peak in device.peak_flops_per_s.items()}
        faster = replace(device, hbm_bytes_per_s=bandwidth, peak_flops_per_s=peaks)

    def cost(op: ComputeOp) -> OpCost | None:
        found = cost_of(op)
        if found is None:
            return None
        times = {
            work: time_s / _factor(op, work, device, faster, changes)
            for work, time_s in found.time_s.items()
        }
        return replace(found, time_s=times)

    return replace(
        inputs,
        device=faster,
        what_if=show_what_if(tuple(changes.items())),
        compute=(cost,),
        link=changes.get("link", 1.0),
        power=_changed_power(inputs.power, changes),
    )


def _factor(
    op: ComputeOp,
    work: Work,
    device: DeviceSpec | None,
    faster: DeviceSpec | None,
    changes: Mapping[str, float],
) -> float:
    """Return how many times as fast the operation is: its roofline's ratio, where known.

    Work of several kinds stays as fast as it is in the file.
    """
    flops = changes.get("flops", 1.0)
    if work is Work.FILE:
        return 1.0
    if work not in (Work.MATMUL, Work.ATTENTION):
        return changes.get("hbm", 1.0)
    if device is None or faster is None or device.hbm_bytes_per_s is None:
        return flops
    before_s = roofline_time(op.op, device)
    after_s = roofline_time(op.op, faster)
    return before_s / after_s if before_s and after_s else flops


def _changed_power(power: PowerModel | None, changes: Mapping[str, float]) -> PowerModel | None:
    limit_w = changes.get("power")
    if limit_w is None:
        return power
    shown = f"power={limit_w:g}W"
    if power is None:
        allowed = "it needs a calibration that measured the power of a GPU"
        raise ConfigError("what-if", shown, allowed)
    if limit_w <= power.static_w:
        raise ConfigError("what-if", shown, f"above {power.static_w:.0f} W, idle")
    return replace(power, limit_w=limit_w)
