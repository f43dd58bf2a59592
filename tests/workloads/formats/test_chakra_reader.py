"""Chakra traces of others, and broken ones: read, or one ConfigError."""

import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepmark.ground.errors import ConfigError
from stepmark.step.workload import CommOp, Kernel, Workload
from stepmark.workloads import workload_files
from stepmark.workloads.formats import FORMATS, chakra, find_format, sniff
from stepmark.workloads.formats.chakra_schema import NodeType, classes, framed
from stepmark.workloads.workload_files import Target

from .hand_made import every_kind

DATA = Path(__file__).parents[2] / "data" / "chakra"
MADE = classes()


def node(number: int, kind: NodeType, deps: Sequence[int] = (), **given: Any) -> Any:
    values = given.pop("values", {})
    made = MADE.node(id=number, name=f"n{number}", type=int(kind), data_deps=deps, **given)
    for name, value in values.items():
        held = {bool: "bool", str: "string", int: "int64", float: "double"}[type(value)]
        made.attr.append(MADE.attribute(name=name, **{f"{held}_val": value}))
    return made


def coll(number: int, deps: Sequence[int] = (), **values: Any) -> Any:
    controls = values.pop("ctrl_deps", ())
    has = {"is_cpu_op": False, "comm_type": 0, "comm_size": 64} | values
    return node(number, NodeType.COMM_COLL, deps, values=has, ctrl_deps=controls)


def comp(number: int, deps: Sequence[int] = (), *, cpu: bool = False, **given: Any) -> Any:
    return node(number, NodeType.COMP, deps, values={"is_cpu_op": cpu}, **given)


def saved(folder: Path, *ranks: Sequence[Any], groups: str = "") -> Path:
    for rank, found in enumerate(ranks):
        parts = [
            framed(one.SerializeToString()) for one in (MADE.metadata(version="1"), *found)
        ]
        (folder / f"t.{rank}.et").write_bytes(b"".join(parts))
    if groups:
        (folder / "comm_groups.json").write_text(groups)
    return folder


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        chakra.read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestOfOthers:
    @pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
    def test_astra_sims_own_examples(self, kind: str) -> None:
        """1 MiB of each rank's input on 4 ranks."""
        found = chakra.read(DATA / kind)
        (one,) = found.expand()
        assert isinstance(one, CommOp)
        group = found.groups[one.group]
        assert (one.collective, group.members(2)) == (kind, (0, 1, 2, 3))
        total = 4 if kind == "all_gather" else 1
        assert one.message_bytes(group) == total * 2**20
        assert (found.world_size, len(found.stages)) == (4, 1)

    def test_a_converted_trace_has_hosts_calls_and_callers(self, tmp_path: Path) -> None:
        """As mlcommons' converter writes: ctrl_deps is the caller, in the file or not."""
        call = node(4, NodeType.COMM_COLL, [2], ctrl_deps=[3], values={"is_cpu_op": True})
        found = chakra.read(
            saved(
                tmp_path,
                [
                    comp(2, cpu=True, ctrl_deps=[1]),
                    comp(5, [2], ctrl_deps=[2], duration_micros=40),
                    call,
                    coll(6, [4, 5], comm_type=5),
                ],
            )
        )
        ops = list(found.expand())
        assert [one.stream for one in ops] == ["cpu", "cpu", "compute", "communication"]
        assert [one.after for one in ops] == [(), (), ("cpu~1",), ("cpu", "compute")]
        assert [one.time_s for one in ops] == [None, None, 40e-6, None]
        assert found.notes == (
            "Of 1 of 1 files the ctrl_deps are left out: they go in a circle or out of the "
            "file, as those of callers do.",
        )

    def test_control_dependencies_hold_where_they_can(self, tmp_path: Path) -> None:
        found = chakra.read(saved(tmp_path, [comp(0), coll(1, ctrl_deps=[0])]))
        assert [one.after for one in found.expand()] == [(), ("compute",)]
        assert not found.notes

    def test_all_that_is_waited_for_is_kept(self, tmp_path: Path) -> None:
        """Also what follows from other dependencies, so that a file comes back as it was."""
        nodes = [coll(0), coll(1), comp(2, [0, 1]), comp(3, [0, 1]), comp(4, [0])]
        found = chakra.read(saved(tmp_path, nodes))
        both = ("communication~1", "communication")
        assert [one.after for one in found.expand()][2:] == [both, both, both[:1]]

    def test_nodes_that_do_nothing_pass_on_what_they_wait_for(self, tmp_path: Path) -> None:
        nothing = node(1, NodeType.METADATA, [0])
        found = chakra.read(saved(tmp_path, [comp(0), nothing, coll(2, [1])]))
        assert [one.after for one in found.expand()] == [(), ("compute",)]

    def test_loads_and_stores_are_computation(self, tmp_path: Path) -> None:
        load = node(0, NodeType.MEM_LOAD, values={"tensor_size": 512})
        (one,) = chakra.read(saved(tmp_path, [load])).expand()
        assert one.op == Kernel(name="n0", bytes_moved=512)  # type: ignore[union-attr]

    def test_numbers_order_what_dependencies_do_not(self, tmp_path: Path) -> None:
        found = chakra.read(saved(tmp_path, [comp(7), comp(3, [9]), comp(9)]))
        names = [one.op.name for one in found.expand()]  # type: ignore[union-attr]
        assert names == ["n7", "n9", "n3"]

    def test_ranks_that_differ_are_stages(self, tmp_path: Path) -> None:
        first, last = [comp(0), comp(1)], [comp(0)]
        found = chakra.read(saved(tmp_path, first, first, last, last))
        assert [found.num_operations(stage) for stage in range(2)] == [2, 1]

    def test_a_group_of_some_ranks(self, tmp_path: Path) -> None:
        pairs = '{"1": [0, 2], "2": [1, 3]}'
        ranks = [[coll(0, pg_name="1")], [coll(0, pg_name="2")]] * 2
        found = chakra.read(saved(tmp_path, *ranks, groups=pairs))
        (one,) = found.expand()
        assert isinstance(one, CommOp)
        assert found.groups[one.group].members(3) == (1, 3)
        assert len(found.stages) == 1


