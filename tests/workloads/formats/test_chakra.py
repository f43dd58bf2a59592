"""Chakra: mlcommons' own schema and tools as witnesses, laws of order, bytes and time."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective
from stepmark.model.ops import Phase
from stepmark.step.workload import CommOp, ComputeOp, Kernel, Stage, Workload
from stepmark.workloads.durations import Fixed, fill
from stepmark.workloads.formats import chakra
from stepmark.workloads.formats.chakra_schema import (
    COMM_TYPES,
    NodeType,
    classes,
    framed,
    frames,
)

from .hand_made import every_kind, message, op, pipeline

DATA = Path(__file__).parents[2] / "data" / "chakra"
TIMED = fill(pipeline(stages=2, microbatches=2, layers=2), Fixed(time_s=25e-6))


def theirs() -> dict[str, Any]:
    """mlcommons' package, made of the numbers and types that its et_def.proto gives fields."""
    told = json.loads((DATA / "et_def.json").read_text())
    file = descriptor_pb2.FileDescriptorProto(
        name="et_def.proto", package=told["package"], syntax="proto3"
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, numbers in told["enums"].items():
        listed = file.enum_type.add(name=name)
        for word, number in numbers.items():
            listed.value.add(name=word, number=number)
    for name, fields in told["messages"].items():
        message = file.message_type.add(name=name)
        for word, number, kind, repeated, type_name, oneof in fields:
            one = message.field.add(name=word, number=number)
            one.type = getattr(kinds, f"TYPE_{kind.upper()}")
            one.label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            if type_name:
                one.type_name = f".{told['package']}.{type_name}"
            if oneof:
                if not message.oneof_decl:
                    message.oneof_decl.add(name=oneof)
                one.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found: dict[str, Any] = pool.FindFileByName("et_def.proto").message_types_by_name
    return found


def decoded(workload: Workload, rank: int = 0) -> list[Any]:
    """Nodes of a rank's file, read with mlcommons' schema."""
    node = message_factory.GetMessageClass(theirs()["Node"])
    parts = list(frames(b"".join(chakra.write(workload, rank)), "file"))
    return [node.FromString(one) for one in parts[1:]]


def values(node: Any) -> dict[str, Any]:
    return {one.name: getattr(one, one.WhichOneof("value")) for one in node.attr}


def saved(workload: Workload, folder: Path) -> Path:
    for name, chunks in chakra.files(workload):
        data = (one if isinstance(one, bytes) else one.encode() for one in chunks)
        (folder / name).write_bytes(b"".join(data))
    return folder


class TestSchema:
    def test_every_field_is_that_of_mlcommons(self) -> None:
        def facts(field: Any) -> tuple[object, ...]:
            named = field.message_type or field.enum_type
            oneof = field.containing_oneof
            return (
                *(field.name, field.number, field.type, field.is_repeated),
                *(named and named.full_name, oneof and oneof.name),
            )

        ours = classes().node.DESCRIPTOR.file.message_types_by_name
        expected = theirs()
        assert set(expected) - set(ours) == {"Tensor"}  # which no node holds
        compared = 0
        for name, one in ours.items():
            fields = sorted(one.fields, key=lambda field: field.number)
            other = sorted(expected[name].fields, key=lambda field: field.number)
            assert [facts(field) for field in fields] == [facts(field) for field in other]
            compared += len(fields)
        assert compared == 62

    def test_types_are_those_of_mlcommons(self) -> None:
        enums = theirs()["Node"].file.enum_types_by_name
        kinds = {one.name: one.number for one in enums["NodeType"].values}
        assert kinds == {f"{kind.name}_NODE": int(kind) for kind in NodeType}
        collectives = {one.name: one.number for one in enums["CollectiveCommType"].values}
        assert collectives.pop("REDUCE_SCATTER_BLOCK") == 8
        assert collectives == {name.upper(): number for name, number in COMM_TYPES.items()}

    @pytest.mark.parametrize(
        ("name", "workload", "rank"),
        [
            ("pipeline.0", fill(pipeline(microbatches=1, layers=1), Fixed(time_s=25e-6)), 0),
            ("every_kind.1", every_kind(), 1),
        ],
    )
    def test_files_say_what_their_jsonizer_printed(
        self, name: str, workload: Workload, rank: int
    ) -> None:
        printed = [
            json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()
        ]
        messages = [classes().metadata] + [classes().node] * (len(printed) - 1)
        parts = frames(b"".join(chakra.write(workload, rank)), "file")
        assert [
            json_format.MessageToDict(one.FromString(data))
            for one, data in zip(messages, parts, strict=True)
        ] == printed


class TestNodes:
    def test_every_operation_is_a_node_in_issue_order(self) -> None:
        for rank in (0, 3, 4, 7):
            found = decoded(TIMED, rank)
            expected = list(TIMED.expand(TIMED.stage_of(rank)))
            assert [one.id for one in found] == list(range(len(expected)))
            for node, one in zip(found, expected, strict=True):
                has = values(node)
                assert (has["phase"], has["module"]) == (one.phase, one.module)
                assert has.get("layer") == one.layer
                assert has.get("microbatch") == one.microbatch
                assert has["is_cpu_op"] is False

    def test_dependencies_go_back_and_are_the_stream_and_after(self) -> None:
        workload = every_kind()
        found = decoded(workload)
        ops = list(workload.expand())
        newest: dict[str, list[int]] = {}
        named: dict[str, list[int]] = {}
        before: dict[str, list[int]] = {}
        for index, (node, one) in enumerate(zip(found, ops, strict=True)):
            fused = isinstance(one, CommOp) and one.fused
            if not fused:
                before[one.stream] = newest.get(one.stream, [])
                newest[one.stream] = []
            expected = set(before[one.stream])
            for text in one.after:
                name, _, back = text.partition("~")
                expected.add(named[name][-1 - int(back or 0)])
            assert set(node.data_deps) == expected
            assert not node.ctrl_deps
            assert all(dep < node.id for dep in node.data_deps)
            newest[one.stream].append(index)
            named.setdefault(one.name, []).append(index)

    def test_sizes_are_the_bytes_of_a_ranks_input(self) -> None:
        count, size, ranks = 1024, 4, 2
        sizes = {
            "all_reduce": count * 2,  # bf16
            "all_gather": count * size,
            "reduce_scatter": ranks * count * size,
            "broadcast": 7 * 8,
            "reduce": count * size,
            "all_to_all": ranks * count,  # uint8
            "all_to_all_v": ranks * count * 2,
            "gather": count * 8,
            "scatter": ranks * count,  # int8, of the root
            "barrier": 0,
            "send": count * size,
            "recv": count * size,
        }
        seen: dict[str, int] = {}
        for node in decoded(every_kind()):
            has = values(node)
            if "comm_size" in has:
                seen.setdefault(has["module"], has["comm_size"])
        assert seen == sizes

    def test_messages_that_are_sent_are_received(self) -> None:
        sent: Counter[tuple[int, int, int, int]] = Counter()
        received: Counter[tuple[int, int, int, int]] = Counter()
        for rank in range(TIMED.world_size):
            for node in decoded(TIMED, rank):
                has = values(node)
                if node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
                    side = sent if node.type == NodeType.COMM_SEND else received
                    assert has["comm_src" if side is sent else "comm_dst"] == rank
                    key = (has["comm_src"], has["comm_dst"], has["comm_tag"], has["comm_size"])
                    side[key] += 1
        assert sent == received
        assert sum(sent.values()) == 4 * 2 * 2  # pairs, micro-batches, directions

    def test_groups_that_are_named_hold_the_rank(self) -> None:
        groups = json.loads("".join(chakra.comm_groups(TIMED)))
        members = {tuple(ranks) for ranks in groups.values()}
        assert {(0, 1), (0, 2), (0, 4), (5, 7)} <= members
        for rank in range(TIMED.world_size):
            names = {values(one).get("pg_name") for one in decoded(TIMED, rank)} - {None}
            assert len(names) == 3  # of tensor and data parallelism, and of two stages
            assert all(rank in groups[name] and name != "0" for name in names)

    def test_a_message_names_the_group_of_its_two_ranks(self) -> None:
        """In a pipeline of four stages too, whose group has all of them."""
        workload = pipeline(stages=4, microbatches=2, layers=1)
        groups = json.loads("".join(chakra.comm_groups(workload)))
        for rank in range(workload.world_size):
            pairs = [
                (has["pg_name"], {has["comm_src"], has["comm_dst"]})
                for has in map(values, decoded(workload, rank))
                if "comm_src" in has
            ]
            assert pairs
            for name, ranks in pairs:
                assert sorted(ranks) == groups[name]
                assert rank in ranks

    @given(st.lists(st.floats(0, 1e-2), min_size=1, max_size=30))
    @settings(max_examples=30)
    def test_durations_of_a_stream_add_up_within_a_microsecond(
        self, times: list[float]
    ) -> None:
        ops = tuple(
            op(Kernel(name="x", flops=1, bytes_moved=1), Phase.FWD, "x", time_s=one)
            for one in times
        )
        alone = Workload(name="w", rules="h", blocks={"s": ops}, stages=(Stage(step="s"),))
        found = decoded(alone)
        assert abs(sum(one.duration_micros for one in found) - sum(times) * 1e6) <= 0.5 + 1e-6
        assert [values(one)["time_s"] for one in found] == times

    def test_what_astra_sim_divides_by_or_stops_at_is_never_0(self) -> None:
        waits = op(Kernel(name="wait", flops=0, bytes_moved=0), Phase.FWD, "x")
        block = (*every_kind().blocks["step"], waits)
        found = [values(one) for one in decoded(replace(every_kind(), blocks={"step": block}))]
        assert {one["num_ops"] for one in found if "num_ops" in one} == {1, 2 * 8 * 16 * 32}
        assert {one["flops"] for one in found if "flops" in one} == {0}
        assert sum(one.get("tensor_size", 0) > 1 for one in found) == 4
        assert (found[-1]["tensor_size"], found[-1]["bytes_moved"]) == (1, 0)

    def test_unknown_costs_and_times_are_left_out(self) -> None:
        ops = (op(Kernel(name="x"), Phase.FWD, "x"),)
        (node,) = decoded(
            Workload(name="w", rules="h", blocks={"s": ops}, stages=(Stage(step="s"),))
        )
        assert not {"num_ops", "tensor_size", "time_s"} & set(values(node))
        assert node.duration_micros == 0

    def test_long_steps_are_written_as_they_are_read(self) -> None:
        written = chakra.write(pipeline(microbatches=2**32))
        assert sum(len(next(written)) for _ in range(100)) > 1000

    def test_a_rank_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="rank 8 is invalid: it must be from 0 to 7"):
            chakra.write(TIMED, 8)

    def test_a_collective_that_chakra_has_not_is_refused(self) -> None:
        odd = replace(every_kind(), blocks={"step": (message(Collective.INCAST, root=0),)})
        with pytest.raises(ConfigError, match="collective incast"):
            chakra.write(odd)


