"""stepmark compare: files, runs and tables side by side, as a user asks for it."""

import csv
import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
from tests.collectives.comm_records import comm_case, flat
from tests.parsing import run
from tests.store.test_runs import INFO
from tests.store.writers import new_run

from stepmark.ground.errors import ConfigError

DATA = Path(__file__).parents[1] / "data"
SLIDES = DATA.parents[1] / "examples" / "frontier-rccl.txt"
QUEUED = DATA / "nccl-tests" / "8xH200-all_reduce.txt"
Rows = list[dict[str, object]]


def call(*words: object, code: int = 0) -> str:
    exit_code, shown = run("compare", *map(str, words))
    assert exit_code == code, shown
    return shown


def document(*words: object, code: int = 0) -> dict[str, Rows]:
    found: dict[str, Rows] = json.loads(call(*words, "--json", "-", code=code))
    return found


@pytest.fixture
def cut(tmp_path: Path) -> list[Path]:
    """The three 16-rank tables of the slides, each in a file of its own."""
    from stepmark.text_tables import find

    lines = SLIDES.read_text().splitlines()
    tables = [table for table in find(SLIDES) if table.num_ranks == 16 and not table.columns]
    made = []
    for name, table in zip(("no-plugin", "plugin", "plugin-gdr3"), tables[:3], strict=True):
        made.append(tmp_path / f"{name}.txt")
        made[-1].write_text("\n".join(lines[table.first_line - 1 : table.last_line]) + "\n")
    return made


def test_the_slides_own_comparison_is_found_again(cut: list[Path]) -> None:
    """17 sizes; their table prints the in-place bus bandwidth with two decimals."""
    printed = document(f"{SLIDES}:5")
    found = document(*cut, "--placement", "in")
    assert len(found["lines"]) == len(printed["lines"]) == 34
    theirs = {(row["size_bytes"], str(row["side"])): row for row in printed["lines"]}
    for row in found["lines"]:
        names = {"plugin": "With Plugin", "plugin-gdr3": "With Plugin+GDR=3"}
        other = theirs[(row["size_bytes"], names[str(row["side"])])]
        assert row["busbw_gb_s"] == pytest.approx(other["rate"], rel=0.01)
        assert row["baseline_busbw_gb_s"] == pytest.approx(other["baseline_rate"], rel=0.01)
        assert row["num_ranks"] == 16
        assert (row["low"], row["verdict"]) == (None, "cannot tell")


def test_the_slides_statements_hold(cut: list[Path]) -> None:
    """GDR over the plugin: under 10 % up to 4 MiB, over 25 % from 8 MiB."""
    rows = document(cut[1], cut[2], "--placement", "in")["lines"]
    for row in rows:
        size, speed = row["size_bytes"], row["speed"]
        assert isinstance(size, int)
        assert isinstance(speed, float)
        assert (speed > 1.25) if size >= 8 << 20 else (speed < 1.10)


@pytest.mark.parametrize(("base", "other"), [(1, 2), (2, 1)])
def test_each_side_has_its_own_bus_bandwidth(base: int, other: int) -> None:
    """8 ranks and 16 ranks: 135.88 and 8.03 GB/s in the slides, at 4 GiB in-place."""
    words = (f"{SLIDES}:{base}", f"{SLIDES}:{other}", "--allow", "num_ranks")
    printed = {1: "135.88", 2: "8.03"}
    table = call(*words, "--placement", "in")
    last = next(line for line in table.splitlines() if line.strip().startswith("4 GiB"))
    assert last.split()[2:4] == [printed[base], printed[other]]
    found = document(*words, "--placement", "in")
    row = next(row for row in found["lines"] if row["size_bytes"] == 4 << 30)
    ranks = {1: 8, 2: 16}
    assert (row["baseline_num_ranks"], row["num_ranks"]) == (ranks[base], ranks[other])
    shown = (row["baseline_busbw_gb_s"], row["busbw_gb_s"])
    assert shown == pytest.approx([float(printed[base]), float(printed[other])], abs=0.005)
    (note,) = (note for note in found["notes"] if str(note).startswith("ratios are"))
    assert "of time" in str(note)
    assert note in table


