"""Experts equal their definition token by token; rows can go through other ranks."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.training.models import batch, made
from torch import Tensor, nn
from torch.nn import functional

from stepmark.model.layers import MoeConfig
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model
from stepmark.training.layers import (
    Compute,
    Experts,
    LocalExperts,
    grouped,
    looped,
    sort_by_expert,
)
from stepmark.training.model_parallel import AllToAll

NAMES = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")


def experts(model: ModelConfig, *, seed: int = 0) -> Experts:
    assert model.moe
    torch.manual_seed(seed)
    module = Experts(model, model.moe)
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.1)
    return module


def tokens(model: ModelConfig) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 8, model.hidden_size, generator=generator, requires_grad=True)


@given(
    st.integers(1, 9).flatmap(
        lambda count: st.tuples(st.just(count), st.lists(st.integers(0, count - 1), min_size=1))
    )
)
def test_sorting(drawn: tuple[int, list[int]]) -> None:
    num_experts, chosen = drawn
    order_M, inverse_M, ends_E = sort_by_expert(torch.tensor(chosen), num_experts)
    assert order_M.tolist() == sorted(range(len(chosen)), key=chosen.__getitem__)
    assert order_M[inverse_M].tolist() == list(range(len(chosen)))
    assert ends_E.dtype == torch.int32
    sizes = [end - begin for begin, end in pairwise([0, *ends_E.tolist()])]
    assert sizes == [chosen.count(expert) for expert in range(num_experts)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", [[7, 7, 33, 50], [0, 0, 0, 50], [50, 50, 50, 50]])
def test_one_kernel_equals_a_loop(ends: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows_MK = torch.randn(50, 32, dtype=dtype, requires_grad=True)
    weight_ENK = torch.randn(4, 16, 32, dtype=dtype, requires_grad=True)
    ends_E = torch.tensor(ends, dtype=torch.int32)
    both = [multiply(rows_MK, weight_ENK, ends_E) for multiply in (grouped, looped)]
    torch.testing.assert_close(*both)
    grads = [torch.autograd.grad(y.square().sum(), (rows_MK, weight_ENK)) for y in both]
    torch.testing.assert_close(*grads)


def by_token(module: Experts, x_NC: Tensor) -> Tensor:
    """The definition, one token and one expert at a time."""
    assert module.held.gate is not None
    weights_NK, experts_NK = module.route(x_NC)
    rows = []
    for x_C, weights, chosen in zip(x_NC, weights_NK, experts_NK.tolist(), strict=True):
        row = torch.zeros_like(x_C)
        for weight, expert in zip(weights, chosen, strict=True):
            inner = functional.silu(module.held.gate[expert] @ x_C) * (
                module.held.up[expert] @ x_C
            )
            row = row + weight * (module.held.down[expert] @ inner)
        rows.append(row)
    y_NC = torch.stack(rows)
    return y_NC if module.shared is None else y_NC + module.shared(x_NC)


@pytest.mark.parametrize("name", NAMES)
def test_experts_are_their_definition(name: str) -> None:
    model = find_model(name).tiny()
    module, x_BTC = experts(model), tokens(model)
    trained = [x_BTC, *(weight for weight in module.parameters() if weight.requires_grad)]
    got, expected = module(x_BTC), by_token(module, x_BTC.flatten(0, 1)).view_as(x_BTC)
    torch.testing.assert_close(got, expected)
    scale = torch.randn_like(got)
    grads = [torch.autograd.grad((y * scale).sum(), trained) for y in (got, expected)]
    torch.testing.assert_close(*grads)


def test_equal_experts_are_one_dense_layer() -> None:
    """Weights of a token sum to 1."""
    model = find_model("mixtral-8x7b").tiny()
    module, x_BTC = experts(model), tokens(model)
    assert module.held.gate is not None
    with torch.no_grad():
        for weight in (module.held.gate, module.held.up, module.held.down):
            weight.copy_(weight[:1].expand_as(weight))
    inner = functional.silu(x_BTC @ module.held.gate[0].t()) * (x_BTC @ module.held.up[0].t())
    torch.testing.assert_close(module(x_BTC), inner @ module.held.down[0].t())


def test_weights_are_the_softmax_over_the_chosen() -> None:
    model = find_model("qwen3-30b-a3b").tiny()
    module = experts(model)
    x_NC = tokens(model).flatten(0, 1)
    weights_NK, experts_NK = module.route(x_NC)
    logits_NK = module.router(x_NC).gather(1, experts_NK)
    torch.testing.assert_close(weights_NK, logits_NK.softmax(dim=-1))
    assert (weights_NK.diff(dim=1) <= 0).all(), "the best first"


def test_the_router_bias_enters_the_choice_only() -> None:
    model = find_model("deepseek-v3").tiny()
    module = experts(model)
    x_NC = tokens(model).flatten(0, 1)
    assert module.router_bias is not None
    assert not module.router_bias.requires_grad
    nn.init.zeros_(module.router_bias)
    module.router_bias[3] = 10.0
    weights_NK, experts_NK = module.route(x_NC)
    assert (experts_NK == 3).any(dim=1).all(), "every token goes to the favoured expert"
    scores_NK = module.router(x_NC).gather(1, experts_NK).sigmoid()
    torch.testing.assert_close(weights_NK, scores_NK / scores_NK.sum(1, keepdim=True))


def test_gelu_experts() -> None:
    moe = MoeConfig(num_experts=4, top_k=1, ffn_hidden_size=32)
    model = replace(find_model("mixtral-8x7b").tiny(), activation="gelu", moe=moe)
    module, x_BTC = experts(model), tokens(model)
    assert module.held.gate is None
    x_NC = x_BTC.flatten(0, 1)
    _, experts_NK = module.route(x_NC)
    for row, x_C, (expert,) in zip(
        module(x_BTC).flatten(0, 1), x_NC, experts_NK.tolist(), strict=True
    ):
        inner = functional.gelu(module.held.up[expert] @ x_C, approximate="tanh")
        torch.testing.assert_close(row, module.held.down[expert] @ inner)


class TwoHolders:
    """What two ranks would do, in one process: each holds half of the experts."""

    def __init__(self, model: ModelConfig, whole: LocalExperts) -> None:
        assert model.moe
        self.half = model.moe.num_experts // 2
        half = replace(model.moe, num_experts=self.half)
        self.parts = [LocalExperts(model, half) for _ in range(2)]
        for name, weight in whole.named_parameters():
            for part, share in zip(self.parts, weight.split(self.half), strict=True):
                part.get_parameter(name).data.copy_(share)

    def __call__(self, rows_MC: Tensor, ends_E: Tensor, compute: Compute) -> Tensor:
        border = int(ends_E[self.half - 1])
        first = self.parts[0](rows_MC[:border], ends_E[: self.half])
        second = self.parts[1](rows_MC[border:], ends_E[self.half :] - border)
        return torch.cat([first, second])


def test_rows_can_be_sent_to_other_holders() -> None:
    model = find_model("deepseek-v3").tiny()
    module, x_BTC = experts(model), tokens(model)
    assert module.held.gate is not None
    expected = module(x_BTC)
    scale = torch.randn_like(expected)
    wanted = torch.autograd.grad(
        (expected * scale).sum(), (x_BTC, module.router.weight, module.held.gate)
    )
    holders = TwoHolders(model, module.held)
    module.dispatch = holders
    got = module(x_BTC)
    gates = [part.gate for part in holders.parts if part.gate is not None]
    grad_x, grad_router, *grad_gates = torch.autograd.grad(
        (got * scale).sum(), (x_BTC, module.router.weight, *gates)
    )
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close((grad_x, grad_router, torch.cat(grad_gates)), wanted)


def test_all_experts_learn() -> None:
    model = find_model("deepseek-v3").tiny()
    transformer = made(model)
    transformer(*batch(model)).backward()
    module = transformer.blocks["1"].ffn
    assert isinstance(module, Experts)
    assert module.held.gate is not None
    assert module.held.gate.grad is not None
    assert (module.held.gate.grad.flatten(1).norm(dim=1) > 0).all()
    assert not isinstance(transformer.blocks["0"].ffn, Experts), "the first layer is dense"


def test_dynamo_does_not_look_into_the_exchange() -> None:
    """It would compile the split sizes of every step anew, then give up."""
    assert getattr(AllToAll.__call__, "_torchdynamo_disable", False)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_under_autocast_experts_return_the_type_of_their_products(device: str) -> None:
    """On a GPU autocast sums in fp32, and the next block would get rows of it."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    model = find_model("mixtral-8x7b").tiny()
    module = experts(model).to(device)
    x_BTC = tokens(model).to(device, torch.bfloat16)
    with torch.autocast(device, torch.bfloat16):
        assert module(x_BTC).dtype == torch.bfloat16
