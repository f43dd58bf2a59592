"""PARAM's basic trace: its own parser as a witness, laws of requests and bytes, bad files."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Gemm, Phase
from stepmark.step import native
from stepmark.step.workload import CommOp, ComputeOp, Group, Workload
from stepmark.workloads.formats import param_trace, sniff
from stepmark.workloads.formats.param_trace import NAMES

from .hand_made import every_kind, message, op, pipeline

DATA = Path(__file__).parents[2] / "data" / "param"
BYTES = {"float": 4, "bfloat16": 2, "half": 2, "double": 8, "long": 8, "int": 4}
PIPELINE = pipeline(stages=2, microbatches=2, layers=2)


def entries(workload: Workload, rank: int = 0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads("".join(param_trace.write(workload, rank)))
    return found


def saved(workload: Workload, folder: Path) -> Path:
    for name, chunks in param_trace.files(workload):
        (folder / name).write_text("".join(chunks))
    return folder


def messages(workload: Workload, rank: int) -> list[CommOp]:
    stage = workload.stage_of(rank)
    return [one for one in workload.expand(stage) if isinstance(one, CommOp)]


def alone(*ops: CommOp | ComputeOp) -> Workload:
    return replace(every_kind(), blocks={"step": ops})


class TestParser:
    """Against what PARAM's parser made of the golden file."""

    def test_the_golden_file_is_what_is_written(self) -> None:
        golden = (DATA / "every_kind.1.json").read_text()
        assert "".join(param_trace.write(every_kind(), 1)) == golden

    def test_param_sees_every_message_with_its_size_type_and_ranks(self) -> None:
        text = (DATA / "every_kind.1.parsed.jsonl").read_text()
        parsed = [json.loads(line) for line in text.splitlines()]
        groups = {
            one["pgId"]: one["groupRanks"] for one in parsed if one.get("comms") == "init"
        }
        calls = [one for one in parsed if one.get("comms") not in (None, "init", "wait")]
        workload = every_kind()
        ours = messages(workload, 1)
        # calls in one are posted by source and destination: rank 1 receives from 0 first
        for at in (10, 12):
            ours[at], ours[at + 1] = ours[at + 1], ours[at]
        for call, one in zip(calls, ours, strict=True):
            assert call["comms"] == NAMES[one.collective][0]
            assert groups[call["pgId"]] == [0, 1]
            assert call["worldSize"] == 2
            if one.collective == "barrier":
                continue
            size = BYTES.get(call["dtype"], 1)
            assert size == one.dtype.itemsize
            largest = max(call["inMsgSize"], call["outMsgSize"]) * size
            assert largest == one.message_bytes(workload.groups["all"])
            assert call.get("root") == one.root
            if one.peer is not None:
                sides = (1, 0) if one.collective == "send" else (0, 1)
                assert (call["src_rank"], call["dst_rank"]) == sides
        (split,) = [one for one in calls if "inSplit" in one]
        assert split["inSplit"] == split["outSplit"] == [1024, 1024]

    def test_param_sees_every_product_and_lookup(self) -> None:
        text = (DATA / "every_kind.1.parsed.jsonl").read_text()
        parsed = [json.loads(line) for line in text.splitlines()]
        kinds = [one["compute"] for one in parsed if "compute" in one]
        assert kinds == ["gemm", "emb_lookup", "gemm"]
        gemm = next(one for one in parsed if one.get("compute") == "gemm")
        dims = [gemm[key] for key in ("mm0_dim0", "mm0_dim1", "mm1_dim0", "mm1_dim1")]
        assert dims == [8, 32, 32, 16]


