"""What is written is read back the same; what is broken is one line."""

import dataclasses
import gzip
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from tests.step.workload_samples import comm, compute, small, workloads
from tests.workloads.mutations import mutated, only_config_errors

from stepmark.ground.dtypes import MESSAGE_DTYPES
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import RedOp
from stepmark.model.layers import MlaConfig, MoeConfig
from stepmark.model.model import ModelConfig
from stepmark.model.ops import FAMILIES, Phase
from stepmark.step import native
from stepmark.step.workload import CommOp, ComputeOp, Kernel, Run, Stage, Workload

DOC = Path(__file__).parents[3] / "docs" / "workload-format.md"


@given(workloads())
def test_what_is_written_is_read_back(workload: Workload) -> None:
    text = native.encode(workload)
    assert native.decode(text) == workload
    assert native.encode(native.decode(text)) == text


def test_a_file_does_not_grow_with_microbatches(tmp_path: Path) -> None:
    few, many = native.encode(small(2)), native.encode(small(2048))
    assert len(many) - len(few) < 20
    path = tmp_path / "w.json"
    path.write_bytes(many)
    assert native.read(path) == small(2048)


def test_equal_operations_are_written_once() -> None:
    workload = replace(small(), blocks={**small().blocks, "layer": (compute(),) * 100})
    plain = json.loads(native.encode(workload))
    assert len(plain["ops"]) < 10
    assert plain["blocks"]["layer"] == [plain["blocks"]["layer"][0]] * 100


def test_defaults_are_left_out() -> None:
    plain = json.loads(native.encode(small()))
    assert plain["ops"][0].keys() == {"compute", "phase", "module", "layer", "microbatch"}
    assert plain["ops"][0]["compute"] == {"family": "gemm", "m": 64, "n": 48, "k": 32}
    assert plain["blocks"]["step 1"][0] == ["second", 4, {"microbatch_step": 1}]


def test_a_large_workload_is_fast() -> None:
    """Sixteen stages of eight chunks, each of its own operations."""
    blocks: dict[str, Any] = {}
    for chunk in range(128):
        ops = tuple(compute(f"{chunk}.{index}") for index in range(30))
        blocks[f"chunk {chunk}"] = ops + tuple(comm(count=index) for index in range(10))
    for stage in range(16):
        blocks[f"step {stage}"] = tuple(
            Run(block=f"chunk {stage + 16 * chunk}", times=8, microbatch_step=1)
            for chunk in range(8)
        )
    stages = tuple(Stage(step=f"step {stage}") for stage in range(16))
    workload = replace(small(), world_size=16384, blocks=blocks, stages=stages)
    seconds = []
    for _ in range(3):
        began = time.process_time()
        assert native.decode(native.encode(workload)) == workload
        seconds.append(time.process_time() - began)
    assert min(seconds) < 1.0


def test_any_broken_file_is_one_line(tmp_path: Path) -> None:
    content = json.loads(native.encode(small()))
    path = tmp_path / "w.json"
    good, bad = only_config_errors(native.read, mutated(content, 300, seed=1), path)
    assert good > 4
    assert bad > 90


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "schema 2 is invalid: it must be from 1 to 1; or a newer stepmark"),
        ({"schema": 10**30}, "schema 1"),
        ({"schema": "1"}, "schema 1"),
        ({"kind": "chakra"}, "stepmark workload"),
        ({"colour": 1}, "colour"),
        ({"world_size": 0}, "world_size"),
        ({"blocks": {"step": [0]}}, "an operation from 0 to -1"),
        (
            {
                "ops": [{"phase": "fwd", "module": "m", "compute": {"kernel": "k"}}],
                "blocks": {"step": [-1]},
            },
            "blocks.step -1 is invalid: it must be an operation from 0 to 0",
        ),
        ({"stages": [{"step": "nowhere"}]}, "nowhere"),
        ({"ops": [{"phase": "fwd", "module": "m"}]}, "either compute or collective"),
        ({"ops": [{"phase": "up", "module": "m", "compute": {"kernel": "k"}}]}, "up"),
        (
            {"ops": [{"phase": "fwd", "module": "m", "compute": {"kernel": "k", "n": 1}}]},
            r"ops\[0\].n 1 is invalid: it must be one of name, flops",
        ),
        (
            {"ops": [{"phase": "fwd", "module": "m", "compute": {"family": "gem", "m": 1}}]},
            "one of gemm",
        ),
        (
            {"ops": [{"phase": "fwd", "module": "m", "compute": {"family": "gemm", "m": 1}}]},
            "all of m, n, k",
        ),
        (
            {"ops": [{"phase": "fwd", "module": "m", "compute": {"kernel": "k"}, "count": 1}]},
            r"ops\[0\].count 1 is invalid: it has no place beside compute",
        ),
        (
            {"ops": [{"phase": "fwd", "module": "m", "collective": "all_reduce"}]},
            r"ops\[0\].dtype",
        ),
    ],
)
def test_messages_name_the_place(change: dict[str, Any], words: str) -> None:
    plain = {
        "schema": 1,
        "kind": "stepmark workload",
        **dict.fromkeys(("name", "rules", "source"), "x"),
        **{"world_size": 1, "num_microbatches": 1, "model": None},
        **{"settings": {}, "groups": {}, "ops": [], "blocks": {"step": []}},
        **{"stages": [{"step": "step"}], "notes": [], "origin": {}},
    }
    assert native.decode(json.dumps(plain).encode()).stages == (Stage(step="step"),)
    with pytest.raises(ConfigError, match=words):
        native.decode(json.dumps(plain | change).encode())


