"""Readers, and files made to harm them: `python -m tests.damage.hostile SEED COUNT [READER]`.

A command that reads a hostile file ends within 2 s of CPU time and 200 MB beyond what the
program needs by itself, without a traceback, a signal or a wait; an error is one sentence. A
line per fault is printed, with the seed that repeats it, then counts by reader and by kind.
"""

import gzip
import importlib
import io
import os
import pickle
import pkgutil
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import stepmark
from stepmark.cli.main import status
from stepmark.ground import streams

ROOT = Path(__file__).parents[2]
DATA, RESULTS, EXAMPLES = ROOT / "tests" / "data", ROOT / "results", ROOT / "examples"
MAX_CPU_S, MAX_MB = 2.0, 200
MAX_WALL_S = 40.0  # of a process that waits; other work may share the cores
_MAX_MESSAGE = 1500  # characters of an error


@dataclass(frozen=True, slots=True)
class Reader:
    """A command that reads `target`, which lies in a folder with copies of `files`."""

    name: str
    words: str
    target: str
    files: dict[str, str]  # sources by the names of their copies


def _file(name: str, words: str, source: Path | str, target: str = "") -> Reader:
    target = target or Path(source).name.removesuffix(".gz")
    return Reader(name, words.replace("{}", target), target, {target: str(ROOT / source)})


def _run(name: str, words: str, source: Path, target: str) -> Reader:
    files = {f"runs/{source.name}": str(source)}
    return Reader(name, words.replace("{}", source.name), f"runs/{source.name}/{target}", files)


_TRACE = DATA / "traces" / "info-after-events" / "simple_add.json.gz"
_TABLE = DATA / "nccl-tests" / "8xH200-all_gather.txt"
_RUN = RESULTS / "h100-run"
_SMALL_RUN = RESULTS / "h200-attention-burst"
_SAMPLES = RESULTS / "h100-x4-predictions-1"
_NPY = "samples/3dde50ea020fd5cd.npy"
_AICB = DATA / "aicb" / "gpt13b_tp2_pp1_w2048_gbs4096_distopt"
_ROWS = DATA / "published-h200-attention-burst.csv"

