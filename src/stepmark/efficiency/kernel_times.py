"""Times of operators on a device by data sheet: measured ones of it or of its like.

What has no measurement of the device follows a rule:

- A device without measurements is like one of its vendor and compute capability, with its own
  peak and memory bandwidth; without such a one products have `_SHARE` of the peak.
- fp32, tf32 and fp64 have the share of the peak that bf16 has.
- A narrow product without its casts has the law of public ones, which include the cast of x,
  without that cast. mxfp8 is like fp8 that is scaled by blocks.
- K and V, which kernels of inference also write to a cache, do not count in attention.
- Attention in fp8 has the law of public kernels of inference. Its backward pass takes as many
  times its forward pass as that in bf16.
- What memory bounds has the share of the bandwidth that it reaches on Hopper, times the ratio
  of the devices' plain elementwise kernels.
- Products of experts are products of the rows of each expert, times the ratio that grouped
  ones have to single ones.
"""

import csv
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple

from stepmark.efficiency.products import ProductLaw
from stepmark.ground.dtypes import DType
from stepmark.ground.package_data import data_text
from stepmark.model.device import DeviceSpec, load_devices
from stepmark.model.ops import (
    FAMILY_OF,
    Attention,
    Bmm,
    Gemm,
    GroupedGemm,
    HostCopy,
    Layout,
    Op,
    Optimizer,
    Phase,
    Scaling,
)
from stepmark.step.workload import Kernel

_BF16 = "bf16"
# Of large products of AMD's devices: hipBLASLt in eager models 0.43 (MI300X), 0.37 (MI355X) and
# tuned 0.58 (AMD-AGI/TraceLens 171dd747, AMD-AGI/Primus fd1eeabb).
_SHARE = 0.45
_ATTENTION_SHARE = 0.3
_MOST_WIDTH = 256  # of heads that were measured
# Rows of operands that begin between two multiples of 16 bytes: cuBLAS then takes 4.6 to 6.9
# times as long on an H200 (vocabulary of 50257; results/h200-operators.tar.gz).
_UNALIGNED = 4.7
_ALIGNMENT = 16
_NARROW_KINDS = {
    Scaling.TENSORWISE: "tensorwise",
    Scaling.ROWWISE: "rowwise",
    Scaling.BLOCKWISE: "blockwise",
    Scaling.NONE: "tensorwise",  # factors of earlier steps, as TransformerEngine's
}


# FlashAttention's first version, and the one in Triton, over the second version: 1.7 to 3.0 and
# 1.3 to 2.5 on A100 (arXiv:2307.08691, section 4.1).
_FLASH1 = 1.8


# Copies between pinned memory and an H200 (PCIe 5.0 x16, 64 GB/s): 55.4 GB/s either way.
_HOST_LAUNCH_S = 2.5e-6
_HOST_SHARE = 0.866


class AttentionKernel(StrEnum):
    """Kernel of attention, as far as times tell them apart."""

    AUTO = "auto"  # the fastest of the device
    FLASH = "flash"  # FlashAttention-2
    FLASH1 = "flash1"  # FlashAttention's first version
    FLEX = "flex"  # torch's FlexAttention, for windows, sinks and caps


class Style(StrEnum):
    """Who writes the kernels of what memory bounds."""

    EAGER = "eager"  # one kernel for each operation of PyTorch
    FUSED = "fused"  # torch.compile, TransformerEngine, Apex


class Basis(StrEnum):
    """What a time rests on."""

    MEASURED = "measured"  # operators on this device
    LIKE = "like"  # operators on another device, or a rule


class KernelTime(NamedTuple):
    """Seconds of an operator, and what they rest on."""

    time_s: float
    basis: Basis


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLaw:
    """Time of causal attention: launch + FLOP / rate + c x elements of q and the result.

    backward: time of a backward pass over that of a forward pass. flash, flash_backward: time
    of FlashAttention-2's kernel over that of cuDNN's or FlashAttention-3's; flex,
    flex_backward: of torch's FlexAttention. Windows and packed sequences take as long as their
    pairs of a full mask.
    """

    launch_s: float
    flops_per_s: float
    element_s: float
    backward: float
    flash: float
    flash_backward: float
    flex: float
    flex_backward: float

    def seconds(self, op: Attention, kernel: AttentionKernel) -> float:
        forward = replace(op, phase=Phase.FWD)
        width = op.head_dim_qk + op.head_dim_v
        elements = op.batch * op.seq_q * op.heads * width
        time_s = self.launch_s + forward.flops / self.flops_per_s + self.element_s * elements
        ratios = {
            AttentionKernel.AUTO: (1.0, 1.0),
            AttentionKernel.FLASH: (self.flash, self.flash_backward),
            AttentionKernel.FLASH1: (self.flash * _FLASH1, self.flash_backward * _FLASH1),
            AttentionKernel.FLEX: (self.flex, self.flex_backward),
        }
        of_forward, of_backward = ratios[kernel]
        if op.phase is Phase.FWD:
            return time_s * of_forward
        return time_s * self.backward * of_backward


