"""Published configurations of five kinds that `--config` accepts, and `train` trains.

    python validation/framework_files.py draw CLONES    # 20 of each kind, by a seed
    python validation/framework_files.py                # which are accepted, which trained
    python validation/framework_files.py written 200    # layouts, written and read again

CLONES has a git repository per owner+name (bare, with its history for torchtitan). The files
are kept as their keys and values, with their source, in validation/data/framework-files.jsonl.
A file is accepted if it generates a workload, with --model where it names none, --vocab-size
where it leaves that to a tokenizer, --dtype where it leaves that to a trainer, and a number of
ranks that its batch divides by. `written` draws layouts as the test of round trips does
(tests/framework_files/test_round_trips.py), until there are so many steps for each framework.
A file is trained if `train` plans its step for H200, with --precision for --dtype, and beside
Llama 3.1 8B where a model or its vocabulary is left open.
"""

import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepmark.framework_files import configuration, shell
from stepmark.framework_files.table import Translation
from stepmark.framework_files.yaml_text import read_yaml
from stepmark.ground.errors import ConfigError
from stepmark.measuring.machine import machine
from stepmark.training import train
from stepmark.training.train_options import TrainOptions
from stepmark.workloads import workload_flags
from stepmark.workloads.formats import FORMATS
from stepmark.workloads.workload import generate

DATA = Path(__file__).parent / "data" / "framework-files.jsonl"
SEED = 20261130
EACH = 20
_TRAINERS = (
    *("hiyouga/LLaMA-Factory", "axolotl-ai-cloud/axolotl", "huggingface/trl"),
    *("deepspeedai/DeepSpeedExamples", "huggingface/accelerate"),
)
# What flags give where a file leaves it to a trainer.
_ANSWERS: dict[str, Any] = {"dtype": "bf16", "mbs": 1}
_TITAN = "pytorch/torchtitan"
# torchtitan's layouts of four dates; the last one is the last with TOML.
_COMMITS = (
    *("9810191bbb0385d8ac91cd31abbc7f4156a0d462^", "before=2025-10-01"),
    *("before=2025-06-01", "before=2024-12-01"),
)


@dataclass(frozen=True, kw_only=True)
class Population:
    """Files to draw from: pattern of the path, and of what the text has."""

    repos: tuple[str, ...]
    path: str
    text: str
    commits: tuple[str, ...] = ("HEAD",)


POPULATIONS = {
    "megatron": Population(
        repos=("NVIDIA/Megatron-LM",),
        path=r"(test_cases/(gpt|moe|mixtral)/.*model_config\.yaml|examples/.*\.sh)$",
        text=r"--num-layers[\s\S]*--train-(iters|samples)|"
        r"--train-(iters|samples)[\s\S]*--num-layers",
    ),
    "nemo": Population(
        repos=("NVIDIA/NeMo-Framework-Launcher", "NVIDIA-NeMo/Megatron-Bridge"),
        path=r"(conf/training/(gpt3|llama|mistral|mixtral|qwen2|gemma|nemotron|falcon)/.*"
        r"|/conf/.*example)\.yaml$",
        text=r"(?m)^(model|train|trainer):",
    ),
    "torchtitan": Population(
        repos=(_TITAN,), path=r"\.toml$", text=r"(?m)^\[training\]", commits=_COMMITS
    ),
    "deepspeed": Population(
        repos=_TRAINERS,
        path=r"^(?!.*(/tests?/|^tests/|compression|inference)).*\.json$",
        text=r'"(zero_optimization|train_micro_batch_size_per_gpu|train_batch_size)"',
    ),
    "accelerate": Population(
        repos=_TRAINERS,
        path=r"^(?!.*(/tests?/|^tests/)).*\.ya?ml$",
        text=r"(?m)^distributed_type:",
    ),
}


def _git(repo: Path, *words: str) -> str:
    command = ["git", "-C", str(repo), *words]
    done = subprocess.run(command, check=False, capture_output=True)
    return done.stdout.decode(errors="replace")  # "" for a file that a clone lacks