@pytest.mark.parametrize(
    ("found", "changed", "words"),
    [
        (
            '"root":0',
            '"root":77',
            "root 77 is invalid: it must be a rank of the group, from 0 to 1",
        ),
        (
            '"peer":1',
            '"peer":1,"after":["x"]',
            "after x is invalid: it must be the name of an operation",
        ),
        ('"tp":[[2,1]]', '"tp":[[3,1]]', "group .*dimensions that fit 4 ranks"),
        ('"count":64', f'"count":{10**40}', r"ops\[1\].count 1.*2\*\*63"),
        ('"first",4,', f'"first",{10**12},', "one that ends: at most 2\\*\\*40 operations"),
    ],
)
def test_contradictions_of_a_file_are_refused(found: str, changed: str, words: str) -> None:
    text = native.encode(small()).decode()
    assert found in text
    with pytest.raises(ConfigError, match=words) as caught:
        native.decode(text.replace(found, changed).encode())
    assert "\n" not in str(caught.value)


def test_a_message_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    for text in ("{", '{"kind":"stepmark workload","schema":9}', "\xff"):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError) as caught:
            native.read(path)
        assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="a file that exists"):
        native.read(tmp_path / "none.json")


def test_a_packed_file_is_read_and_a_cut_one_is_refused(tmp_path: Path) -> None:
    path, packed = tmp_path / "w.json.gz", gzip.compress(native.encode(small()))
    path.write_bytes(packed)
    assert native.read(path) == small()
    damaged = bytearray(packed)
    damaged[40] ^= 255
    for data in (packed[:-9], packed[:30], bytes(damaged)):
        path.write_bytes(data)
        with pytest.raises(
            ConfigError, match=r"w\.\S+ is invalid: it must be a complete gzip file"
        ):
            native.read(path)


def test_blocks_nested_too_deep_are_refused() -> None:
    deep = {f"{index}": (Run(block=f"{index + 1}"),) for index in range(5000)}
    workload = replace(
        small(), blocks={**deep, "5000": ()}, stages=(Stage(step="0"),), world_size=4
    )
    with pytest.raises(ConfigError, match="nested less deeply"):
        native.decode(native.encode(workload))


def test_every_field_is_in_the_documentation() -> None:
    """Of workloads, operations, operators and models, in code or in a table."""
    text = DOC.read_text().split("# Files of AICB")[0]
    for kind in (*FAMILIES.values(), MlaConfig, MoeConfig, ModelConfig):
        for field in dataclasses.fields(kind):
            assert f"`{field.name}`" in text, (kind, field.name)
    for family in FAMILIES:
        assert f"`{family}`" in text
    plain = json.loads(native.encode(small()))
    for key in (*plain, *(field.name for field in dataclasses.fields(Stage))):
        assert f"`{key}`" in text, key
    for kind in (ComputeOp, CommOp, Run, Kernel):
        for field in dataclasses.fields(kind):
            # These two are said under other names: the object, and the parts of an item.
            if (kind, field.name) not in {(ComputeOp, "op"), (Kernel, "name")}:
                assert f"`{field.name}`" in text or field.name in ("block", "times")
    for words in (Phase, RedOp, MESSAGE_DTYPES):
        assert all(re.search(rf"\b{word}\b", text) for word in words)


def test_the_example_of_the_documentation_is_valid() -> None:
    text = DOC.read_text().split("```json\n")[1].split("```")[0]
    workload = native.decode(text.encode())
    assert workload.num_operations() == 2 * (3 * 2 + 1)
    assert native.decode(native.encode(workload)) == workload
