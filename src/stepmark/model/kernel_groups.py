"""Groups of GPU kernels and of torch's operators, by their names."""

import re
from functools import lru_cache

COMMUNICATION = "communication"
COPIES = "copies"
COPY_KERNELS = "copy kernels"
OPTIMIZER = "optimizer"
ELEMENTWISE = "elementwise"
OTHER = "other"

_COPYING = (
    r"memcpy|memset|::copy_|_copy_|::_to_copy|chunk_cat|split_with_sizes|CatArray|::cat\b"
    "|::fill_|FillFunctor|transpose"
)
# The first pattern that is found in a name is its group. What torch.compile fuses comes first,
# as its kernels list the operations inside; attention comes before products, as its kernels are
# products too; optimizers before the parts of theirs; convolutions before their products.
GROUPS: dict[str, str] = {
    "fused by compile": r"\btriton_(?:poi|per|red|tem|for|sort|split_scan|mm|bmm)|cpp_fused"
    r"|graph_\d",
    COMMUNICATION: r"nccl|rccl|msccl|c10d|gloo|all_?gather(?!_copy)|reduce_?scatter"
    r"|all_?reduce|all_?to_?all|cross_device_reduce|multimem|symm_mem|nvshmem|deep_?ep\b",
    "attention": r"flash(?!infer::)|(?:prefill|decode)with\w*kvcache|fmha|attention|attn|sdpa"
    r"|aiter.*(?:mha|mla|paged)",
    # Parameters, gradients and moments are no integers.
    OPTIMIZER: r"adam|multi_tensor_apply(?!.*Functor<(?:int|long)\b)|foreach|lerp_|addcmul"
    r"|addcdiv",
    "convolutions": r"conv(?!er)|(?:wgrad|dgrad|fprop)_|implicit_gemm|_scudnn_|winograd|igemm_"
    r"(?:fwd|bwd|wrw)|nchwtonhwc|nhwctonchw|miopen",
    "matrix products": r"gemm|gemv|nvjet|cublas|xmma|\bcutlass_|cutlass::(?:device_)?kernel"
    r"|Cijk_|matmul|\bbmm_|::(?:add)?b?mm\b|scaled_mm|_mm_|::linear\b|splitk",
    "norms": r"(?:layer|rms|batch|group)_?norm|rmsnorm|gammabeta|\bbn_[fb]w|::bn_",
    "softmax and loss": r"softmax|nll_loss|cross_entropy",
    COPIES: rf"^mem(?:cpy|set)|^(?!.*kernel)(?=[\w:. ]+$).*(?:{_COPYING})",  # or operators
    COPY_KERNELS: _COPYING,
    "indexing": r"(?<!rotary_)embedding|index|gather|scatter|sort|topk|scan",
    "reductions": r"reduce",
    ELEMENTWISE: r"elementwise|functor",
}
_PATTERNS = {group: re.compile(words, re.IGNORECASE) for group, words in GROUPS.items()}


_MAX_NAME = 20_000  # characters; names of CUTLASS's kernels have thousands


def short_name(name: str) -> str:
    """Return the name of a kernel without its type and arguments."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return plain.partition("(")[0]


@lru_cache(maxsize=1 << 16)
def group_of(name: str, in_optimizer: bool | None = None) -> str:
    """Return the group of a kernel or an operator.

    in_optimizer: whether it runs in the step of the optimizer, where the trace has marks of it.
    All work there is the optimizer's; other foreach kernels clip or zero gradients.
    """
    groups = (group for group, mark in _PATTERNS.items() if mark.search(name[:_MAX_NAME]))
    group = next(groups, OTHER)
    if in_optimizer and group != COMMUNICATION:
        return OPTIMIZER
    return ELEMENTWISE if group == OPTIMIZER and in_optimizer is False else group