class TestLaws:
    @pytest.mark.parametrize("workload", [PIPELINE, every_kind()], ids=["pipeline", "every"])
    def test_bytes_of_every_collective_are_those_of_the_workload(
        self, workload: Workload
    ) -> None:
        for rank in range(workload.world_size):
            written: Counter[str] = Counter()
            for one in entries(workload, rank):
                if "dtype" in one and "comms" in one:
                    elements = max(one["in_msg_size"], one["out_msg_size"])
                    written[one["comms"]] += elements * BYTES.get(one["dtype"], 1)
            expected: Counter[str] = Counter()
            for two in messages(workload, rank):
                group = workload.groups[two.group]
                expected[NAMES[two.collective][0]] += two.message_bytes(group)
            assert +written == +expected

    def test_requests_are_numbered_and_waited_for_once_at_most(self) -> None:
        for workload, rank in ((PIPELINE, 5), (every_kind(), 0)):
            posted: list[int] = []
            waited: list[int] = []
            for one in entries(workload, rank):
                if one.get("comms") == "wait":
                    assert one["req"] in posted
                    waited.append(one["req"])
                elif "req" in one:
                    posted.append(one["req"])
            assert posted == list(range(len(messages(workload, rank))))
            assert len(set(waited)) == len(waited)

    def test_waits_stand_where_the_stream_or_a_later_operation_waits(self) -> None:
        found = entries(every_kind())[1:]
        words = [
            f"wait {one['req']}" if one.get("comms") == "wait" else one["markers"][1]
            for one in found
        ]
        pairs = ["send", "recv"]
        assert words[:4] == ["all_reduce", "wait 0", "all_gather", "wait 1"]
        assert words[20:] == [
            *(*pairs, "wait 10", "wait 11"),
            *(*pairs, "wait 12", "wait 13", "one"),
            *("all_reduce", "all_gather", "two", "wait 14", "three"),
            *("wait 15", "reduce_scatter", "wait 16"),  # the last by the end of the step
        ]

    def test_exchanges_are_in_one_order_on_both_sides(self) -> None:
        """So that who waits for each message by itself, as PARAM's replay, comes to an end."""
        orders = [
            [
                (one["src_rank"], one["dst_rank"])
                for one in entries(every_kind(), rank)
                if "src_rank" in one
            ]
            for rank in (0, 1)
        ]
        assert orders[0] == orders[1] == [(0, 1), (1, 0)] * 2

    def test_all_files_declare_the_same_groups(self) -> None:
        declared = [
            [one for one in entries(PIPELINE, rank) if one.get("comms") == "init"]
            for rank in range(8)
        ]
        assert all(one == declared[0] for one in declared)
        assert [one["pg_id"] for one in declared[0]] == list(range(12))
        ranks = {tuple(one["global_ranks"]) for one in declared[0]}
        assert {(0, 1), (6, 7), (0, 2), (5, 7), (0, 4), (3, 7)} <= ranks

    def test_roots_are_ranks_of_the_world(self, tmp_path: Path) -> None:
        pairs = replace(alone(message("broadcast", root=1)), world_size=4)
        assert [entries(pairs, rank)[2]["root"] for rank in range(4)] == [1, 1, 3, 3]
        (one,) = messages(param_trace.read(saved(pairs, tmp_path)), 3)
        assert one.root == 1

    def test_a_rank_alone_comes_back(self, tmp_path: Path) -> None:
        product = next(one for one in every_kind().expand() if one.module == "one")
        for ops in ((product,), ()):
            path = tmp_path / "rank.json"
            path.write_text("".join(param_trace.write(replace(alone(*ops), world_size=1))))
            assert sniff(path) == "param"
            again = param_trace.read(path)
            assert [one.module for one in again.expand()] == [one.module for one in ops]
            assert again.world_size == 1
            assert "".join(param_trace.write(again)) == path.read_text()

    def test_a_rank_alone_says_nothing(self) -> None:
        single = {"all": Group(digits=((1, 1),))}
        ops = (message("all_reduce"), message("send", peer=0))
        assert entries(replace(alone(*ops), groups=single)) == []

    def test_long_steps_are_written_as_they_are_read(self) -> None:
        written = param_trace.write(pipeline(microbatches=2**32))
        assert sum(len(next(written)) for _ in range(100)) > 1000