def test_sizes_that_occur_twice_are_repeats(tmp_path: Path) -> None:
    text = QUEUED.read_text()
    (row,) = (line for line in text.splitlines() if "1354.02  198.25  346.94" in line)
    twice = tmp_path / "twice.txt"
    twice.write_text(text.replace(row, f"{row}\n{row.replace('1354.02', '1654.02')}"))
    found = document(QUEUED, f"b={twice}")
    more, average, note = map(str, found["notes"])
    assert more == "b: 1 rows more than the parameters ask for: some stand twice"
    assert "the footer's average" in average
    assert note.startswith("b: repeats: the table has 256 MiB up to 2 times")
    assert "median" not in note.partition("(default")[0]
    out = {row["size_bytes"]: row for row in found["lines"] if row["placement"][0] == "o"}
    assert out[256 << 20]["values"] == 2
    assert out[256 << 20]["time_s"] == pytest.approx(1504.02e-6)
    assert [row["values"] for row in out.values()].count(1) == len(out) - 1


@pytest.mark.parametrize("places", [("1048576", "4194304"), ("two nodes", "four nodes")])
def test_times_with_other_units_in_their_headings_are_compared_in_seconds(
    tmp_path: Path, places: tuple[str, str]
) -> None:
    """As printed, 40 us would be 800 times 0.05 ms. A unit of a rate is none of a time."""
    path = tmp_path / "times.csv"
    rows = (
        f"{place},{row}\n" for place, row in zip(places, ("0.05,40", "0.1,110"), strict=True)
    )
    path.write_text("size,a time (ms),latency_us\n" + "".join(rows))
    found = document(path)["lines"]
    assert [row["speed"] for row in found] == pytest.approx([1.25, 100 / 110])
    assert [row["time_s"] for row in found] == pytest.approx([40e-6, 110e-6])
    path.write_text(
        path.read_text().replace("latency_us", "img_s").replace("time (ms)", "GPU(s)")
    )
    assert [row["rate"] for row in document(path)["lines"]] == pytest.approx([40, 110])


@pytest.mark.parametrize("unit", ["MB/s", "GFLOP/s", "ktokens/s", "none"])
def test_columns_in_unlike_units_are_not_divided(tmp_path: Path, unit: str) -> None:
    path = tmp_path / "rates.csv"
    path.write_text(f"size,a GB/s,b {unit}\n1048576,20,21000\n4194304,40,39000\n")
    with pytest.raises(ConfigError, match=f"one unit, not .*{unit}"):
        call(path)
    path.write_text(path.read_text().replace(f"b {unit}", "b in GB/s"))
    assert [row["speed"] for row in document(path)["lines"]] == pytest.approx([1050, 975])


def test_files_in_unlike_units_are_not_divided(tmp_path: Path) -> None:
    first, second = tmp_path / "a.csv", tmp_path / "b.csv"
    first.write_text("size,a MB/s\n1048576,20000\n4194304,40000\n")
    second.write_text(first.read_text().replace("a MB/s", "b TB/s"))
    with pytest.raises(ConfigError, match="in common"):
        call(first, second)
    second.write_text(first.read_text().replace("a MB", "b MB"))
    assert "in MB/s; ratios are of speed" in call(first, second)


def test_what_a_table_s_footer_says_is_told(tmp_path: Path) -> None:
    path = tmp_path / "beyond.txt"
    path.write_text(QUEUED.read_text().replace("values : 0 OK", "values : 4 FAILED"))
    assert "b: the footer counts values out of bounds: 4" in call(QUEUED, f"b={path}")