@dataclass(frozen=True, eq=False, kw_only=True)
class KernelTimes:
    """Times of operators on a device.

    like: the device whose measurements these are; None: none is like it. layouts: time of a
    product with this layout over that of x W^T. grouped: of grouped products over single ones.
    shares: of the memory bandwidth by family, kind, pass and style. memory: ratio of this
    device's elementwise kernels to Hopper's.
    """

    device: DeviceSpec
    like: DeviceSpec | None
    products: Mapping[str, ProductLaw]
    layouts: Mapping[Layout, float]
    grouped: float
    attention: Mapping[tuple[str, int], AttentionLaw]  # element type, head width
    shares: Mapping[tuple[str, str, str, Style], float]
    memory: float

    @property
    def basis(self) -> Basis:
        """What products and attention rest on."""
        return Basis.MEASURED if self.like is self.device else Basis.LIKE

    def time_of(
        self,
        op: Op | Kernel,
        style: Style,
        attention: AttentionKernel = AttentionKernel.AUTO,
    ) -> KernelTime | None:
        """Return the time of an operator; None where its cost or a peak is not known."""
        if isinstance(op, HostCopy):
            return self._host_time(op)
        if op.executed_flops is None or op.bytes_moved is None:
            return None
        if isinstance(op, Gemm | Bmm | GroupedGemm):
            time_s = self._product_s(op)
        elif isinstance(op, Attention):
            time_s = self._attention_s(op, attention)
        elif isinstance(op, Kernel) and op.flops:
            return self._scan_time(op, style)
        else:
            return self._memory_time(op, style)
        is_rule = isinstance(op, Attention) and (
            bool(op.window or op.sinks or op.softcap or op.piece_mean)
            or op.head_dim_qk > _MOST_WIDTH
            or op.dtype.is_narrow
        )
        basis = Basis.LIKE if is_rule else self._basis_of(op.dtype)
        return None if time_s is None else KernelTime(time_s, basis)

    def _host_time(self, op: HostCopy) -> KernelTime | None:
        rate = self.device.host_link_bytes_per_s
        if rate is None:
            return None
        return KernelTime(_HOST_LAUNCH_S + op.num_bytes / (_HOST_SHARE * rate), self.basis)

    def _basis_of(self, dtype: DType) -> Basis:
        is_known = dtype in (DType.BF16, DType.FP16) or dtype.is_narrow
        return self.basis if is_known else Basis.LIKE

    def _product_s(self, op: Gemm | Bmm | GroupedGemm) -> float | None:
        law = self._law(op.dtype, getattr(op, "scaling", Scaling.NONE))
        if law is None:
            return None
        if isinstance(op, GroupedGemm):
            return self._grouped_s(op, law)
        time_s = law.seconds(op.m, op.n, op.k) * self.layouts.get(op.layout, 1.0)
        if isinstance(op, Bmm):  # one launch; all of them exceed the caches
            work_s = op.batch * max(0.0, time_s - law.launch_s)
            return max(law.launch_s + work_s, self._traffic_s(op))
        time_s *= _UNALIGNED if self._is_unaligned(op) else 1.0
        return max(time_s, self._traffic_s(op))  # the law was fitted to many rows

    def _grouped_s(self, op: GroupedGemm, law: ProductLaw) -> float:
        time_s = law.launch_s
        layouts = {Phase.FWD: Layout.NT, Phase.DGRAD: Layout.NN, Phase.WGRAD: Layout.TN}
        for rows in filter(None, op.group_sizes()):
            shape = {
                Phase.FWD: (rows, op.n, op.k),
                Phase.DGRAD: (rows, op.k, op.n),
                Phase.WGRAD: (op.n, op.k, rows),
            }[op.phase]
            time_s += max(0.0, law.seconds(*shape) - law.launch_s)
        time_s *= self.grouped * self.layouts.get(layouts[op.phase], 1.0)
        return max(time_s, self._traffic_s(op))

    def _traffic_s(self, op: Gemm | Bmm | GroupedGemm) -> float:
        """Return the seconds that a plain kernel needs for the operands."""
        time = self._memory_time(Kernel(name="", bytes_moved=op.bytes_moved), Style.FUSED)
        return time.time_s if time else 0.0

    def _is_unaligned(self, op: Gemm) -> bool:
        """Return whether rows of an operand begin between multiples of 16 bytes."""
        is_old = self.device.vendor != "nvidia" or self.device.capability < (9, 0)
        if is_old or op.dtype.is_narrow:
            return False
        lengths = {Layout.NT: (op.k, op.n), Layout.NN: (op.k, op.n), Layout.TN: (op.m, op.n)}
        rows = lengths.get(op.layout, (op.m, op.k, op.n))
        return any(row * op.dtype.itemsize % _ALIGNMENT for row in rows)

    def _law(self, dtype: DType, scaling: Scaling) -> ProductLaw | None:
        """Return the law of products of a type, at this device's own peak."""
        peak = self.device.peak(dtype)
        if peak is None:
            return None
        if dtype in (DType.BF16, DType.FP16):
            return self.products[_BF16]
        kind = {DType.MXFP8: "blockwise", DType.NVFP4: "nvfp4"}.get(dtype)
        if kind is None and dtype.is_narrow:
            kind = _NARROW_KINDS[scaling]
        return self._laws(kind, _ratio(peak, _peak_16_bits(self.device)))

    @cache  # noqa: B019  # one object for each device
    def _laws(self, kind: str | None, faster: float) -> ProductLaw:
        bf16 = self.products[_BF16]
        if kind is not None and (narrow := self.products.get(kind)):
            return replace(narrow, launch_s=bf16.launch_s, x_s=bf16.x_s)
        return replace(bf16, flops_per_s=bf16.flops_per_s * faster)

    def _attention_s(self, op: Attention, kernel: AttentionKernel) -> float | None:
        peak = self.device.peak(op.dtype)
        if peak is None:
            return None
        kind = "fp8" if op.dtype.is_narrow else _BF16
        widths = [width for own, width in self.attention if own == kind]
        if not widths:
            share = _ATTENTION_SHARE * (1.0 if op.phase is Phase.FWD else 0.8)
            assert op.executed_flops
            return op.executed_flops / (share * peak)
        width = min(widths, key=lambda each: abs(each - op.head_dim_qk))
        time_s = self.attention[kind, width].seconds(op, kernel)
        if kind == _BF16 and op.dtype not in (DType.BF16, DType.FP16):
            return time_s * _ratio(_peak_16_bits(self.device), peak)
        return time_s

    def _scan_time(self, op: Kernel, style: Style) -> KernelTime | None:
        """Return the time of a kernel that multiplies, such as a scan: none was measured."""
        peak = self.device.peak(DType.BF16)
        memory = self._memory_time(op, style)
        if peak is None or memory is None or op.flops is None:
            return None
        products_s = op.flops / (_ATTENTION_SHARE * peak)
        return memory if products_s <= memory.time_s else KernelTime(products_s, Basis.LIKE)

    def _memory_time(self, op: Op | Kernel, style: Style) -> KernelTime | None:
        bandwidth = self.device.hbm_bytes_per_s
        if not op.bytes_moved or bandwidth is None:
            return None
        family = "kernel" if isinstance(op, Kernel) else FAMILY_OF[type(op)]
        phase = "optim" if isinstance(op, Optimizer) else getattr(op, "phase", Phase.FWD)
        names = (op.name if isinstance(op, Kernel) else getattr(op, "kind", ""), "")
        keys = ((family, name, str(phase), style) for name in names)
        share = next((self.shares[key] for key in keys if key in self.shares), None)
        if share is None:
            share = self.shares["kernel", "", "fwd", Style.FUSED]
        time_s = op.bytes_moved / (bandwidth * share * self.memory)
        is_rule = self.memory != 1.0 or getattr(op, "kind", "") == "xielu"
        return KernelTime(time_s, Basis.LIKE if is_rule else self.basis)


