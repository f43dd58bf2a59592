"""The CSV of operations: a line per operation, in issue order, with what can be checked."""

import csv
import time
from dataclasses import replace

import pytest

from stepmark.ground.errors import ConfigError
from stepmark.step.workload import CommOp, ComputeOp, Operation
from stepmark.workloads.durations import Fixed, fill
from stepmark.workloads.formats import op_csv
from stepmark.workloads.formats.walk import walk

from .hand_made import pipeline


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def number(text: str) -> int | None:
    return int(text) if text else None


class TestLaws:
    @pytest.mark.parametrize("stage", [0, 1, 2])
    def test_walking_is_expanding(self, stage: int) -> None:
        workload = pipeline(stages=3, microbatches=4, layers=3)
        walked: list[Operation] = [
            replace(
                made,
                layer=None if own_layer is None else own_layer + layer,
                microbatch=None if own_microbatch is None else own_microbatch + microbatch,
            )
            for operations, layer, microbatch in walk(workload, stage, lambda one: one)
            for made, own_layer, own_microbatch in operations
        ]
        assert walked == list(workload.expand(stage))

    def test_a_line_for_every_operation_in_order(self) -> None:
        workload = fill(pipeline(stages=3), Fixed(time_s=1.5e-6))
        found = rows("".join(op_csv.write(workload)))
        expected = [(stage, one) for stage in range(3) for one in workload.expand(stage)]
        for row, (stage, one) in zip(found, expected, strict=True):
            assert int(row["stage"]) == stage
            assert number(row["layer"]) == one.layer
            assert number(row["microbatch"]) == one.microbatch
            assert (row["phase"], row["module"]) == (one.phase, one.module)
            assert (row["stream"], row["name"]) == (one.stream, one.name)
            assert tuple(row["after"].split()) == one.after
        assert [int(row["index"]) for row in found if row["stage"] == "1"] == list(
            range(workload.num_operations(1))
        )

    def test_bytes_are_those_of_the_operations(self) -> None:
        workload = pipeline()
        found = rows("".join(op_csv.write(workload, stages=[1])))
        for kind, total in (
            (
                "communication",
                sum(
                    one.message_bytes(workload.groups[one.group])
                    for one in workload.expand(1)
                    if isinstance(one, CommOp)
                ),
            ),
            (
                "computation",
                sum(
                    one.op.bytes_moved or 0
                    for one in workload.expand(1)
                    if isinstance(one, ComputeOp)
                ),
            ),
        ):
            assert sum(int(row["bytes"]) for row in found if row["kind"] == kind) == total


class TestRows:
    def test_what_stands_in_the_columns(self) -> None:
        found = rows("".join(op_csv.write(fill(pipeline(), Fixed(time_s=1e-9)))))
        gemm = found[1]
        assert (gemm["operation"], gemm["shape"]) == ("gemm", "m=32 n=96 k=64")
        assert (gemm["dtype"], gemm["time_us"], gemm["group"]) == ("bf16", "0.001", "")
        reduced = found[3]
        assert (reduced["operation"], reduced["shape"]) == ("all_reduce", "2048")
        assert (reduced["bytes"], reduced["group"], reduced["group_size"]) == (
            "4096",
            "tp",
            "2",
        )
        assert reduced["time_us"] == ""
        added = found[4]
        assert added["shape"] == "name=add flops=0 bytes_moved=12288"
        assert added["dtype"] == ""

    def test_names_with_commas_and_quotes_stay_in_their_column(self) -> None:
        workload = pipeline()
        odd = replace(next(iter(workload.expand())), module='a,"b"', name="x,y", after=("z",))
        workload = replace(workload, blocks={**workload.blocks, "step 0": (odd,)})
        (row,) = rows("".join(op_csv.write(workload, stages=[0])))
        assert (row["module"], row["name"], row["after"]) == ('a,"b"', "x,y", "z")

    def test_an_unknown_stage_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="from 0 to 1"):
            op_csv.write(pipeline(), stages=[2])

    def test_long_steps_are_written_as_they_are_read(self) -> None:
        workload = pipeline(microbatches=2**32)
        began = time.monotonic()
        written = op_csv.write(workload)
        assert sum(len(next(written)) for _ in range(100)) > 1000
        assert time.monotonic() - began < 5