def test_applications_compare_the_same_way() -> None:
    gptj = document(f"{SLIDES}:7", f"{SLIDES}:9")["lines"]
    speed = {row["label"]: row["speed"] for row in gptj}
    assert speed["train_samples_per_second"] == pytest.approx(72.106 / 36.372)
    assert speed["train_runtime"] == pytest.approx(1126.1257 / 568.0539)
    bigbird = document(f"{SLIDES}:10", f"{SLIDES}:12")["lines"]
    speed = {row["label"]: row["speed"] for row in bigbird}
    assert speed["train_samples_per_second"] == pytest.approx(942.769 / 920.145)
    images = document(f"{SLIDES}:14")["lines"]
    at_64 = [row["speed"] for row in images if "64 nodes" in str(row["label"])]
    assert at_64 == pytest.approx([1.231, 1.310], abs=1e-3)


def test_values_printed_as_zero_are_bounds() -> None:
    rows = document(f"{SLIDES}:6")["lines"]
    ring = [row for row in rows if str(row["side"]).endswith("Ring")]
    assert [row["below"] for row in ring[:4]] == [0.005, 0.005, 0.005, None]
    assert [row["speed"] for row in ring[:3]] == [None] * 3
    assert "< 0.005" in call(f"{SLIDES}:6")


def test_other_methods_need_force(tmp_path: Path) -> None:
    graph = tmp_path / "graph.txt"
    graph.write_text(QUEUED.read_text().replace("graph: 0", "graph: 5"))
    with pytest.raises(ConfigError, match=r"queued.*graph.*--force"):
        call(QUEUED, graph)
    text = call(QUEUED, graph, "--allow", "method")
    assert "method differs" in text
    assert "nccl-tests queued" not in text.splitlines()[0]
    assert text == call(QUEUED, graph, "--force")


def test_files_as_launches_give_verdicts(tmp_path: Path) -> None:
    """Three files a side; one side's times are all 20 % longer."""
    text = QUEUED.read_text()
    for number in (1, 2, 3):
        (tmp_path / f"a-{number}.txt").write_text(text)
    slow = text.replace("  1354.02  198.25  346.94", f"  {1354.02 * 1.2:.2f}  165.21  289.12")
    assert slow != text
    for number in (1, 2, 3):
        (tmp_path / f"b-{number}.txt").write_text(slow)
    a, b = (f"{n}=" + ",".join(f"{tmp_path}/{n}-{i}.txt" for i in (1, 2, 3)) for n in "ab")
    rows = document(a, b)["lines"]
    slower = [row for row in rows if row["verdict"] == "slower"]
    assert [(row["size_bytes"], row["placement"]) for row in slower] == [
        (268435456, "out-of-place")
    ]
    assert "too slow: b all_reduce" in call(a, b, "--fail-if-slower", "5%", code=1)
    failed = document(a, f"b={tmp_path}/b-*.txt", "--fail-if-slower", "5%", code=1)
    assert [row["too_slow"] for row in failed["lines"]].count(True) == 1
    assert document(a, b, "--fail-if-slower", "25%")["lines"]


def test_noise_that_is_told_gives_an_interval(cut: list[Path]) -> None:
    rows = document(cut[0], cut[1], "--placement", "in", "--noise", "2%")["lines"]
    assert {row["verdict"] for row in rows} == {"faster"}


def test_the_range_is_stated(cut: list[Path]) -> None:
    text = call(*cut[:2], "--placement", "in", "--range", "1M-64M")
    assert "over 1 MiB to 64 MiB, 7 lines" in text


def test_another_baseline_inverts(cut: list[Path]) -> None:
    there = document(*cut[:2], "--placement", "in")["lines"]
    back = document(*cut[:2], "--placement", "in", "--baseline", "plugin")["lines"]
    for one, other in zip(there, back, strict=True):
        assert one["speed"] == pytest.approx(1 / float(str(other["speed"])))