def kernel_times(device: DeviceSpec) -> KernelTimes:
    """Return the times of operators on a device."""
    is_listed = load_devices().get(device.key) is device
    return _listed(device.key) if is_listed else _times_of(device)


@cache
def _listed(key: str) -> KernelTimes:
    return _times_of(load_devices()[key])


def _times_of(device: DeviceSpec) -> KernelTimes:
    data = _data()
    like = _like(device)
    shares = dict(_shares(data["memory"]))
    memory: float = data["elementwise"].get(like.key if like else "", 1.0)
    if like is None:
        peak = _peak_16_bits(device) or max(device.peak_flops_per_s.values())
        flat = ProductLaw(launch_s=5e-6, flops_per_s=_SHARE * peak, x_s=0.0, rest_s=0.0)
        return KernelTimes(
            device=device,
            like=None,
            products={_BF16: flat},
            layouts={},
            grouped=1.0,
            attention={},
            shares=shares,
            memory=memory,
        )
    own = data["products"][like.key]
    kernels = data["kernels"][like.key]
    peaks = _ratio(_peak_16_bits(device), like.peak(DType.BF16))
    bandwidths = _ratio(device.hbm_bytes_per_s, like.hbm_bytes_per_s)
    return KernelTimes(
        device=device,
        like=like,
        products={
            kind: ProductLaw(
                launch_s=law["launch_us"] * 1e-6,
                flops_per_s=law["tflops"] * 1e12 * peaks,
                x_s=law["x_us"] * 1e-12 / bandwidths,
                rest_s=law["rest_us"] * 1e-12 / bandwidths,
                **_ratios(like.key, kind),
            )
            for kind, law in own.items()
        },
        layouts={
            Layout(name): ratio
            for name, ratio in data["layouts"].get(like.key, {}).items()
            if name != "source"
        },
        grouped=data["grouped"].get(like.key, 1.0),
        attention={
            (kind, int(width)): AttentionLaw(
                launch_s=law["launch_us"] * 1e-6,
                flops_per_s=law["tflops"] * 1e12 * peaks,
                element_s=law["element_us"] * 1e-12 / bandwidths,
                backward=kernels["backward"],
                flash=kernels["flash"],
                flash_backward=kernels["flash_backward"],
                **_flex(kernels["flex"], int(width)),
            )
            for kind, laws in data["attention"].get(like.key, {}).items()
            for width, law in laws.items()
        },
        shares=shares,
        memory=memory,
    )