class TestRefused:
    @pytest.mark.parametrize(
        ("nodes", "says"),
        [
            ([comp(0), comp(0)], "nodes with different ids"),
            ([comp(0, [1]), comp(1, [0])], "no circle"),
            ([comp(0, [5])], "node 0: '5' is invalid: it must be a node of the file"),
            ([node(0, NodeType.COMM_COLL, values={"comm_size": 8})], "comm_type"),
            ([coll(0, comm_type=10)], "from 0 to 9"),
            ([coll(0, comm_size=-8)], "a number of bytes"),
            ([coll(0, comm_type=7, comm_size=7)], "a multiple of 2 bytes"),
            ([coll(0, dtype="quux")], "dtype quux"),
            ([node(0, NodeType.COMP, values={"num_ops": -1})], "num_ops"),
            ([node(0, NodeType.COMP, values={"time_s": float("nan")})], "time_s"),
            ([coll(0, pg_name="3")], "a group of comm_groups.json"),
            ([coll(0, pg_name="1")], "ranks from 0 to 1, 0 among them"),
            ([coll(0, pg_name="2")], "there is no t.2.et"),
            ([node(0, NodeType.COMM_SEND, values={"comm_size": 8, "comm_dst": 2})], "comm_dst"),
            ([node(0, NodeType.COMM_RECV, values={"comm_src": 1})], "comm_size"),
            ([MADE.node(id=0, type=8)], "type 8 is invalid: it must be from 0 to 7"),
        ],
    )
    def test_a_trace_that_cannot_be(self, nodes: list[Any], says: str, tmp_path: Path) -> None:
        groups = '{"1": [1], "2": [0, 2]}'
        assert says in refused(saved(tmp_path, nodes, nodes, groups=groups))

    def test_files_that_are_not_there(self, tmp_path: Path) -> None:
        assert "it has 0" in refused(tmp_path)
        assert "PREFIX.RANK.et" in refused(tmp_path / "x.et")
        assert "there is no x.3.et" in refused(tmp_path / "x.3.et")
        saved(tmp_path, [comp(0)])
        (tmp_path / "t.0.et").rename(tmp_path / "t.1.et")
        assert "there is no t.0.et" in refused(tmp_path / "t.1.et")

    def test_a_gap_among_the_ranks_is_named(self, tmp_path: Path) -> None:
        folder = saved(tmp_path, *([comp(0)] for _ in range(12)))
        assert chakra.read(folder).world_size == 12
        (folder / "t.3.et").unlink()
        for path in (folder, folder / "t.0.et", folder / "t.11.et"):
            assert "there is no t.3.et" in refused(path)

    @pytest.mark.parametrize("text", ["[]", '{"1": 2}', "{", "\xff", "[" * 10**5])
    def test_groups_that_are_none(self, text: str, tmp_path: Path) -> None:
        saved(tmp_path, [comp(0)])
        (tmp_path / "comm_groups.json").write_text(text, encoding="latin-1")
        assert '{"1": [0, 1], ...}' in refused(tmp_path)

    def test_every_cut_and_any_damage_is_one_error(self, tmp_path: Path) -> None:
        whole = b"".join(chakra.write(every_kind()))
        path = tmp_path / "t.0.et"
        rng = random.Random(6)
        cuts = [whole[:length] for length in range(0, len(whole), 97)]
        damaged = []
        for _ in range(80):
            data = bytearray(whole)
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            damaged.append(bytes(data))
        outcomes: list[Workload | str] = []
        for data in (*cuts, *damaged):
            path.write_bytes(data)
            try:
                outcomes.append(chakra.read(path))
            except ConfigError as error:
                outcomes.append(str(error))
        said = [one for one in outcomes if isinstance(one, str)]
        assert len(cuts) // 2 < len(said) < len(outcomes)
        assert not any("\n" in one for one in said)

    def test_a_length_that_never_ends(self, tmp_path: Path) -> None:
        (tmp_path / "t.0.et").write_bytes(b"\xff" * 50)
        assert "cut off" in refused(tmp_path)

    def test_without_protobuf_it_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "google.protobuf", None)
        classes.cache_clear()
        try:
            with pytest.raises(ConfigError, match=r"pip install 'stepmark\[chakra\]'"):
                chakra.write(every_kind())
        finally:
            classes.cache_clear()