def run_of(root: Path, name: str, factor: float, launches: int) -> Path:
    info = dataclasses.replace(INFO, run_id=name)
    with new_run(root, info) as writer:
        for launch in range(1, launches + 1):
            time_s = 1e-3 * factor * (1 + launch * 1e-4)
            writer.append(flat(comm_case(), time_s, launch=launch))
    return root / name


def test_runs_of_ours(tmp_path: Path) -> None:
    a, b = run_of(tmp_path, "a", 1.0, 40), run_of(tmp_path, "b", 0.8, 40)
    (row,) = document(a, b)["lines"]
    assert (row["verdict"], row["launches"]) == ("faster", 40)
    assert row["speed"] == pytest.approx(1.25)
    (same,) = document("a", "copy=a", "--runs", tmp_path)["lines"]
    assert same["verdict"] == "same"


def test_one_launch_needs_a_spread(tmp_path: Path) -> None:
    one, other = run_of(tmp_path, "one", 1.0, 1), run_of(tmp_path, "other", 0.8, 1)
    (row,) = document(one, other)["lines"]
    assert (row["verdict"], row["reason"]) == ("cannot tell", "one launch")
    many = run_of(tmp_path, "many", 1.1, 5)
    (row,) = document(one, other, "--spread", many)["lines"]
    assert row["verdict"] == "faster"


def test_a_run_beside_a_file_is_refused_and_forced(tmp_path: Path) -> None:
    run = run_of(tmp_path, "run", 1.0, 2)
    with pytest.raises(ConfigError):
        call(run, QUEUED)


