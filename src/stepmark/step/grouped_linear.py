"""One product of all routed experts of a rank."""

from stepmark.ground.dtypes import DType
from stepmark.model.layers import Linear
from stepmark.model.ops import GroupedGemm, Op, Phase
from stepmark.step.kernel_choice import KernelChoice, gradient_sum, memory_kernel
from stepmark.step.layout import Inputs, ShardLayout, grouped_products
from stepmark.step.module import Module, Param, role_of, work_of
from stepmark.step.workload import Kernel


def grouped_linear(
    linear: Linear, rows: int, layout: ShardLayout, inputs: Inputs, kernels: KernelChoice
) -> Module:
    """Return the product of each expert's share of the rows with its own weight."""
    etp = layout.expert_tp
    out = linear.out // etp if linear.split == "out" else linear.out
    width = linear.width // etp if linear.split == "in" else linear.width
    count = linear.copies // layout.axes.ep
    role = role_of(linear.name)
    ops: tuple[tuple[Phase, Op | Kernel], ...]
    if inputs.dtype is DType.FP64:  # no operator: experts one by one
        kernel = Kernel(name="experts", flops=2 * rows * out * width)
        ops = tuple((phase, kernel) for phase in (Phase.FWD, Phase.DGRAD, Phase.WGRAD))
    else:
        product = GroupedGemm(
            num_groups=count,
            tokens=rows,
            n=out,
            k=width,
            skew=inputs.skew,
            dtype=inputs.plain_dtype,
        )
        ops = tuple(grouped_products(inputs, product))
    if kernels.adds_gradients:
        added = gradient_sum(count * out * width, inputs.plain_dtype.itemsize, kernels)
        ops = (*ops, (Phase.WGRAD, added))
    weight = Param(name=linear.name, shape=(count, out, width), part=role, is_expert=True)
    params: tuple[Param, ...] = (weight,)
    if linear.has_bias:
        bias = Param(
            name=f"{linear.name}_bias",
            shape=(count, out),
            part=role,
            is_expert=True,
            is_partial=linear.split != "out",
        )
        params = (weight, bias)
        size = rows * out * inputs.plain_dtype.itemsize
        summed = memory_kernel("bias_gradient", size)
        ops = (
            *ops,
            (Phase.FWD, memory_kernel("bias_add", 2 * size)),
            (Phase.WGRAD, summed),
        )
    return Module(name=linear.name, role=role, work=work_of(role, *ops), params=params)