class TestRoundTrip:
    @pytest.mark.parametrize("stages", [2, 4])
    def test_every_message_comes_back(self, stages: int, tmp_path: Path) -> None:
        workload = pipeline(stages=stages, microbatches=2, layers=2)
        again = param_trace.read(saved(workload, tmp_path))
        world = 4 * stages
        assert (again.world_size, len(again.stages)) == (world, stages)
        assert again.groups == workload.groups
        for rank in range(world):
            for one, two in zip(messages(workload, rank), messages(again, rank), strict=True):
                for field in (
                    "collective",
                    "dtype",
                    "count",
                    "phase",
                    "module",
                    "redop",
                    "peer",
                ):
                    assert getattr(one, field) == getattr(two, field)
                ours, others = workload.groups[one.group], again.groups[two.group]
                assert ours.members(rank) == others.members(rank)

    def test_a_message_names_the_group_of_its_two_ranks(self) -> None:
        """In a pipeline of four stages too, whose group has all of them."""
        workload = pipeline(stages=4, microbatches=2, layers=1)
        for rank in range(workload.world_size):
            found = entries(workload, rank)
            groups = {
                one["pg_id"]: one["global_ranks"] for one in found if one.get("comms") == "init"
            }
            pairs = [one for one in found if "src_rank" in one]
            assert pairs
            for one in pairs:
                assert groups[one["pg_id"]] == sorted((one["src_rank"], one["dst_rank"]))
                assert one["world_size"] == 2
                assert rank in groups[one["pg_id"]]

    def test_messages_of_other_tools_are_in_the_group_that_they_name(
        self, tmp_path: Path
    ) -> None:
        """A process group of all stages, as torch's pipelines use; or none, then all ranks."""
        sized = {"in_msg_size": 8, "out_msg_size": 8, "dtype": "float"}
        init = {"comms": "init", "pg_id": 1, "global_ranks": [0, 2, 4]}
        other = {"comms": "init", "pg_id": 2, "global_ranks": [1, 3, 5]}
        for named, size in (({"pg_id": 1}, 3), ({}, 6)):
            folder = tmp_path / str(size)
            folder.mkdir()
            for rank in range(6):
                sent = {"src_rank": 0, "dst_rank": 2, **sized, **named}
                kinds = {0: "send", 2: "recv"}
                step = [{"comms": kinds[rank], **sent}] if rank in kinds else []
                text = json.dumps([init, other, *step])
                (folder / f"{rank}.json").write_text(text)
            found = param_trace.read(folder)
            (op,) = messages(found, 0)
            members = found.groups[op.group].members(0)
            assert len(members) == size
            assert op.peer is not None
            assert members[op.peer] == 2

    def test_products_and_lookups_come_back(self, tmp_path: Path) -> None:
        again = param_trace.read(saved(every_kind(), tmp_path))
        ops = [one for one in every_kind().expand() if isinstance(one, ComputeOp)][:3]
        found = [one for one in again.expand() if isinstance(one, ComputeOp)]
        assert [(one.op, one.phase, one.module) for one in found] == [
            (one.op, one.phase, one.module) for one in ops
        ]

    def test_what_is_waited_for_later_is_beside_computation(self, tmp_path: Path) -> None:
        again = param_trace.read(saved(every_kind(), tmp_path))
        later = [one for one in messages(again, 0) if one.stream != "compute"]
        assert [one.dtype for one in later] == [DType.INT32, DType.FP32]
        three = next(one for one in again.expand() if one.module == "three")
        last = list(again.expand())[-1]
        assert three.after == ("communication~1",)
        assert last.after == ("communication",)

    def test_what_was_read_is_written_and_read_alike(self, tmp_path: Path) -> None:
        folders = [tmp_path / "one", tmp_path / "two"]
        for folder in folders:
            folder.mkdir()
        first = param_trace.read(saved(PIPELINE, folders[0]))
        second = param_trace.read(saved(first, folders[1]))
        assert (first.blocks, first.groups) == (second.blocks, second.groups)


