"""Whether Hugging Face configurations are read as transformers builds their models.

    python validation/hugging_face_models.py [FILE ...]          # which are read, which exactly
    python validation/hugging_face_models.py --names [FILE ...]  # names of those read exactly

A FILE is one of tests/data/hugging-face/*.jsonl, or one like them, whose counts
validation/hugging_face_truth.py made. held-out.jsonl has 30 lines, drawn by a seed: what reads
configurations was not written for them. A configuration is read exactly if its parameters,
those of a token and its products with weights are transformers'. Attention's scores are
compared, too, and named where they differ.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src")]

from stepmark.cases import flops  # noqa: E402
from stepmark.ground.errors import ConfigError  # noqa: E402
from stepmark.model.model import ModelConfig  # noqa: E402
from stepmark.model.scans import scan_flops  # noqa: E402
from stepmark.workloads.formats.huggingface.config import read_config  # noqa: E402

DATA = ROOT / "tests" / "data" / "hugging-face"
FILES = (DATA / "configs.jsonl", DATA / "held-out.jsonl")

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """Return the configurations of a file."""
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def family(line: Line) -> str:
    """Return the model_type of the decoder."""
    config = line["config"]
    text = config.get("text_config") or {}
    return str(text.get("model_type") or config["model_type"])


def read(line: Line) -> ModelConfig:
    """Return stepmark's model of a line. Raise ConfigError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(line["config"]), encoding="utf-8")
        return read_config(path)


def wrong_counts(line: Line, model: ModelConfig) -> list[str]:
    """Return the counts that differ from transformers', with both values.

    stepmark counts DeepSeek-V3's biases of experts as parameters.
    """
    buffers = line["buffers"]
    counts = {
        "parameters": (model.num_params, line["parameters"] + buffers),
        "active parameters": (model.num_active_params, line["active_parameters"] + buffers),
        "products per token": (
            2 * model.num_active_matmul_params,
            line["matmul_flops_per_token"],
        ),
    }
    return [
        f"{name} {ours:,} for {theirs:,}"
        for name, (ours, theirs) in counts.items()
        if ours != theirs
    ]


def wrong_scores(line: Line, model: ModelConfig) -> list[str]:
    """Return attention's scores per token if they differ from transformers', with both values.

    stepmark leaves out half of the diagonal of a mask: half a key of each query at most.
    """
    if line["score_flops"] is None:
        return []
    tokens = line["tokens"]
    at_length = replace(model, seq_len=tokens)
    ours = sum(
        count * (flops.scores(at_length, layer) - scan_flops(at_length, layer))
        for layer, count in Counter(at_length.layers).items()
    )
    theirs = line["score_flops"] / tokens
    if theirs - 0.5 * line["score_flops_per_key"] - 1 <= ours <= theirs + 1:
        return []
    return [f"scores per token {ours:,.0f} for {theirs:,.0f}"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a line is read."""

    line: Line
    model: ModelConfig | None = None
    refusal: str = ""  # the sentence, without the file
    wrong: tuple[str, ...] = ()
    wrong_scores: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        if self.model is None:
            return "refused"
        return "WRONG" if self.wrong else "exact"


def judge(line: Line) -> Verdict:
    """Read a line and compare it."""
    try:
        model = read(line)
    except ConfigError as error:
        sentence = re.sub(r"\S*/config\.json: ", "", str(error))
        return Verdict(line=line, refusal=sentence)
    return Verdict(
        line=line,
        model=model,
        wrong=tuple(wrong_counts(line, model)),
        wrong_scores=tuple(wrong_scores(line, model)),
    )


def table(verdicts: list[Verdict]) -> Iterator[str]:
    """Yield how lines are read: the counts, families, and each that is not exact."""
    kinds = Counter(verdict.kind for verdict in verdicts)
    inexact = sum(bool(verdict.wrong_scores) for verdict in verdicts)
    yield (
        f"{kinds['exact']} exact, {kinds['refused']} refused and {kinds['WRONG']} WRONG of "
        f"{len(verdicts)} configurations; attention's scores of {inexact} read ones differ"
    )
    families: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        families[family(verdict.line)].append(verdict)
    yield f"\n{'family':24}{'exact':>8}{'refused':>8}{'WRONG':>8}"
    for name, members in sorted(families.items()):
        kinds = Counter(verdict.kind for verdict in members)
        row = "".join(f"{kinds[kind]:8}" for kind in ("exact", "refused", "WRONG"))
        yield f"{name:24}{row}"
    yield ""
    for verdict in verdicts:
        for text in (verdict.refusal, *verdict.wrong, *verdict.wrong_scores):
            if text:
                kind = "exact but" if verdict.kind == "exact" else verdict.kind
                yield f"{verdict.line['name']}: {kind}: {text}"


def main() -> int:
    """Print how the lines of files are read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, default=FILES)
    parser.add_argument("--names", action="store_true")
    options = parser.parse_args()
    verdicts = [judge(line) for path in options.files for line in read_lines(path)]
    exact = (verdict.line["name"] for verdict in verdicts if verdict.kind == "exact")
    print("\n".join(exact if options.names else table(verdicts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
