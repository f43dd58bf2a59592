"""A case's identity is its content, and its command makes it again."""

import dataclasses
import shlex
from dataclasses import replace

import pytest
from tests.model.ops_samples import OPTIONS, PLAIN
from tests.parsing import parse

from stepmark.cases.case import ClockName, Label, OpCase, Rate
from stepmark.ground.dtypes import OPERATOR_DTYPES, DType
from stepmark.ground.errors import ConfigError
from stepmark.measuring.machine import Machine
from stepmark.model.ops import FAMILY_OF, Attention, GroupedGemm, Op, Optimizer, Phase
from stepmark.model.ops.backends import BACKENDS
from stepmark.operators import op_plan
from stepmark.operators.op_options import FamilyOptions, options_class
from stepmark.store.commands import command_of

GOLDEN = {
    "gemm": "80fa3ac99ba45bd5",
    "grouped-gemm": "1d2af17065502bf1",
    "bmm": "67b92ac5ace5de27",
    "attention": "042fe4fa2b5a4b3f",
    "mlp": "c173ba5eba3f0268",
    "embedding-bag": "a035d5df948102da",
    "norm": "3c3f7e14dc79da68",
    "activation": "9ce6a3248ea57c42",
    "rope": "497d229010959c13",
    "cross-entropy": "07c2afeb0b00185f",
    "optimizer": "1ff673ea159414d5",
    "copy": "2b91ed536d431258",
    "host-copy": "34a66e4f330031e4",
}


@pytest.mark.parametrize("family", PLAIN)
def test_case_id_is_stable(family: str) -> None:
    """Stored runs are joined by it: a change needs a new schema, not a new golden."""
    assert OpCase(op=PLAIN[family], backend="torch").case_id[:16] == GOLDEN[family]


def test_equal_operators_have_equal_ids() -> None:
    plain = GroupedGemm(num_groups=2, tokens=4, n=1, k=1, skew=1, phase="wgrad")  # type: ignore[arg-type]
    typed = GroupedGemm(num_groups=2, tokens=4, n=1, k=1, skew=1.0, phase=Phase.WGRAD)
    assert OpCase(op=plain, backend="x").case_id == OpCase(op=typed, backend="x").case_id


def test_no_two_samples_share_an_id() -> None:
    assert len({OpCase(op=op, backend="torch").case_id for op in OPTIONS}) == len(set(OPTIONS))


FIELDS = [
    (family, field.name) for family, op in PLAIN.items() for field in dataclasses.fields(op)
]
# With which other field a change is valid, where it is not alone.
TOGETHER = {
    ("gemm", "scaling"): {"dtype": DType.FP8_E4M3, "scaling": "rowwise"},
    ("gemm", "cast"): {"dtype": DType.FP8_E4M3, "cast": "only"},
    ("attention", "seq_q"): {"seq_q": 65, "causal": False},
    ("attention", "seq_kv"): {"seq_kv": 65, "causal": False},
    ("attention", "varlen"): {"varlen": (60, 4), "batch": 1},
}
# Values that fields have before, where a change is not valid from the defaults.
PACKED = {"piece_mean": 8.0, "piece_max": 32.0}
BEFORE = {("attention", name): PACKED for name in PACKED}
OTHER = {
    "dtype": "fp16",
    "out_dtype": "fp32",
    "layout": "tn",
    "causal": False,
    "sinks": True,
    "heads": 8,
    "kv_heads": 1,
    "head_dim": 16,
}
ONE_CHOICE = {("copy", "phase"), ("host-copy", "phase"), ("optimizer", "phase")}


@pytest.mark.parametrize(("family", "name"), sorted({*FIELDS} - ONE_CHOICE))
def test_every_field_changes_the_id(family: str, name: str) -> None:
    op = PLAIN[family]
    if (family, name) in BEFORE:
        op = replace(op, **BEFORE[family, name])  # type: ignore[arg-type]
    before, after = op, TOGETHER.get((family, name))
    if after is not None:
        rest = {key: value for key, value in after.items() if key != name}
        before = replace(op, **rest)  # type: ignore[arg-type]
    else:
        field = next(f for f in dataclasses.fields(op) if f.name == name)
        others = [v for v in field.metadata.get("allowed", ()) if v != getattr(op, name)]
        after = {name: others[0] if others else OTHER.get(name)}
        if after[name] is None:
            after = {name: getattr(op, name) + 1}
    changed = replace(before, **after)  # type: ignore[arg-type]
    assert OpCase(op=changed, backend="t").case_id != OpCase(op=before, backend="t").case_id


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "te"},
        {"device": "cpu"},
        {"num_ranks": 8},
        {"rate": Rate.BURST},
        *({"clock": clock} for clock in ClockName if clock is not ClockName.AUTO),
    ],
)
def test_how_it_is_measured_changes_the_id(changes: dict[str, object]) -> None:
    case = OpCase(op=PLAIN["gemm"], backend="torch")
    assert replace(case, **changes).case_id != case.case_id  # type: ignore[arg-type]


