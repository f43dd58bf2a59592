"""Users' own operators: what a function returns, how its result is checked, its identity."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.measuring.fakes import context, entries
from tests.tables.records import measured
from torch import Tensor

from stepmark.cases.case import OpCase
from stepmark.cases.plan import OpHow
from stepmark.cases.record import Check
from stepmark.comparison.series import series_of_records
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.measuring.context import MeasureContext
from stepmark.measuring.machine import Machine
from stepmark.measuring.ranks import Ranks
from stepmark.model.ops import CUSTOM, Custom
from stepmark.operators import op_plan
from stepmark.operators.bench import bench, custom
from stepmark.operators.custom_op import CustomOp
from stepmark.operators.op_options import CustomOptions, options_of

CPU = torch.device("cpu")
# What a call does to x and out, by the name of a function of the user's file.
CALLS = {
    "right": "torch.mul(x, 2, out=out)",
    "fresh": "x * 2",
    "in_place": "x.mul_(2)",
    "pair": "(x * 2, x * 2)",
    "wrong": "torch.mul(x, 2.001, out=out)",
    "nothing": "out",
    "half": "x[: len(x) // 2] * 2",
    "none": "print(end='')",
}
FILE = """
import torch
from stepmark import CustomOp
""" + "".join(
    f"""
def {name}(device, dtype, n=1000):
    x = torch.randn(n, device=device, dtype=dtype)
    out = torch.zeros_like(x)
    reference = lambda x, out: {"(x * 2, x * 2)" if name == "pair" else "x * 2"}
    return CustomOp(
        call=lambda x, out: {call}, operands=(x, out), reference=reference, flops=0,
        bytes_moved=2 * x.nbytes,
    )
"""
    for name, call in CALLS.items()
)


@pytest.fixture
def op(tmp_path: Path) -> Custom:
    file = tmp_path / "kernel.py"
    file.write_text(FILE)
    return Custom(file=str(file), digest="0", dtype=DType.FP32)


@pytest.mark.parametrize("name", ["right", "fresh", "in_place", "pair"])
def test_a_right_result_is_right_time_after_time(op: Custom, name: str) -> None:
    call = custom.impl(name).make(op, CPU)
    for _ in range(2):  # operands that a call writes into are restored
        check = call.verify()
        assert check.num_wrong == 0
        assert check.num_compared == (2000 if name == "pair" else 1000)
        assert check.reference == "float64, all elements"
    assert call.backend_run == f"kernel.py:{name}"


@pytest.mark.parametrize("name", ["wrong", "nothing"])
def test_a_wrong_result_is_wrong(op: Custom, name: str) -> None:
    assert custom.impl(name).make(op, CPU).verify().num_wrong > 900


# What a call does to x before it returns what it should, and what is noticed of it.
FAULTS = {
    "CACHE.setdefault(x._version, x * 2)": "NaN at index 0",
    "CACHE.setdefault(x._version, x * 2).clone()": "wrong only after the samples",
    "CALLS.append(1) or x * (2 if len(CALLS) < 5 else 3)": "wrong only after the samples",
    "(x * 2, y.zero_())[0]": "call changes tensor 2 of operands",
    "(x * 2, x.mul_(1.5))[0]": "call changes tensor 1 of operands",
}
TWICE = """
import torch
from stepmark import CustomOp
CACHE, CALLS = {{}}, []
def f(device, dtype):
    x, y = torch.randn(2, 1000, device=device, dtype=dtype)
    kept = x.double()
    return CustomOp(
        call=lambda x, y: {call}, operands=(x, y), reference=lambda x, y: {reference},
        flops=0, bytes_moved=1,
    )