READERS = (
    _file(
        "HF config",
        "predict {} --device h200-sxm --nproc 8",
        EXAMPLES / "hf/llama-3.1-8b/config.json",
    ),
    _file(
        "HF MoE config",
        "workload generate --model {}",
        EXAMPLES / "hf/qwen3-30b-a3b/config.json",
    ),
    _file(
        "list of models",
        "op gemm --model {} --dry-run --device cpu",
        EXAMPLES / "model_configs.json",
    ),
    _file(
        "llm-train-bench",
        "workload generate --model {}",
        EXAMPLES / "llm-train-bench/gpt2-1.5b.json",
    ),
    _file(
        "gemm shapes",
        "op gemm --shapes {} --dry-run --device cpu",
        EXAMPLES / "gemm_shapes.json",
    ),
    _file(
        "PARAM operators",
        "op --config {} --dry-run --device cpu",
        EXAMPLES / "param_operators.json",
    ),
    _file("native workload", "workload show {}", "made/w.json"),
    _file("native workload to SimAI", "workload convert {} --to simai -o out", "made/w.json"),
    _file("SimAI workload", "workload show {}", _AICB / "simai_aiob_example.txt"),
    _file("AICB workload", "workload show {}", _AICB / "mocked.csv"),
    _file("PARAM workload", "workload show {}", DATA / "param/every_kind.1.json"),
    _file("Chakra workload", "workload show {}", DATA / "chakra/all_gather/all_gather.0.et"),
    _file(
        "AIOB profile",
        "workload generate --model gpt2-1.5b --compute-from {}",
        DATA / "aicb/aiob_example.txt",
    ),
    _file("replay", "replay {} --dry-run --device cpu", "made/w.json"),
    _file("trace breakdown", "trace breakdown {}", _TRACE),
    _file("trace of MI250", "trace breakdown {}", DATA / "traces/mi250/minitoy.json.gz"),
    _file("gloo trace", "trace messages {}", DATA / "gloo-traces/rank0.json.gz"),
    _file("trace ledger", "trace ledger {}", DATA / "critical-path/sync0.json.gz"),
    _file("trace to-workload", "trace to-workload {} --out out.json", _TRACE),
    _file("profiler table", "trace breakdown {}", EXAMPLES / "frontier-profiler-table.txt"),
    _file("NCCL log", "logs {}", DATA / "nccl-logs/ib-707.txt"),
    _file("CALL log", "logs {}", EXAMPLES / "coll.log"),
    _file("job output", "logs {}", DATA / "faults/killed/output.txt.gz"),
    _file("training log", "logs {}", EXAMPLES / "logs/megatron.log"),
    _file(
        "measured log",
        "predict gpt2-1.5b --device h200-sxm --nproc 8 --measured {}",
        EXAMPLES / "logs/megatron.log",
    ),
    _file("RCCL table", "logs {}", EXAMPLES / "frontier-rccl.txt"),
    _file("flight recorder", "logs {}", DATA / "flight-recorder/rank0.pickle.gz"),
    _file("RAS", "logs {}", DATA / "ras/several.txt"),
    _file("RAS JSON", "logs {}", DATA / "ras/mismatch.json"),
    _file("inspector", "logs {}", "made/inspector.jsonl"),
    _file("nccl-tests", "logs {} --tables", _TABLE),
    _file("compare nccl-tests", f"compare {{}} {_TABLE}", _TABLE),
    _file("compare CSV", f"compare {{}} {_ROWS}", _ROWS),
    _file(
        "hosts",
        "launch --torchrun --hosts {} --gpus-per-node 8 -- train gpt2-1.5b",
        "made/hosts.txt",
    ),
    _file(
        "matrix",
        "comm alltoallv --matrix {} --nproc 2 --dry-run --device cpu",
        "made/matrix.txt",
    ),
    _file(
        "text file",
        "train gpt2-124m --scale tiny --text-file {} --dry-run --device cpu",
        "made/text.txt",
    ),
    _run("runs list", "runs list", _SMALL_RUN, "run.json"),
    _run("runs show", "runs show {}", _SMALL_RUN, "records.jsonl"),
    _run("runs sql", "runs sql --csv - select.*.from.records", _SMALL_RUN, "records.jsonl"),
    _run("runs export", "runs export {} out.csv --to csv", _SMALL_RUN, "records.jsonl"),
    _run("compare runs", "compare {} {}", _SMALL_RUN, "records.jsonl"),
    _run("report", "report {}", _RUN, "records.jsonl"),
    _run("report, run.json", "report {}", _RUN, "run.json"),
    _run("report, ledgers", "report {}", _RUN, "ledgers.json"),
    _run("report, prediction", "report {}", _RUN, "prediction.json"),
    _run("report, hash", "report {}", _RUN, "prediction.sha256"),
    _run("predict from run", "predict --from-run {}", _RUN, "records.jsonl"),
    _run(
        "predict beside run",
        "predict gpt2-1.5b --device h100-sxm --nproc 8",
        _RUN,
        "records.jsonl",
    ),
    _run(
        "calibration",
        "predict gpt2-1.5b --device h100-sxm --nproc 8 --calibration {}",
        _RUN,
        "records.jsonl",
    ),
    _run("resume", "resume {}", _RUN, "plan.jsonl"),
    _run("samples", "runs show {}", _SAMPLES, _NPY),
    _run(
        "replay spans", "trace breakdown {}", _RUN, "traces/replay-b9378ac2d1833d9c-launch1.npy"
    ),
    _run(
        "sweep",
        "sweep --resume runs/{} --dry-run",
        RESULTS / "h200-x4-sweep-tuned",
        "sweep.json",
    ),
)


# Hostile content, of the bytes of a valid file