def files_of(population: Population, clones: Path) -> Iterator[dict[str, str]]:
    """Yield the files of a population, each content once."""
    contents = set()
    for name in population.repos:
        repo = next(clones.glob(f"{name.replace('/', '+')}*"))
        repo = repo / "repo" if (repo / "repo").is_dir() else repo
        for wanted in population.commits:
            more = ["--" + wanted] if wanted.startswith("before") else [wanted]
            commit = _git(repo, "log", "-1", "--format=%H", *more).strip()
            for path in _git(repo, "ls-tree", "-r", commit, "--name-only").splitlines():
                if not re.search(population.path, path):
                    continue
                text = _git(repo, "show", f"{commit}:{path}")
                if len(text) > 2**18 or text in contents:
                    continue
                if re.search(population.text, text) and _is_readable(path, text):
                    contents.add(text)
                    yield {"repo": name, "commit": commit, "path": path, "text": text}


def _is_readable(path: str, text: str) -> bool:
    """Return whether a file is of its format, which templates with placeholders are not."""
    try:
        return bool(_keys(path, text))
    except ValueError:
        return False


def draw(clones: Path) -> None:
    """Draw files by the seed, and write their keys and values with their source."""
    rows = []
    for kind, population in POPULATIONS.items():
        files = sorted(
            files_of(population, clones), key=lambda file: (file["repo"], file["path"])
        )
        chosen = random.Random(SEED).sample(files, min(EACH, len(files)))
        print(f"{kind}: {len(chosen)} of {len(files)}")
        for file in chosen:
            text = _keys(file["path"], file["text"])
            rows.append(
                {"kind": kind, **file, "text": text, "companion": _companion(clones, file)}
            )
    DATA.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _companion(clones: Path, file: dict[str, str]) -> str:
    """Return the DeepSpeed file that an accelerate file names; "" where it names none."""
    named = re.search(r"deepspeed_config_file: *(\S+)", file["text"])
    if named is None:
        return ""
    repo = next(clones.glob(f"{file['repo'].replace('/', '+')}*")) / "repo"
    folder = Path(file["path"]).parent
    for place in (folder / named[1], folder / Path(named[1]).name):
        path = os.path.normpath(place)
        if text := _git(repo, "show", f"{file['commit']}:{path}"):
            return json.dumps(json.loads(text))
    return ""


def _keys(path: str, text: str) -> str:
    """Return a file's keys and values without its comments and prose."""
    if path.endswith(".sh"):
        return shlex.join(shell.training_words(text))
    if path.endswith(".toml"):
        return json.dumps(tomllib.loads(text))
    if path.endswith(".json"):
        return json.dumps(json.loads(text))
    return json.dumps(read_yaml(text, Path(path)), default=str)


def rows() -> list[dict[str, str]]:
    """Return the files that were drawn."""
    return [json.loads(line) for line in DATA.read_text().splitlines()]


def _write(row: dict[str, str], folder: Path) -> Path:
    """Write a file, and the DeepSpeed file that it names."""
    path = folder / ("file.sh" if row["path"].endswith(".sh") else "file.json")
    path.write_text(row["text"])
    if named := re.search(r'deepspeed_config_file": "([^"]+)"', row["text"]):
        (folder / Path(named[1]).name).write_text(row["companion"])
    return path


def refusal(row: dict[str, str], folder: Path) -> ConfigError | None:
    """Return why a file is refused; None: it is accepted."""
    path = _write(row, folder)
    try:
        file = configuration.read(str(path))
    except ConfigError as error:
        return error
    cls = workload_flags.options_class(file.framework, has_ignored=False)
    options: dict[str, Any] = {"config": str(path)}
    is_named = "num_layers" in file.options or "model" in file.options
    if not is_named:
        options["model"] = "llama-3.1-8b"
    elif "num_layers" in file.options and "vocab_size" not in file.options:
        options["vocab_size"] = 32000
    options |= {name: _ANSWERS[name] for name in file.requested}
    errors = []
    for ranks in _numbers_of_ranks(file):
        try:
            generate(cls(framework=file.framework, world_size=ranks, **options))
        except ConfigError as refused:
            errors.append(refused)
        else:
            return None
    return errors[0]