def test_csv_and_page(cut: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    text = call(*cut, "--placement", "in", "--csv", "-", "--html", page)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 34
    html = page.read_text()
    assert "<h1>Comparison of no-plugin with 2 others</h1>" in html
    assert html.count("Plotly.newPlot(") == 1
    # Lines are sorted by what they are, not by how it reads: 1 KiB before 1 GiB.
    (first, *_) = re.findall(r"<tr>(<td.*?)</tr>", html)
    keys = [
        float(key)
        for key in re.findall(r' data-v="([^"]+)">(?:[\d.]+ [KMG]?i?B|[\d.]+)<', first)
    ]
    row = next(csv.DictReader(io.StringIO(text)))
    assert keys[0] == float(row["size_bytes"])
    assert keys[1:3] == [
        float(row["baseline_busbw_gb_s"]),
        float(row["busbw_gb_s"]),
    ]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["nowhere.txt", "b.txt"], "nowhere"),
        ([f"{SLIDES}", f"{SLIDES}:3"], "one of its tables"),
        ([f"{SLIDES}:99", f"{SLIDES}:3"], "a table of this file"),
        ([f"{SLIDES}:2"], "must be two sides or more"),
        ([f"{SLIDES}:2", f"{SLIDES}:7"], "something in common"),
        ([f"{SLIDES}:1", f"{SLIDES}:2"], "num_ranks"),
        ([f"{SLIDES}:2", f"{SLIDES}:3", "--baseline", "x"], "baseline"),
        ([f"{SLIDES}:2", f"{SLIDES}:3", "--allow", "size"], "allow"),
        ([f"{SLIDES}:2", f"{SLIDES}:3", "--noise", "much"], "noise"),
        ([f"{SLIDES}:2", f"{SLIDES}:3", "--range", "1M"], "range"),
        ([f"{SLIDES}:2", f"{SLIDES}:3", "--range", "1G-1M"], "range"),
        ([f"{SLIDES}:2", f"{SLIDES}:3", "--fail-if-slower", "200%"], "fail-if-slower"),
        ([f"{SLIDES}:2", f"{SLIDES}:3", "--collective", "allsum"], "collective"),
        ([f"{SLIDES}:2", f"{SLIDES}:3", "--placement", "up"], "placement"),
        ([f"{SLIDES}:2", f"{SLIDES}:3", "--statistic", "mode"], "statistic"),
        (["nothing-*.txt", f"{SLIDES}:3"], "pattern"),
    ],
)
def test_bad_input_is_one_line(words: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as error:
        call(*words)
    assert "\n" not in str(error.value)


def test_folders_of_a_pattern_are_read(tmp_path: Path) -> None:
    for name in ("a1", "a2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "out.txt").write_text(QUEUED.read_text())
    with pytest.raises(ConfigError, match="two sides or more"):
        call(str(tmp_path / "a*"))
    side = f"both={tmp_path / 'a*'}"
    assert {row["launches"] for row in document(QUEUED, side)["lines"]} == {2}


def test_tables_of_one_file_are_launches_of_their_own(cut: list[Path]) -> None:
    side = f"both={SLIDES}:3,{SLIDES}:4"
    rows = document(f"{SLIDES}:2", side, "--placement", "in")["lines"]
    assert {row["launches"] for row in rows} == {2}
    with pytest.raises(ConfigError, match="once, not"):
        call(f"{SLIDES}:2", f"both={SLIDES}:3,{SLIDES}:3")


def test_wrong_rows_of_a_file_are_left_out(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.txt"
    wrong.write_text(QUEUED.read_text().replace("319.09       0", "319.09       7"))
    found = document(QUEUED, f"b={wrong}")
    assert "b: 1 wrong results are left out" in found["notes"]
    assert len(found["lines"]) == 23


def test_a_gate_that_tests_nothing_does_not_pass(cut: list[Path]) -> None:
    words = (*cut[:2], "--placement", "in", "--fail-if-slower", "5%")
    text = call(*words, code=3)
    assert "0 of 0 certainly slower by more than 5.0%; 17 without an interval" in text
    call(*words, "--noise", "1%")


def test_bounds_stay_bounds_when_launches_are_joined(tmp_path: Path) -> None:
    """Printed as 0 once, as 0.1 the other time: not 0.1."""
    for name, value in (("c1", "0.00"), ("c2", "0.10"), ("d", "0.20")):
        (tmp_path / f"{name}.csv").write_text(f"size,a\n1024,{value}\n2048,1.00\n")
    c = ",".join(f"{tmp_path}/c{n}.csv" for n in (1, 2))
    rows = document(f"c={c}", f"d={tmp_path}/d.csv", "--unit", "rate")["lines"]
    assert rows[0]["baseline_rate"] is None
    assert rows[0]["baseline_below"] == 0.005


def test_a_run_with_impossible_times_is_one_line(tmp_path: Path) -> None:
    run = run_of(tmp_path, "zero", 0.0, 1)
    with pytest.raises(ConfigError, match="finite times above 0"):
        call(run, run_of(tmp_path, "fine", 1.0, 1))


def test_names_may_be_long_and_may_repeat(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        call("a" * 5000 + ".txt", QUEUED)
    assert len(document(QUEUED, QUEUED, f"8xH200-all_reduce (2)={QUEUED}")["lines"]) == 48


def test_rows_by_step_are_repeats_of_one_launch(tmp_path: Path) -> None:
    """Step 5 of one launch is no counterpart of step 5 of another."""
    files = []
    for name, step_ms in (("a", 100), ("b", 110)):
        rows = [f"{step},{step_ms + step % 3}.5" for step in range(12)]
        files.append(tmp_path / f"{name}.csv")
        files[-1].write_text("\n".join(["step,time_ms", *rows]))
    (line,) = document(*files)["lines"]
    assert line["verdict"] == "cannot tell"


def test_what_is_not_read_says_what_is(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("".join(f"step {step} loss 2.3 time 455.8 ms\n" for step in range(9)))
    with pytest.raises(
        ConfigError, match=r"log of a trainer \(Megatron-LM, .*trace compare A B"
    ):
        call(log, log)
    code, shown = run("logs", str(log))
    assert code == 3
    assert "steps      in no format that is read (docs/verbs/logs.md" in shown