def test_labels_and_scale_do_not() -> None:
    case = OpCase(op=PLAIN["gemm"], backend="torch")
    labels = (Label(model="x", role="qkv", phase=Phase.FWD, count=2, mbs=3),)
    assert replace(case, labels=labels, scale="1/64").case_id == case.case_id


def parsed(line: str) -> list[OpCase]:
    """What `stepmark op FAMILY ...` would measure."""
    program, verb, family, *arguments = shlex.split(line)
    assert (program, verb) == ("stepmark", "op")
    options = parse(options_class(family), [family, *arguments])
    assert isinstance(options, FamilyOptions)
    machine = Machine(device=options.device or "", num_accelerators=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKENDS, family, (*BACKENDS[family], "torch", "te"))
        return op_plan.family_cases(options, machine)


def reproduces(case: OpCase) -> None:
    (again,) = parsed(command_of(case))
    assert again.op == case.op, command_of(case)
    assert again.case_id == case.case_id, command_of(case)


@pytest.mark.parametrize("op", OPTIONS, ids=repr)
def test_the_reproducing_command_reproduces(op: Op) -> None:
    reproduces(OpCase(op=op, backend="torch", device="cpu"))
    reproduces(OpCase(op=op, backend="te", device="cuda", rate=Rate.BURST, num_ranks=4))


@pytest.mark.parametrize("clock", ClockName)
def test_the_clock_is_reproduced(clock: ClockName) -> None:
    reproduces(OpCase(op=PLAIN["attention"], backend="torch", clock=clock))


@pytest.mark.parametrize("family", PLAIN)
def test_each_dtype_is_reproduced(family: str) -> None:
    for dtype in OPERATOR_DTYPES:
        try:
            op = replace(PLAIN[family], dtype=dtype)  # type: ignore[call-arg]
        except (ConfigError, TypeError):  # a family without it; copy has none
            continue
        for device in ("cpu", "cuda"):
            reproduces(OpCase(op=op, backend="torch", device=device))


def test_models_layers_are_reproduced() -> None:
    from stepmark.model.model_tables import find_model
    from stepmark.model.parallel import ParallelConfig
    from stepmark.model.product_precision import of_operators
    from stepmark.step.layout import Inputs, layout_of
    from stepmark.workloads.operators import BY_FAMILY, ModelShape

    for name, framework in zip(
        ("llama-3.1-70b", "deepseek-v3", "gpt2-125m"),
        ("train", "megatron", "fsdp"),
        strict=True,
    ):
        for dtype in (DType.BF16, DType.FP8_E4M3):
            shape = ModelShape(
                model=find_model(name),
                layout=layout_of(framework, ParallelConfig()),
                inputs=Inputs(mbs=2, seq_len=1024, products=of_operators(dtype), skew=0.5),
            )
            for operators in BY_FAMILY.values():
                for label, op in operators(shape):
                    case = OpCase(op=op, backend="torch", labels=(label,))
                    reproduces(case)
                    assert FAMILY_OF[type(op)] == case.family


def test_a_command_is_safe_to_paste() -> None:
    case = OpCase(op=Optimizer(num_params=3), backend="torch; rm -rf /")
    assert "torch; rm -rf /" in shlex.split(command_of(case))


def test_packed_lengths_and_no_causal_are_written() -> None:
    op = Attention(
        batch=1,
        seq_q=6,
        seq_kv=6,
        heads=1,
        kv_heads=1,
        head_dim_qk=8,
        head_dim_v=8,
        varlen=(4, 2),
        causal=False,
    )
    line = command_of(OpCase(op=op, backend="math"))
    assert "--varlen 4+2" in line
    assert "--no-causal" in line