def _deep(levels: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return opening * levels + b"1" + closing * levels


_LEVELS = (60, 200, 900, 5000, 100_000)
_VALUE = re.compile(
    rb'(?<=[:\[,])\s*(?:-?\d[\d.eE+-]*|"[^"\n]{0,200}"|true|false|null)(?=\s*[,\]}])'
)
_NUMBER = re.compile(rb"(?<![\w.])-?\d+(?:\.\d+)?(?![\w.])")
_NUMBERS = (
    *(b"1e400", b"1" + b"0" * 5000, b"NaN", b"Infinity", b"-1", b"-Infinity", b"0", b"1e-320"),
    *(b"-1" + b"0" * 30, b"18446744073709551616", b"9223372036854775807", b"1e308", b"0.5"),
)
_TOP = (
    b"[]",
    b"{}",
    b"null",
    b"0",
    b'""',
    b"true",
    b"[[]]",
    b"[null]",
    b'[{"a":[]}]',
    b"\n",
    b"-",
)
_KEYS = (b"[]", b"{}", b"null", b"0", b'"x"', b"true", b'""', b"[[]]", b"[null]", b'{"a":1}')


def _replace(data: bytes, pattern: re.Pattern[bytes], new: bytes, random: Random) -> bytes:
    """Put `new` in place of one match, or at a random place where there is none."""
    matches = list(pattern.finditer(data)) or [None]
    match = random.choice(matches)
    start, end = match.span() if match else (random.randrange(len(data) + 1),) * 2
    return data[:start] + new + data[end:]


def _insert(data: bytes, new: bytes, random: Random) -> bytes:
    place = random.randrange(len(data) + 1)
    return data[:place] + new + data[place:]


def _nested_value(data: bytes, random: Random) -> bytes:
    pair = random.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return _replace(data, _VALUE, _deep(random.choice(_LEVELS), *pair), random)


def _nested(_: bytes, random: Random) -> bytes:
    levels = random.choice(_LEVELS)
    return random.choice((_deep(levels), _deep(levels, b'{"a":', b"}"), b"[" * levels))


_REPEATED = (
    *(
        b" ",
        b"\t",
        b"1",
        b"#",
        b"# ",
        b"\r",
        b":",
        b"-",
        b"\\",
        b"\x1b[",
        b"a ",
        b"\n ",
        b"(",
        b"{\n",
    ),
    *(
        b"NCCL INFO ",
        b"0x1 ",
        b"a:1:1 ",
        b"[0] ",
        b"1.0,",
        b"\n1 2 float sum ",
        b'{"a":1}\n',
        b"|",
    ),
)


def _flipped(data: bytes, random: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(random.randint(1, 20)):
        if changed:
            changed[random.randrange(len(changed))] = random.randrange(256)
    return bytes(changed)


@cache
def _bomb(piece: bytes) -> bytes:
    """Return 400 MB of a piece as gzip: members of 1 MB, one after the other."""
    return gzip.compress((piece * (2**20 // len(piece) + 1))[: 2**20], 9) * 400


_PIECES = (b"\0", b"\n", b" ", b"[", b"0 ", b"NCCL INFO ")


def _gzip_bomb(_: bytes, random: Random) -> bytes:
    return _bomb(random.choice(_PIECES))


def _bomb_inside(data: bytes, random: Random) -> bytes:
    place = random.randrange(len(data) + 1)
    first, last = (gzip.compress(part) for part in (data[:place], data[place:]))
    return first + _bomb(random.choice(_PIECES)) + last


def _cut_gzip(data: bytes, random: Random) -> bytes:
    packed = gzip.compress(data)
    return packed[: random.randrange(2, len(packed))]


def _shared(kind: Callable[[object], object], levels: int = 40) -> object:
    value: object = {"a": 1}
    for _ in range(levels):
        value = kind(value)
    return value


def _pickle(_: bytes, random: Random) -> bytes:
    endless: list[object] = []
    endless.append(endless)
    number = random.choice((10**5000, -1, 2**64, float("nan"), float("inf")))
    value = random.choice(
        (
            _shared(lambda part: {"a": part, "b": part}),
            _shared(lambda part: [part, part]),
            _shared(lambda part: (part, part)),
            _shared(lambda part: [part], 300),
            *(endless, number, None, 0, [], "x", [None]),
        )
    )
    key = random.choice(("entries", "pg_config", "pg_status", "version", "rank"))
    field = random.choice(("profiling_name", "input_sizes", "frames", "pg_id", "process_group"))
    entries = [{field: value, "pg_id": 0}] if random.random() < 0.5 else []
    document = {"version": "2.10", "pg_config": {}, "entries": entries}
    if not entries:
        document[key] = value
    keys = b"\x80\x04}(K\x01K\x02\x86\x94" + b"".join(
        b"h%ch%c\x86\x94" % (n, n) for n in range(40)
    )
    return random.choice((pickle.dumps(document), pickle.dumps(document), keys + b"Nu."))


def _npy(_: bytes, random: Random) -> bytes:
    shape = random.choice(
        ("(1000000000000,)", "(-1,)", "(2, 1000000000)", "()", "(0, 0)", "(1" * 3000)
    )
    kind = random.choice(("<f8", "|O", "<U100000000", "<i8", "V0"))
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + b"\0" * 64


def _cut(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data) + 1)]


CONTENTS: dict[str, Callable[[bytes, Random], bytes]] = {
    "empty": lambda *_: b"",
    "top level": lambda _, random: random.choice(_TOP),
    "nested": _nested,
    "nested value": _nested_value,
    "other value": lambda data, random: _replace(data, _VALUE, random.choice(_KEYS), random),
    "number": lambda data, random: _replace(data, _NUMBER, random.choice(_NUMBERS), random),
    "no UTF-8": lambda data, random: _insert(data, b"\xff\xc3\xed\xa0\x80", random),
    "zeros": lambda data, random: _insert(data, b"\0" * random.choice((1, 100_000)), random),
    "long line": lambda data, random: _insert(data, b"x" * 4_000_000, random),
    "columns": lambda data, random: _insert(data, b"1," * 1_000_000, random),
    "words": lambda data, random: _insert(data, b"0 " * 1_000_000, random),
    "empty lines": lambda data, random: _insert(data, b"\n" * 1_000_000, random),
    "repeated": lambda data, random: _insert(data, random.choice(_REPEATED) * 100_000, random),
    "quotes": lambda data, random: _insert(data, b'"' * random.choice((1, 300_001)), random),
    "brackets": lambda data, random: _insert(data, b"{[" * 200_000, random),
    "flipped": _flipped,
    "cut": _cut,
    "gzip bomb": _gzip_bomb,
    "bomb inside": _bomb_inside,
    "cut gzip": _cut_gzip,
    "pickle": _pickle,
    "npy": _npy,
}


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def _unreadable(path: Path) -> None:
    path.write_bytes(b"{}")
    path.chmod(0)


PLACES: dict[str, Callable[[Path], None]] = {
    "pipe": _fifo,
    "/dev/zero": _link("/dev/zero"),
    "/dev/tty": _link("/dev/tty"),
    "/dev/null": _link("/dev/null"),
    "folder": lambda path: path.mkdir(),
    "loop of links": lambda path: path.symlink_to(path.name),
    "no such file": _link("nowhere"),
    "unreadable": _unreadable,
    "socket": lambda path: os.mknod(path, 0o140600),
}
KINDS = (*CONTENTS, *PLACES)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended. fault: "" where all is as it must be."""

    reader: str
    kind: str
    code: int
    cpu_s: float
    added_mb: float
    fault: str


def inputs(seed: int, count: int, name: str = "") -> Iterator[tuple[int, Reader, str]]:
    """Yield (seed, reader, kind of input): each reader in turn, with kinds in a drawn order."""
    random = Random(seed)
    readers = [reader for reader in READERS if name in reader.name]
    kinds: dict[str, list[str]] = {}
    for number in range(count):
        reader = readers[number % len(readers)]
        if not kinds.get(reader.name):
            kinds[reader.name] = random.sample(KINDS, len(KINDS))
        yield random.randrange(2**32), reader, kinds[reader.name].pop()


def make(reader: Reader, kind: str, seed: int, folder: Path) -> None:
    """Write the files of a reader, with a hostile one in place of its target."""
    for name, source in reader.files.items():
        copy, path = folder / name, Path(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, copy)
        elif not path.exists():
            copy.write_bytes(_made(path.name))
        else:
            data = path.read_bytes()
            copy.write_bytes(gzip.decompress(data) if path.suffix == ".gz" else data)
    target = folder / reader.target
    valid = target.read_bytes()
    target.unlink()
    if kind in PLACES:
        PLACES[kind](target)
    else:
        target.write_bytes(CONTENTS[kind](valid, Random(seed)))


@cache
def _made(name: str) -> bytes:
    """Return a valid file that no folder has."""
    if name == "w.json":
        words = "workload generate --model llama-3.1-8b --tp 2 --world-size 8"
        with tempfile.TemporaryDirectory() as folder:
            _end_of(f"{words} -o w.json", Path(folder))
            return (Path(folder) / name).read_bytes()
    return {
        "hosts.txt": b"node-1\nnode-2 slots=8\n",
        "matrix.txt": b"0 1024\n2048 0\n",
        "text.txt": b"The quick brown fox jumps over the lazy dog.\n" * 400,
        "inspector.jsonl": _INSPECTOR * 20,
    }[name]


_INSPECTOR = (
    b'{"header":{"id":"0x9e4a479c","rank":0,"n_ranks":2,"nnodes":1},"metadata":'
    b'{"inspector_output_format_version":"v4.0","hostname":"a","pid":1},"coll_perf":{"coll":'
    b'"AllReduce","coll_sn":1,"coll_msg_size_bytes":65536,"coll_exec_time_us":61974,'
    b'"coll_timing_source":"kernel_gpu","coll_algobw_gbs":0.3,"coll_busbw_gbs":0.5}}\n'
)


def _end_of(words: str, folder: Path) -> tuple[int, float, float]:
    """Run a command in a fork; return (wait status or -1, CPU time, MB of memory)."""
    pid = os.fork()
    if pid == 0:
        _be_command(
            [
                word.replace(".", " ") if word.startswith("select.") else word
                for word in words.split()
            ],
            folder,
        )
    end_s = time.monotonic() + MAX_WALL_S
    while True:
        ended, code, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return code, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3
        used_s = _cpu_s(pid)
        if time.monotonic() > end_s or used_s > 5 * MAX_CPU_S:
            os.killpg(pid, signal.SIGKILL)
            os.wait4(pid, 0)
            return -1, used_s, 0.0
        time.sleep(0.01)


@cache
def _base_mb() -> float:
    with tempfile.TemporaryDirectory() as folder:
        return _end_of("--version", Path(folder))[2]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _be_command(words: list[str], folder: Path) -> None:
    """Run a command line of stepmark as a program. Never returns."""
    code = 70
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        for number, name in enumerate(("/dev/null", "stdout", "stderr")):
            flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT
            os.dup2(os.open(name, flags), number)
        sys.stderr = io.TextIOWrapper(
            io.FileIO(2, "w", closefd=False), errors="backslashreplace"
        )
        sys.argv = ["stepmark", *words]
        streams.check()
        code = status(words)
    except BaseException:  # noqa: BLE001  as the interpreter ends a program
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(seed: int, reader: Reader, kind: str) -> Outcome:
    """Run a reader on one hostile input."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(reader, kind, seed, folder)
        code, cpu_s, memory_mb = _end_of(reader.words, folder)
        added_mb = memory_mb - _base_mb()
        error = (folder / "stderr").read_text(errors="replace") if code != -1 else ""
        fault = _fault(code, cpu_s, added_mb, error)
    code = os.waitstatus_to_exitcode(code) if code >= 0 else code
    return Outcome(reader.name, kind, code, cpu_s, added_mb, fault)


def _fault(code: int, cpu_s: float, added_mb: float, error: str) -> str:
    """Return what is wrong with the end of a command; "" if nothing."""
    if code == -1:
        return f"it does not end, after {cpu_s:.1f} s of CPU time"
    exit_code = os.waitstatus_to_exitcode(code)  # of a signal: below 0
    last = (error.strip().splitlines() or [""])[-1]
    is_sentence = re.match(r"stepmark: .+[.?!)]$", last)
    faults = {
        f"a traceback: {last[:300]}": "Traceback (most" in error,
        f"exit code {exit_code}: {last[:200]}": exit_code not in (0, 1, 2, 3),
        f"{cpu_s:.1f} s of CPU time": cpu_s > MAX_CPU_S,
        f"{added_mb:.0f} MB": added_mb > MAX_MB,
        f"no sentence: {last[:200]!r}": exit_code == 2 and not is_sentence,
        "a message of many characters": len(last) > _MAX_MESSAGE,
    }
    return next((text for text, is_wrong in faults.items() if is_wrong), "")


def preload() -> None:
    """Import all but what imports torch, so that a fork's time is that of its reader."""
    importlib.import_module("duckdb")
    for module in pkgutil.walk_packages(stepmark.__path__, "stepmark."):
        is_bench = {"bench", "training", "capture", "watch_site"} & set(module.name.split("."))
        if not is_bench and not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def main() -> int:
    """Print faults and counts. Returns 1 if there are faults."""
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    preload()
    outcomes = []
    for each, reader, kind in inputs(seed, count, *sys.argv[3:]):
        outcome = run(each, reader, kind)
        outcomes.append(outcome)
        if outcome.fault:
            sys.stdout.write(f"{reader.name}, {kind}, seed {each}: {outcome.fault}\n")
            sys.stdout.flush()
    for name, counts in (
        ("reader", Counter(outcome.reader for outcome in outcomes)),
        ("kind", Counter(outcome.kind for outcome in outcomes)),
        ("exit code", Counter(str(outcome.code) for outcome in outcomes)),
    ):
        parts = (f"{key} {number}" for key, number in counts.items())
        sys.stdout.write(f"inputs by {name}: {', '.join(parts)}\n")
    faults = sum(bool(outcome.fault) for outcome in outcomes)
    most_s = max(outcome.cpu_s for outcome in outcomes)
    most_mb = max(outcome.added_mb for outcome in outcomes)
    most = f"at most {most_s:.2f} s, {most_mb:.0f} MB"
    sys.stdout.write(f"seed {seed}: {count} inputs, {faults} faults; {most}\n")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