class TestRoundTrip:
    @pytest.mark.parametrize(
        "workload",
        [TIMED, pipeline(stages=4, microbatches=2, layers=1), every_kind()],
        ids=["pipeline", "four stages", "every"],
    )
    def test_comes_back_but_for_shapes(self, workload: Workload, tmp_path: Path) -> None:
        again = chakra.read(saved(workload, tmp_path))
        assert again.world_size == workload.world_size
        assert len(again.stages) == len(workload.stages)
        for stage in range(len(workload.stages)):
            rank = stage * workload.world_size // len(workload.stages)
            pairs = zip(workload.expand(stage), again.expand(stage), strict=True)
            for one, two in pairs:
                same = ("phase", "module", "layer", "microbatch", "stream", "recompute")
                for field in (*same, "time_s"):
                    assert getattr(one, field) == getattr(two, field), field
                if isinstance(one, ComputeOp):
                    assert isinstance(two, ComputeOp)
                    assert one.op.flops == two.op.flops
                    assert one.op.bytes_moved == two.op.bytes_moved
                    continue
                assert isinstance(two, CommOp)
                wanted = "all_to_all" if one.collective == "all_to_all_v" else one.collective
                assert two.collective == wanted
                for field in ("dtype", "count", "redop", "root", "fused"):
                    assert getattr(one, field) == getattr(two, field), field
                ranks = workload.groups[one.group].members(rank)
                assert ranks == again.groups[two.group].members(rank)
                assert one.peer == two.peer

    def test_what_was_read_is_written_and_read_alike(self, tmp_path: Path) -> None:
        (tmp_path / "one").mkdir()
        (tmp_path / "two").mkdir()
        first = chakra.read(saved(every_kind(), tmp_path / "one"))
        second = chakra.read(saved(first, tmp_path / "two"))
        assert (second.blocks, second.groups) == (first.blocks, first.groups)
        for rank in (0, 1):
            once, twice = (b"".join(chakra.write(one, rank)) for one in (first, second))
            assert once == twice

    def test_dependencies_come_back(self, tmp_path: Path) -> None:
        workload = every_kind()
        again = chakra.read(saved(workload, tmp_path))
        for one, two in zip(decoded(workload), decoded(again), strict=True):
            assert set(one.data_deps) == set(two.data_deps)

    def test_any_file_of_the_series_may_be_named(self, tmp_path: Path) -> None:
        saved(TIMED, tmp_path)
        assert chakra.read(tmp_path / "workload.3.et") == chakra.read(tmp_path)


def test_framing_is_a_varint() -> None:
    for length in (0, 1, 127, 128, 300, 20000):
        data = b"x" * length
        assert list(frames(framed(data) + framed(b"y"), "f")) == [data, b"y"]
