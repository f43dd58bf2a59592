"""The same parameters given to AICB and to stepmark: equal but for AICB's listed errors."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stepmark.cli.main import status

from .aicb_corrected import JOBS, command, corrected, lines_of
from .aicb_samples import DATA, MOCKED, content, name_of

Generate = Callable[[str], str]


@pytest.fixture(scope="module")
def generate(tmp_path_factory: pytest.TempPathFactory) -> Generate:
    """The CSV that stepmark workload generate writes for a job with AICB's own parameters."""
    folder = tmp_path_factory.mktemp("csv")

    def made(job: str) -> str:
        path = folder / f"{job}.csv"
        file = "experts" if job.startswith("mixtral") else "mocked"
        words = [*command(job, file), "--to", "aicb", "-o", str(path)]
        if not path.exists():
            assert status(["workload", "generate", *words]) == 0
        return path.read_text()

    return made


@pytest.mark.parametrize(
    "path", [path for path in MOCKED if path.parent.name in JOBS], ids=name_of
)
def test_lines_are_aicbs_but_for_its_errors(path: Path, generate: Generate) -> None:
    job, computation = path.parent.name, "comp" in path.name
    theirs = lines_of(content(path).decode(), computation=computation)
    ours = lines_of(generate(job), computation=computation)
    wanted = corrected(theirs, JOBS[job], computation=computation)
    for number, (here, there) in enumerate(zip(ours, wanted, strict=False)):
        assert here == there, f"line {number}"
    assert len(ours) == len(wanted)
    assert ours != theirs


def test_an_expert_layer_sends_what_aicbs_does(generate: Generate) -> None:
    """Forward. AICB counts routed tokens as 2 bytes among ep ranks, where Megatron-LM gathers
    int64 over ep and tp, and sends no probabilities; its backward pass has nothing at all."""
    job = "mixtral_tp2_ep4_w32_gbs32"
    text = content(DATA / job / "experts.csv.gz").decode()
    theirs = [line for line in lines_of(text, computation=False) if ".MoE" in line.stage]
    tp, ep, experts, top_k, tokens, layers, microbatches = 2, 4, 8, 2, 2048, 4, 2
    preprocess, dispatch, gather, scatter, combine = theirs[:5]
    assert theirs == theirs[:5] * layers * microbatches
    assert int(preprocess.of) == 2 * ep * experts * tp
    probabilities = tokens // tp * top_k * 2
    group = {"group": "ep_tp_group", "size": str(ep * tp)}
    of_ep = dispatch._replace(size=str(ep))
    of_tp = gather._replace(size=str(tp))
    wanted = [
        preprocess._replace(**group, of=str(8 * ep * experts * tp)),
        of_ep,
        of_ep._replace(of=str(probabilities)),
        of_tp,
        of_tp._replace(of=str(probabilities * tp)),
        scatter._replace(size=str(tp)),
        combine._replace(size=str(ep)),
    ]
    ours = lines_of(generate(job), computation=False)
    forward = [line for line in ours if line.stage.startswith("forward.mlp.")]
    assert len(forward) == len(wanted) * layers * microbatches
    for line, there in zip(forward, wanted * layers * microbatches, strict=True):
        assert line[:4] == there[:4]
    backward = [line for line in ours if line.stage.startswith("backward.mlp.")]
    assert sorted(line.of for line in backward if line.kind == "all_to_all") == sorted(
        line.of for line in forward if line.kind == "all_to_all"
    )
