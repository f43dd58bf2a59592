"""The same parameters given to AICB and to stepmark: rows are equal but for AICB's errors."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from stepmark.cli.main import status

from .aicb_corrected import JOBS, Job, command
from .aicb_samples import SIMAI, content, name_of

Message = tuple[str, int]
Generate = Callable[[str], str]
NONE: Message = ("NONE", 0)


class Row(NamedTuple):
    """Messages of a row's three passes; times are not compared."""

    name: str
    fwd: Message = NONE
    dgrad: Message = NONE
    wgrad: Message = NONE


def rows_of(text: str) -> list[Row]:
    found = []
    for line in text.splitlines()[2:]:
        name, _, *fields = line.split()
        messages = [
            (fields[place + 1], int(fields[place + 2])) if fields[place + 1] != "NONE" else NONE
            for place in (0, 3, 6)
        ]
        found.append(Row(name, *messages))
    return found


def corrected(theirs: list[Row], job: Job) -> list[Row]:
    """What AICB would have written without its errors."""
    names = [row.name for row in theirs]
    first = names.index("embedding_layer")
    last = names.index("cross_entropy1")
    losses, step = theirs[last : last + 3], theirs[last + 3 :]
    found = before(job)
    for row in theirs[first:last]:
        if row.name == "embedding_layer" and row is not theirs[first]:
            found += losses if job.pp == 1 else []
        found += of_layer(row, job)
    found += losses if job.pp == 1 else []
    return [*found, *after(step, job)]


def before(job: Job) -> list[Row]:
    """Parameters are counted right, with the loss's sum over data-parallel ranks as a row.

    AICB counts a table four times, and makes an all-reduce of all parameters for the norms.
    """
    if job.dp == 1:
        return []
    params = job.body + job.table
    loss = [Row("loss", wgrad=("ALLREDUCE", 8))] if job.pp == 1 else []
    return [
        Row("grad_gather", wgrad=("ALLGATHER", 2 * params)),
        *loss,
        Row("grad_param_comm", wgrad=("REDUCESCATTER", 4 * params)),
    ]


def of_layer(row: Row, job: Job) -> list[Row]:
    full = job.activation
    whole = row._replace(dgrad=row.fwd)
    if row.name == "embedding_norm":  # an all-reduce of the vocabulary, which there is not
        head = Row("final_column", dgrad=("ALLREDUCE", full))
        return [head] if job.pp == 1 else []
    if row.name == "final_column":
        assert job.sequence_parallel
        assert job.pp > 1  # the head is the last stage's
        return []
    if row.name == "embedding_layer":
        gather = ("ALLGATHER", full) if job.sequence_parallel else NONE
        return [Row(row.name, ("ALLREDUCE", full), gather)]
    if row.name in ("attention_layer", "mlp_layer"):
        return [whole]
    assert job.sequence_parallel
    if row.name.endswith("_row"):
        return [row._replace(dgrad=("ALLGATHER", row.fwd[1]))]
    assert row.name.endswith("_column")
    size = row.fwd[1]
    again = Row(row.name, dgrad=("ALLGATHER", size))  # of the input, for the weights' gradient
    return [row._replace(dgrad=("REDUCESCATTER", size)), again]


def after(theirs: list[Row], job: Job) -> list[Row]:
    """AICB always has four sums over tp; three, with all ranks in tp four, are Megatron's."""
    assert [row.fwd for row in theirs] == [("ALLREDUCE", 4)] * 4
    if job.pp > 1:
        norms = Row("gradients_norms", ("ALLREDUCE", 4 * job.norms))
        return [norms, Row("optimizer1")]
    return theirs if job.tp == job.world else theirs[:3]


@pytest.fixture(scope="module")
def generate(tmp_path_factory: pytest.TempPathFactory) -> Generate:
    folder = tmp_path_factory.mktemp("simai")

    def made(job: str) -> str:
        path = folder / f"{job}.txt"
        file = "experts" if job.startswith("mixtral") else "mocked"
        words = [*command(job, file), "--to", "simai", "-o", str(path)]
        if not path.exists():
            assert status(["workload", "generate", *words]) == 0
        return path.read_text()

    return made


@pytest.mark.parametrize(
    "path", [path for path in SIMAI if path.parent.name in JOBS], ids=name_of
)
def test_rows_are_aicbs_but_for_its_errors(path: Path, generate: Generate) -> None:
    job = JOBS[path.parent.name]
    theirs = rows_of(content(path).decode())
    if "no_aiob" not in path.name and job.pp == 1:  # AICB's head row is in the other file
        last = [row.name for row in theirs].index("cross_entropy1")
        theirs = with_heads(theirs[:last]) + theirs[last:]
    ours = rows_of(generate(path.parent.name))
    wanted = corrected(theirs, job)
    for number, (here, there) in enumerate(zip(ours, wanted, strict=False), start=3):
        assert here == there, f"line {number}"
    assert len(ours) == len(wanted)


def with_heads(rows: list[Row]) -> list[Row]:
    """embedding_norm at the end of each micro-batch, as AICB writes without a profile."""
    found: list[Row] = []
    for row in rows:
        if row.name == "embedding_layer" and any(one.name == row.name for one in found):
            found.append(Row("embedding_norm"))
        found.append(row)
    return [*found, Row("embedding_norm")]


@pytest.mark.parametrize("job", JOBS)
def test_the_header_is_aicbs(job: str, generate: Generate) -> None:
    """But for vpp, where AICB has the layers of a stage, and for a float."""
    (path,) = (path for path in SIMAI if path.parent.name == job and "no_aiob" in path.name)
    theirs, ours = (
        text.splitlines()[0].split() for text in (content(path).decode(), generate(job))
    )
    there = theirs.index("vpp:") + 1
    assert (theirs[there], ours[there]) == (str(JOBS[job].layers), "1")
    theirs[there] = "1"
    assert [word.removesuffix(".0") for word in theirs] == ours


def test_an_expert_layer_sends_what_aicbs_does(generate: Generate) -> None:
    """But for the counts, which AICB gathers in the wrong group, and probabilities."""
    job, layers, microbatches = "mixtral_tp2_ep4_w32_gbs32", 4, 2
    (path,) = (path for path in SIMAI if path.parent.name == job)
    theirs, ours = (
        [row for row in rows_of(text) if row.name == "mlp_moelayer"]
        for text in (content(path).decode(), generate(job))
    )
    counts = Row("mlp_moelayer", ("ALLGATHER", 2 * 4 * 8 * 2))
    routed = 2048 // 2 * 2  # tokens of a rank, each to two experts
    sizes = {2 * routed, 2 * routed * 2}
    assert [row for row in theirs if row != counts] == [
        row for row in ours if row.fwd[1] not in sizes
    ]
    assert theirs.count(counts) == layers * microbatches
    assert len(ours) - len(theirs) == layers * microbatches  # two rows more, one less