class TestOfOthers:
    def test_starts_are_kept_on_request(self, tmp_path: Path) -> None:
        sized = {"in_msg_size": 8, "out_msg_size": 8, "dtype": "float", "world_size": 2}
        for rank in range(2):
            trace = [
                {"comms": "allreduce", "startTime_ns": 1e9 + rank + place * 2e6} | sized
                for place in range(3)
            ]
            trace.insert(1, {"compute": "gemm", "mm_dim": 8, "dtype": "float32"})
            (tmp_path / f"{rank}.json").write_text(json.dumps(trace))
        plain = param_trace.read(tmp_path)
        begun = param_trace.read(tmp_path, starts=True)
        assert all(op.start_s is None for op in plain.expand())
        # Clocks of ranks differ: each stage has the starts of its first rank.
        assert len(begun.stages) == 1
        starts = [op.start_s for op in begun.expand()]
        assert starts[1] is None
        assert [starts[0], *starts[2:]] == pytest.approx([0.0, 2e-3, 4e-3])
        assert native.decode(native.encode(begun)) == begun

    def test_one_file_for_all_ranks_and_any_spelling_of_names(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.json"
        sized = {"in_msg_size": 1024, "out_msg_size": 1024, "dtype": "Half", "world_size": 4}
        names = ["AllReduce", "all_to_all_single", "alltoall_base", "broadcast"]
        gemm = {"compute": "gemm", "mm_dim": 64, "dtype": "float32", "count": 3}
        trace = [{"comms": name} | sized for name in names] + [gemm]
        path.write_text(json.dumps(trace))
        assert sniff(path) == "param"
        found = param_trace.read(path)
        assert found.world_size == 4
        ops = list(found.expand())
        sizes = [(one.collective, one.count) for one in messages(found, 0)]
        assert sizes == [
            ("all_reduce", 1024),
            ("all_to_all", 256),
            ("all_to_all_v", 256),
            ("broadcast", 1024),
        ]
        products = [one.op for one in ops[4:] if isinstance(one, ComputeOp)]
        assert [(one.m, one.n, one.k) for one in products if isinstance(one, Gemm)] == [
            (64, 64, 64)
        ] * 3

    @pytest.mark.parametrize("batch", [True, False])
    def test_messages_posted_in_a_row_are_one_call(self, batch: bool, tmp_path: Path) -> None:
        pair = {"in_msg_size": 8, "out_msg_size": 8, "dtype": "float", "use_batch": batch}
        trace: list[dict[str, object]] = [
            {"comms": "isend", "src_rank": 0, "dst_rank": 1, "req": 1} | pair,
            {"comms": "irecv", "src_rank": 1, "dst_rank": 0, "req": 2} | pair,
            *([{"comms": "batch_isend_irecv", "req": 3}] if batch else []),
            {"comms": "wait", "req": 1},
            {"comms": "wait", "req": 2},
        ]
        (tmp_path / "0.json").write_text(json.dumps(trace))
        (tmp_path / "1.json").write_text("[]")
        found = param_trace.read(tmp_path)
        assert [(one.collective, one.stream, one.fused) for one in messages(found, 0)] == [
            ("send", "compute", False),
            ("recv", "compute", True),
        ]

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("{}", "list"),
            ("[1]", "list"),
            ("[{}]", "comms or compute"),
            ('[{"comms": "incast"}]', "incast"),
            ('[{"comms": "all_reduce"}]', "in_msg_size"),
            ('[{"comms": "all_reduce", "in_msg_size": -1}]', "in_msg_size"),
            ('[{"comms": "all_reduce", "in_msg_size": 8, "dtype": "x"}]', "dtype"),
            (
                '[{"comms": "reduce_scatter_base", "world_size": 3, "out_msg_size": "8"}]',
                "out_msg_size",
            ),
            ('[{"comms": "all_to_all", "world_size": 3, "in_msg_size": 8}]', "multiple of 3"),
            ('[{"comms": "isend", "in_msg_size": 8, "dtype": "int"}]', "src_rank"),
            ('[{"compute": "gemm", "mm0_dim0": 8}]', "mm_dim"),
            ('[{"compute": "emb_lookup"}]', "num_embs"),
            ('[{"compute": "conv"}]', "conv"),
            ('[{"comms": "init", "pg_id": 0, "global_ranks": [0, 1, 3]}]', "grid"),
        ],
    )
    def test_what_cannot_be_is_one_error(self, text: str, says: str, tmp_path: Path) -> None:
        if "init" in text:
            used = '{"comms": "all_reduce", "pg_id": 0, "in_msg_size": 8}]'
            text = f"{text[:-1]}, {used}"
        path = tmp_path / "x.json"
        path.write_text(text)
        with pytest.raises(ConfigError, match=says) as caught:
            param_trace.read(path)
        assert "\n" not in str(caught.value)

    def test_a_folder_without_all_ranks_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"no 0\.json"):
            param_trace.read(tmp_path)
        (tmp_path / "1.json").write_text("[]")
        with pytest.raises(ConfigError, match=r"no 0\.json"):
            param_trace.read(tmp_path)

    def test_any_damage_is_one_error_or_a_workload(self, tmp_path: Path) -> None:
        whole = "".join(param_trace.write(every_kind())).encode()
        path = tmp_path / "x.json"
        rng = random.Random(6)
        said = []
        for turn in range(150):
            data = bytearray(whole)
            if turn % 3 == 0:
                del data[rng.randrange(len(data)) :]
            for _ in range(rng.randint(1, 4)):
                if data:
                    data[rng.randrange(len(data))] = rng.choice(b'0123456789"{}[],:-xe\xff')
            path.write_bytes(bytes(data))
            try:
                param_trace.read(path)
            except ConfigError as error:
                said.append(str(error))
        assert len(said) > 100
        assert not any("\n" in one for one in said)

    def test_an_unknown_rank_or_collective_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="rank 2"):
            param_trace.write(every_kind(), 2)
        with pytest.raises(ConfigError, match="incast"):
            param_trace.write(alone(message("incast", root=0)))


def test_what_has_no_entry_still_waits() -> None:
    later = message("all_reduce", stream="dp", name="r")
    unsaid = op(every_kind_kernel(), Phase.STEP, "x", after=("r",))
    comms = [one["comms"] for one in entries(alone(later, unsaid))]
    assert comms == ["init", "all_reduce", "wait"]


def every_kind_kernel() -> Any:
    return next(
        one.op
        for one in every_kind().expand()
        if isinstance(one, ComputeOp) and one.module == "four"
    )


def test_what_is_read_otherwise_is_noted(tmp_path: Path) -> None:
    split = {"comms": "all_to_allv", "world_size": 2, "in_msg_size": 8, "out_msg_size": 8}
    split |= {"in_split": [6, 2], "out_split": [4, 4]}
    alone = [
        {"comms": "init", "pg_id": 3, "global_ranks": [1]},
        {"comms": "barrier", "pg_id": 3, "world_size": 1},
    ]
    for rank in range(2):
        (tmp_path / f"{rank}.json").write_text(json.dumps([split, *alone]))
    assert param_trace.read(tmp_path).notes == (
        "1 collectives of groups without their rank are left out",
        "2 all-to-alls of uneven parts are read with equal ones",
    )