def _numbers_of_ranks(file: Translation) -> Iterator[int | None]:
    """Yield the file's own number of ranks, and multiples of its axes."""
    unit = math.prod(int(file.options.get(name, "1")) for name in ("tp", "pp", "cp"))
    yield None
    for power in range(11):
        yield unit * 2**power


def training_refusal(row: dict[str, str], folder: Path) -> ConfigError | None:
    """Return why `train` refuses a file that is accepted; None: it plans the step."""
    path = _write(row, folder)
    file = configuration.read(str(path))
    has_model = "model" in file.options or {"num_layers", "vocab_size"} <= file.options.keys()
    options = TrainOptions(
        models=() if has_model else ("llama-3.1-8b",),
        config=None if has_model else str(path),
        model=str(path) if has_model else None,
        mbs=(1,) if "mbs" in file.requested else None,
        device="h200",
    )
    if "dtype" in file.requested:
        precision: dict[str, Any] = {"precision": "amp"}
        options = replace(options, **precision)
    errors = []
    for ranks in _numbers_of_ranks(file):
        try:
            planned = replace(options, nproc=None if ranks is None else str(ranks))
            train.plan(planned, machine("h200", dry_run=True))
        except ConfigError as refused:
            errors.append(refused)
        else:
            return None
    return errors[0]


def count_written(framework: str, wanted: int, folder: Path) -> Counter[str]:
    """Return how many layouts are steps, can be written, and are the same when read again."""
    sys.path[:0] = [str(Path(__file__).parents[1])]
    from tests.framework_files import test_round_trips as trips  # noqa: PLC0415

    counts = Counter[str]()
    while counts["steps"] < wanted:
        step = trips.draw(framework, counts["drawn"])
        counts["drawn"] += 1
        if step is None:
            continue
        counts["steps"] += 1
        try:
            path = trips.written(step, framework, folder)
        except ConfigError:
            continue
        counts["written"] += 1
        options = {"config": str(path)} | trips.of_model(framework, step)
        again = trips.workload(framework, options)
        is_same = all(getattr(again, name) == getattr(step, name) for name in trips.PROGRAM)
        counts["the same again"] += is_same
        lost = list(FORMATS[trips.FRAMEWORKS[framework]].load().omissions(step, [0]))
        counts["lost a setting, and said so"] += not is_same and any("fuse" in x for x in lost)
    return counts


def main() -> None:
    """Draw, or print what is accepted and trained, or what is written."""
    if sys.argv[1:2] == ["draw"]:
        draw(Path(sys.argv[2]))
        return
    if sys.argv[1:2] == ["written"]:
        with tempfile.TemporaryDirectory() as folder:
            for framework in ("megatron", "pytorch", "deepspeed"):
                counts = count_written(framework, int(sys.argv[2]), Path(folder))
                print(
                    framework, *(f"{name} {count}" for name, count in counts.items()), sep=", "
                )
        return
    accepted, trained, total = Counter[str](), Counter[str](), Counter[str]()
    refused = []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows():
            total[row["kind"]] += 1
            error = refusal(row, Path(folder))
            accepted[row["kind"]] += error is None
            refusal_of_train = error or training_refusal(row, Path(folder))
            trained[row["kind"]] += refusal_of_train is None
            if refusal_of_train:
                verb = "" if error else "train: "
                reason = str(refusal_of_train).replace(folder, "").lstrip("/")
                refused.append(f"{row['repo']} {row['path']}: {verb}{reason}")
    for kind, count in total.items():
        print(f"{kind:<12} {accepted[kind]:>3} of {count}, {trained[kind]:>3} trained")
    sums = f"{accepted.total():>3} of {total.total()}, {trained.total():>3} trained"
    print(f"{'all':<12} {sums}")
    others = sum("family of models" in line and ": train: " not in line for line in refused)
    of_known = total.total() - others
    print(f"{'of families that are modelled':<12} {accepted.total():>3} of {of_known}")
    print(*refused, sep="\n")


if __name__ == "__main__":
    main()