class TestFormats:
    def test_it_is_one_of_the_formats(self, tmp_path: Path) -> None:
        assert find_format("chakra", to=True) == "chakra"
        assert FORMATS["chakra"].load() is chakra
        folder = saved(tmp_path, [comp(0)])
        assert sniff(folder) == sniff(folder / "t.0.et") == "chakra"
        assert sniff(DATA / "all_gather" / "all_gather.2.et") == "chakra"

    @pytest.mark.parametrize("name", ["chakra", "param"])
    def test_all_ranks_go_to_a_folder_and_come_from_it(
        self, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = tmp_path / "new" / "folder"
        workload_files.deliver(every_kind(), Target(to=name, out=f"{folder}/"))
        files = {"chakra": 3, "param": 2}[name]
        assert f"wrote {folder}: {files} files" in capsys.readouterr().err
        assert len(list(folder.iterdir())) == files
        found = workload_files.read(str(folder))
        assert (found.rules, found.world_size) == ({"param": "param-trace"}.get(name, name), 2)
        workload_files.deliver(every_kind(), Target(to=name, out=str(folder), rank=1))
        assert f"{files - 1} file" in capsys.readouterr().err
        with pytest.raises(ConfigError, match="rank 2"):
            workload_files.deliver(every_kind(), Target(to=name, out=str(folder), rank=2))
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="a folder"):
            workload_files.deliver(every_kind(), Target(to=name, out=f"{tmp_path}/file/"))

    @pytest.mark.parametrize(
        "metadata",
        [
            {"version": "0.0.4"},
            {"version": "v" * 3000},
            {"version": "v" * 9000},
            {"attr": [MADE.attribute(name="pid", uint64_val=2**40)] * 9},
            {},
        ],
    )
    def test_any_metadata_is_known(self, metadata: dict[str, Any], tmp_path: Path) -> None:
        parts = (MADE.metadata(**metadata), comp(1))
        data = b"".join(framed(one.SerializeToString()) for one in parts)
        (tmp_path / "t.0.et").write_bytes(data)
        assert sniff(tmp_path / "t.0.et") == "chakra"

    @given(st.text(max_size=200))
    @example("!" + 32 * "0")  # in "#\n!...": 35 bytes that begin with a version of 33
    @settings(max_examples=40)
    def test_text_is_not_taken_for_one(self, text: str) -> None:
        is_one = FORMATS["chakra"].is_one
        assert not any(is_one(f"{head}\n{text}\n".encode()) for head in ("{", "[", "a", "#"))

    def test_no_file_of_another_format_is_taken_for_one(self) -> None:
        others = itertools.islice(DATA.parent.glob("aicb/*/*"), 40)
        heads = [path.read_bytes()[:4096] for path in others]
        assert heads
        assert not any(FORMATS["chakra"].is_one(head) for head in heads)


# Beginnings of files of mlcommons/chakra at 21585d8, tests/data, and of chakra_jsonizer's text.
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n  "workload_graph": [\n    {\n      "Id": 216,', "graph as JSON.*PREFIX.RANK.et"),
        (
            '{\n  "schema": "1.0.2-chakra.0.0.4", "pid": 788625,\n  "nodes": [\n    {',
            "chakra_trace_link and chakra_converter make",
        ),
        ('{\n  "version": "0.0.4"\n}{\n  "id": "2",', "text of chakra_jsonizer"),
    ],
)
def test_other_forms_of_chakra_are_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "chakra.0.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        workload_files.read(str(path))