"""


def twice(path: Path, call: str, reference: str = "x * 2") -> tuple[Check, Check]:
    """Return the checks before and after some calls, as they are while it is timed."""
    file = path / "kernel.py"
    file.write_text(TWICE.format(call=call, reference=reference))
    made = custom.impl("f").make(Custom(file=str(file), digest="0", dtype=DType.FP32), CPU)
    assert made.verify_again is not None
    first = made.verify()
    for _ in range(5):
        made.run()
    return first, first if first.num_wrong else made.verify_again()


@pytest.mark.parametrize("call", FAULTS)
def test_a_call_that_is_wrong_later_or_changes_operands_is_noticed(
    tmp_path: Path, call: str
) -> None:
    first, both = twice(tmp_path, call)
    assert both.num_wrong > 900
    assert FAULTS[call] in both.remarks
    assert bool(first.num_wrong) is (FAULTS[call] != "wrong only after the samples")


@pytest.mark.parametrize(
    ("call", "reference", "remarks"),
    [
        ("x * 2", "x * 2", ()),
        ("torch.mul(x, 2, out=y)", "x * 2", ()),
        ("x.mul_(2)", "x * 2", ("call updates tensor 1 of operands",)),
        ("kept.float()", "kept", ()),  # a reference that reads more than its operands
    ],
)
def test_a_right_call_is_right_after_the_samples(
    tmp_path: Path, call: str, reference: str, remarks: tuple[str, ...]
) -> None:
    _, both = twice(tmp_path, call, reference)
    assert both.num_wrong == 0
    assert both.remarks == remarks


def test_a_backward_pass_is_checked_with_the_values_that_its_graph_saved(
    tmp_path: Path,
) -> None:
    graph = "x = x.requires_grad_(); out = (x * x).sum()\n    kept = x.double()"
    code = TWICE.replace("kept = x.double()", graph)
    file = tmp_path / "kernel.py"
    backward = "torch.autograd.grad(out, x, retain_graph=True)"
    file.write_text(code.format(call=backward, reference="x * 2"))
    made = custom.impl("f").make(Custom(file=str(file), digest="0", dtype=DType.FP32), CPU)
    assert made.verify_again is not None
    assert made.verify().num_wrong == made.verify_again().num_wrong == 0


def test_a_reference_that_is_the_call_itself_is_named(op: Custom) -> None:
    built = CustomOp(**GOOD)
    assert custom._check("itself", op, built).remarks == ("reference is the call itself",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("half", "result of call: '500' is invalid: it must be 1000, as the reference's"),
        ("none", "result of call is missing: give a tensor, or a tuple of tensors"),
    ],
)
def test_a_result_of_another_shape_is_an_error(op: Custom, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        custom.impl(name).make(op, CPU).verify()


def test_a_tolerance_decides_and_is_by_default_that_of_the_type(op: Custom) -> None:
    x = torch.randn(2000, dtype=torch.bfloat16)
    kind = {"operands": (x,), "reference": lambda x: x * 1.02, "flops": 0, "bytes_moved": 1}
    loose = CustomOp(call=lambda x: x * 1, **kind)  # type: ignore[arg-type]
    bf16 = replace(op, dtype=DType.BF16)
    assert custom._check("by type", bf16, loose).num_wrong == 2000
    assert custom._check("loose", bf16, replace(loose, tolerance=0.03)).num_wrong == 0
    assert custom._check("strict", bf16, replace(loose, tolerance=0.01)).num_wrong > 400
    assert custom._check("fp32", op, loose).num_wrong == 2000


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_result_in_8_bits_may_have_a_rounding_to_them(op: Custom, dtype: torch.dtype) -> None:
    def built(factor: float) -> CustomOp:
        return CustomOp(
            call=lambda x: (x.float() * factor).to(dtype),
            operands=(torch.randn(500, 100, dtype=torch.bfloat16),),
            reference=lambda x: x,
            flops=0,
            bytes_moved=1,
        )

    fp8 = replace(op, dtype=DType.FP8_E4M3)
    assert custom._check("right", fp8, built(1.0)).num_wrong == 0
    assert custom._check("wrong", fp8, built(1.02)).num_wrong == 50_000
    assert custom._check("right", fp8, built(1.0)).remarks == ()


def test_a_result_in_another_type_is_named(op: Custom) -> None:
    bf16 = replace(op, dtype=DType.BF16)
    built = CustomOp(
        call=lambda x: (x.float(), x, x > 0),
        operands=(torch.randn(10, dtype=torch.bfloat16),),
        reference=lambda x: (x, x, x > 0),
        flops=0,
        bytes_moved=1,
    )
    assert custom._check("wide", bf16, built).remarks == ("result is float32",)
    assert custom._check("wide", op, built).remarks == ("result is bfloat16",)


def test_an_expanded_operand_is_only_read(op: Custom) -> None:
    built = CustomOp(
        call=lambda x: x + 1,
        operands=(torch.ones(1, 3).expand(5, 3),),
        reference=lambda x: x + 1,
        flops=0,
        bytes_moved=72,
    )
    assert custom._check("expanded", op, built).num_wrong == 0


def test_a_reference_gets_fp64_and_a_call_its_own_type(op: Custom) -> None:
    seen: list[torch.dtype] = []

    def note(x: Tensor, index: Tensor, word: str) -> Tensor:
        seen.append(x.dtype)
        assert (index.dtype, word) == (torch.int64, "word")
        return x[index]

    operands = (torch.randn(8, dtype=torch.bfloat16), torch.arange(8), "word")
    built = CustomOp(call=note, operands=operands, reference=note, flops=0, bytes_moved=1)
    assert custom._check("note", op, built).num_wrong == 0
    assert seen == [torch.float64, torch.bfloat16, torch.bfloat16]


GOOD: dict[str, Any] = {
    "call": abs,
    "operands": (torch.ones(1),),
    "reference": abs,
    "flops": 0,
    "bytes_moved": 1,
}


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("call", 3, "a function of the operands"),
        ("reference", None, "a function of the operands"),
        ("operands", (), "a tuple of one tensor or more"),
        ("operands", torch.ones(3), "a tuple of one tensor or more"),
        ("flops", -1, "a whole number from 0"),
        ("flops", 1.5, "a whole number from 0"),
        ("bytes_moved", 0, "a whole number from 1"),
        ("bytes_moved", True, "a whole number from 1"),
        ("tolerance", float("inf"), "a number from 0, or None"),
        ("tolerance", "a", "a number from 0, or None"),
    ],
)
def test_each_field_is_validated(field: str, value: object, rule: str) -> None:
    assert CustomOp(**GOOD).tolerance is None
    with pytest.raises(ConfigError, match=rule) as caught:
        CustomOp(**GOOD | {field: value})
    assert caught.value.field == field


def planned(tmp_path: Path, **options: Any) -> list[OpCase]:
    file = tmp_path / "kernel.py"
    if not file.exists():
        file.write_text(FILE)
    functions = options.pop("functions", "right")
    given = CustomOptions(family=CUSTOM, function=f"{file}:{functions}", **options)
    return op_plan.custom_cases(given, Machine(device="cpu"))


def test_a_case_per_function_type_and_argument(tmp_path: Path) -> None:
    arguments = ("n=10,20", "flag=true")
    cases = planned(tmp_path, functions="right,fresh", dtype="fp32,bf16", arguments=arguments)
    assert [(c.dtype.value, c.op.shape_text, c.backend) for c in cases][:3] == [
        ("fp32", "n=10 flag=true", "right"),
        ("fp32", "n=10 flag=true", "fresh"),
        ("fp32", "n=20 flag=true", "right"),
    ]
    assert len(cases) == len({case.case_id for case in cases}) == 8
    op = cases[0].op
    assert isinstance(op, Custom)
    assert op.keywords == {"n": 10, "flag": True}
    options = options_of(cases[0])
    assert isinstance(options, CustomOptions)
    (again,) = op_plan.custom_cases(options, Machine(device="cpu"))
    assert again.case_id == cases[0].case_id, "its command measures it again"


def test_the_file_is_part_of_the_identity_and_what_ranks_learn_is_not(tmp_path: Path) -> None:
    (case,) = planned(tmp_path)
    op = case.op
    assert isinstance(op, Custom)
    assert not op.is_called
    called = replace(op, flops=1, bytes_moved=2, memory_bytes=3, file="elsewhere/kernel.py")
    assert called.is_called
    assert replace(case, op=called).case_id == case.case_id
    (tmp_path / "kernel.py").write_text(FILE + "# edited\n")
    (edited,) = planned(tmp_path)
    assert edited.case_id != case.case_id


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"functions": ""}, "a file and a function of it"),
        ({"functions": "1x"}, "a function's name"),
        ({"arguments": ("n",)}, "arg n is invalid: it must be NAME=VALUE"),
        ({"arguments": ("n=a b",)}, "without spaces"),
        ({"arguments": ("device=1",)}, "arg device=1 is invalid"),
        ({"arguments": ("n=1", "n=2")}, "arg n=2 is invalid: it must be given once"),
        ({"dtype": "mxfp8"}, "dtype mxfp8 is invalid: .* one of bf16"),
        ({"style": "param"}, "no columns for your own operators"),
    ],
)
def test_bad_options_are_refused(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(tmp_path, **options)


ALONE = Ranks(rank=0, num_ranks=1, local_rank=0, device=CPU)


def test_ranks_learn_the_work_and_refuse_a_file_that_was_edited(tmp_path: Path) -> None:
    (case,) = planned(tmp_path, arguments=("n=10",))
    op = case.op
    assert isinstance(op, Custom)
    called = custom.completed(case, op, ALONE).op
    assert called == replace(op, flops=0, bytes_moved=80, memory_bytes=80)
    (case,) = planned(tmp_path)
    assert isinstance(case.op, Custom)
    default = custom.completed(case, case.op, ALONE)
    assert isinstance(default.op, Custom)
    assert default.op.defaults == "n=1000"
    (series,), _ = series_of_records([measured(default, 1e-3)])
    assert series.fields["default_n"] == "1000"
    (case,) = planned(tmp_path, arguments=("n=10",))
    (tmp_path / "kernel.py").write_text(FILE + "# edited\n")
    with pytest.raises(ConfigError, match=f"the planned file, whose digest is {op.digest}"):
        custom.completed(case, op, ALONE)
    (tmp_path / "kernel.py").unlink()
    with pytest.raises(ConfigError, match=r"kernel\.py is missing"):
        custom.completed(case, op, ALONE)


def test_cases_are_completed_once_and_their_operands_are_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[MeasureContext] = []
    monkeypatch.setattr(bench, "release", released.append)
    place = context()
    own = bench.OperatorBench(place, OpHow())
    both = [*entries(planned(tmp_path)), *entries(planned(tmp_path), launch=2)]
    completed = [own.completed(entry) for entry in both]
    assert [entry.launch for entry in completed] == [1, 2]
    assert {entry.case.op.bytes_moved for entry in completed} == {8000}  # type: ignore[union-attr]
    assert released == [place]


def build(op: Custom, name: str) -> Callable[[], object]:
    return lambda: custom._build(op, name, CPU)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def f(device, dtype): return 3", "int is invalid: .* returns a stepmark.CustomOp"),
        ("def f(device): pass", "called with 2 arguments; its own are device"),
        ("def _g(device, dtype): pass", "function f .* a function of kernel.py.$"),
        ("def f(device, dtype): raise ValueError('word ' * 99)", r"word word \.\.\."),
        ("def f(device, dtype): return 1 / 0", "kernel.py:3 in f.* ZeroDivisionError"),
        ("def g(device, dtype): pass", "function f is invalid: .* kernel.py, e.g. g"),
        ("def f(device, dtype): return CustomOp()", "it raised TypeError"),
        (
            "def f(device, dtype): return CustomOp(call=1, operands=(1,), reference=1,"
            " flops=1, bytes_moved=1)",
            "kernel.py:f: call 1 is invalid: it must be a function of the operands",
        ),
        (
            "def f(device, dtype): return CustomOp(call=abs, operands=(1,), reference=abs,"
            " flops=1, bytes_moved=1)",
            "kernel.py:f: operands .* a tuple with a tensor on cpu",
        ),
        ("1 / 0", "kernel.py:3"),
    ],
)
def test_what_a_function_does_wrong_is_one_sentence(
    tmp_path: Path, code: str, message: str
) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(f"from stepmark import CustomOp\n\n{code}\n")
    op = Custom(file=str(file), digest="0", dtype=DType.FP32)
    with pytest.raises(ConfigError, match=message):
        build(op, "f")()


def test_functions_of_a_file_share_one_module_that_imports_its_neighbours(
    tmp_path: Path,
) -> None:
    (tmp_path / "neighbour_of_kernel.py").write_text("SIZE = 7\n")
    file = tmp_path / "kernel.py"
    body = FILE.replace("import torch", "import torch\nLOADED = []\n", 1).replace(
        "x = torch.randn(n", "import neighbour_of_kernel as m; x = torch.randn(m.SIZE"
    )
    file.write_text(f"{body}\nLOADED.append(1)\n")
    op = Custom(file=str(file), digest="0", dtype=DType.FP32)
    for name in ("right", "fresh"):
        assert custom._build(op, name, CPU).bytes_moved == 2 * 7 * 4
    assert custom._module(file).LOADED == [1]