def _flex(by_width: Mapping[str, tuple[float, float]], width: int) -> dict[str, float]:
    """Return FlexAttention's ratios at the nearest head width."""
    nearest = min(by_width, key=lambda own: abs(int(own) - width))
    forward, backward = by_width[nearest]
    return {"flex": forward, "flex_backward": backward}


def _peak_16_bits(device: DeviceSpec) -> float | None:
    return device.peak(DType.BF16) or device.peak(DType.FP16)


def _ratio(own: float | None, other: float | None) -> float:
    return own / other if own and other else 1.0


def _like(device: DeviceSpec) -> DeviceSpec | None:
    """Return the measured device of this one's kind: itself, or the nearest in bandwidth."""
    measured = [load_devices()[key] for key in _data()["products"]]
    alike = [
        each
        for each in measured
        if (each.vendor, each.capability) == (device.vendor, device.capability)
    ]
    own_first = sorted(
        alike, key=lambda each: abs(_ratio(device.hbm_bytes_per_s, each.hbm_bytes_per_s) - 1)
    )
    return next((each for each in alike if each.key == device.key), None) or next(
        iter(own_first), None
    )


@cache
def _data() -> Mapping[str, Any]:
    return tomllib.loads(data_text("kernel_times.toml"))


@cache
def _columns() -> Mapping[str, tuple[str, ...]]:
    """Return the columns of the table of products by name."""
    names, *rows = csv.reader(data_text("product_times.csv").splitlines())
    return dict(zip(names, zip(*rows, strict=True), strict=True))


def _ratios(device: str, kind: str) -> dict[str, Any]:
    """Return the shapes of a device's products of a kind, and their ratios to its law."""
    columns = _columns()
    cells = columns.get(f"{device}/{kind}", ())
    rows = [
        ((int(m), int(n), int(k)), int(cell) / 1000)
        for m, n, k, cell in zip(columns["m"], columns["n"], columns["k"], cells, strict=False)
        if cell
    ]
    return {"shapes": tuple(s for s, _ in rows), "ratios": tuple(r for _, r in rows)}


def _shares(table: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, str, Style], float]]:
    for name, passes in table.items():
        family, _, kind = name.partition(" ")
        for phase, styles in passes.items():
            for style in Style:
                share = styles if isinstance(styles, float) else styles[style]
                yield (family, kind, phase, style), share
