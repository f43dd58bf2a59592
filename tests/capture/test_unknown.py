"""Values that depend on weights or inputs: what they steer, and what they must not reach."""

import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.capture import unknown_sizes, unknown_spellings
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as fn

from stepmark.capture.run import capture
from stepmark.capture.watch import Watch
from stepmark.cli.main import status
from stepmark.ground.errors import ConfigError
from stepmark.step.workload import CommOp

FILE = unknown_sizes.__file__


def refusal(build: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        capture(build, 4, file=FILE, **options)
    return str(raised.value)


@pytest.mark.parametrize("name", unknown_sizes.USES)
def test_what_must_be_known_is_refused_with_the_line(name: str) -> None:
    text = refusal(unknown_sizes.build(name))
    assert "unknown_sizes.py:" in text
    line = int(text.partition("unknown_sizes.py:")[2].partition(" ")[0])
    lines = Path(FILE).read_text().splitlines()
    assert (
        name in lines[line - 1] or "value()" in lines[line - 1] or "torch." in lines[line - 1]
    )
    assert "a value that is unknown while captured" in text


@pytest.mark.parametrize("use", unknown_spellings.USES)
def test_every_spelling_of_a_size_is_refused_with_its_line(use: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        capture(unknown_spellings.build(use), 4, file=unknown_spellings.__file__)
    text = str(raised.value)
    assert f"unknown_spellings.py:{use.__code__.co_firstlineno} in" in text
    assert "a value that is unknown while captured" in text


@pytest.mark.parametrize(("use", "words"), unknown_spellings.OTHERS)
def test_errors_of_the_users_own_are_told_as_they_are(use: Any, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        capture(unknown_spellings.build(use), 4, file=unknown_spellings.__file__)
    assert words in str(raised.value)
    assert "unknown while captured" not in str(raised.value)


def test_a_loop_that_waits_for_a_value_is_refused() -> None:
    assert "bounds a loop" in refusal(unknown_sizes.waits, watch=Watch(2.0))


@pytest.mark.parametrize("build", [unknown_sizes.spins, unknown_sizes.sleeps])
def test_a_job_that_does_not_end_is_stopped_at_its_line(build: Any) -> None:
    start = time.monotonic()
    shown: list[str] = []
    text = refusal(build, watch=Watch(0.3, shown.append))
    assert "still runs after 0.3 s: see --timeout" in text
    assert "unknown_sizes.py:" in text
    assert time.monotonic() - start < 5


def test_the_command_line_limits_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["workload", "capture", f"{FILE}:sleeps", "--world-size", "4"]
    assert status([*command, "--timeout", "0.3s"]) == 2
    assert "the job still runs after 0.3 s: see --timeout" in capsys.readouterr().err


def test_a_job_that_blocks_in_native_code_is_ended(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text("sum(range(10**12))\n")  # a loop in C, which handles no signals
    program = (
        "from stepmark.capture import run, watch; watch.GRACE_S = 0.3;"
        f"run.capture_file({str(job)!r}, 4, watch=run.Watch(0.3, ends_process=True))"
    )
    start = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert ended.returncode == 1
    assert b'job.py", line 1 in <module>' in ended.stderr
    assert time.monotonic() - start < 50


def test_progress_names_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepmark.capture.watch.INTERVAL_S", 0.1)
    shown: list[str] = []
    refusal(unknown_sizes.sleeps, watch=Watch(0.35, shown.append))
    assert len(shown) >= 2
    assert "capturing rank 0: 2 operations, unknown_sizes.py:" in shown[0]


@pytest.mark.parametrize("name", unknown_sizes.DTYPES)
def test_errors_of_types_are_those_of_real_tensors(name: str) -> None:
    use = unknown_sizes.DTYPES[name]
    with pytest.raises((RuntimeError, IndexError)):
        use()
    assert "it raised " in refusal(lambda: use)


@pytest.mark.parametrize("name", unknown_sizes.BUFFERS)
def test_buffers_that_real_ranks_do_not_take_are_errors(name: str) -> None:
    text = refusal(lambda: unknown_sizes.BUFFERS[name])
    assert "it raised " in text
    assert any(word in text for word in ("buffers have", "do not divide", "do not fit", "size"))


@pytest.mark.parametrize("number", range(len(unknown_sizes.LEGAL)))
def test_types_that_real_tensors_may_mix_are_captured(number: int) -> None:
    unknown_sizes.LEGAL[number]()
    assert capture(lambda: unknown_sizes.LEGAL[number], 4).num_operations() > 0


def test_conditions_on_unknown_values() -> None:
    """As the note says."""
    conditions: list[bool] = []

    def step() -> None:
        x = nn.Linear(4, 4)(torch.ones(2, 4))
        number, count = x.sum().item(), (x > 0).sum().item()
        conditions.extend(
            map(bool, (number > 0, number <= 0, number, number != 0, -number < 1))
        )
        conditions.extend(
            map(bool, (count > 1, count == 1, count, (x > 0).any(), count + 1 > 1))
        )
        held = (
            math.isfinite(number),
            (x > 0).all(),
            torch.equal(x, x + 1),
            torch.isfinite(x).all(),
        )
        assert x.sum() > 0
        assert all(map(bool, held))
        assert not torch.isnan(x).any()
        assert math.isnan(float(x.sum()))
        assert f"{x.sum():.2f}" == "nan"
        for scaled in (x / count, count * x, x * count, 1 / (count + 1) * x, count / x):
            assert isinstance(scaled, torch.Tensor)
        assert f"{number:.2f} {count:d} {round(number, 2)}" == "nan unknown nan"

    made = capture(lambda: step, 4)
    assert conditions == [False] * 10
    assert sum("test_unknown.py:" in note for note in made.notes) == 1


def test_values_of_constants_are_real() -> None:
    """Through views, updates in place, masks, types, meshes and groups of one rank."""
    read: list[Any] = []

    def step() -> None:
        numbers = torch.arange(6).view(2, 3)
        numbers[1] += 10
        numbers[:, 0].zero_()
        read.append(numbers.tolist())
        read.append(numbers[numbers > 10].tolist())
        read.append((torch.tensor([3, 1, 2]).sort().indices.int() * 2).tolist())
        read.append(torch.full((2,), 0.25).sum().item())
        read.append(torch.repeat_interleave(torch.tensor([2, 0, 1])).tolist())
        buffer = torch.empty(2, dtype=torch.int64)
        dist.all_reduce(buffer)  # unknown now
        buffer.copy_(torch.tensor([4, 5]))
        read.append(buffer.tolist())
        read.append(torch.empty(3, dtype=torch.int64).fill_(7)[1:].tolist())
        read.append(torch.empty(2, dtype=torch.int64).tolist())
        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("a", "b"))
        read.append(mesh["b"].mesh.tolist())
        read.append(mesh.mesh[:, 1].tolist())

    made = capture(lambda: step, 4, 3)
    assert read == [
        [[0, 1, 2], [0, 14, 15]],
        [14, 15],
        [2, 4, 0],
        0.5,
        [0, 0, 2],
        [4, 5],
        [7, 7],
        [0, 0],
        [2, 3],
        [1, 3],
    ]
    assert made.notes == ()


def test_random_integers_that_no_size_may_depend_on() -> None:
    """Permutations and seeds, as of samplers; classes of labels; enough draws for a range."""
    read: list[Any] = []

    def step() -> None:
        generator = torch.Generator().manual_seed(
            int(torch.empty((), dtype=torch.int64).random_())
        )
        read.append(torch.randperm(5, generator=generator).tolist())
        read.append(torch.randperm(3).tolist())
        read.append(torch.randint(3, (6,)).bincount().tolist())
        labels = fn.one_hot(torch.randint(10, (2, 4)), 10)
        read.append((tuple(labels.shape), labels.dtype))

    made = capture(lambda: step, 4)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(0)).tolist()
    assert read == [order, [0, 1, 2], [2, 2, 2], ((2, 4, 10), torch.int64)]
    words = ("0, as they have no bounds", "in order", "evenly spread from 0 to 2")
    assert [word in note for word, note in zip(words, made.notes, strict=True)] == [True] * 3


def routes() -> Any:
    def step() -> None:
        scores = nn.Linear(4, 4)(torch.ones(8, 4))
        counts = torch.bincount(scores.topk(2).indices.flatten(), minlength=4)
        for count in counts.tolist():
            dist.all_reduce(torch.ones(count))

    return step


@pytest.mark.parametrize(
    ("given", "counts"), [((), [4, 4, 4, 4]), ((8, 1, 7, 0), [8, 1, 7, 0]), ((4,), [4] * 4)]
)
def test_tokens_of_each_expert_are_an_even_share_or_as_given(
    given: tuple[int, ...], counts: list[int]
) -> None:
    made = capture(routes, 4, tokens_per_expert=given)
    sent = [op.count for op in made.expand() if isinstance(op, CommOp)]
    assert sent == counts
    (note,) = made.notes
    how = "by --tokens-per-expert" if given else "an even share of 4 for each of 4"
    assert note.startswith("on every rank, 16 choices at test_unknown.py:")
    assert how in note


@pytest.mark.parametrize("given", [(5,), (8, 8), (1, 2, 3, 4)])
def test_tokens_that_do_not_sum_up_are_refused(given: tuple[int, ...]) -> None:
    text = refusal(routes, tokens_per_expert=given)
    assert "tokens-per-expert" in text
    assert "4 numbers that sum to 16, the tokens that a rank routes at test_unknown.py:" in text


def test_tokens_per_expert_without_experts_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.py"
    job.write_text("import torch\n\ndef build():\n    return lambda: torch.ones(2).sum()\n")
    command = ["workload", "capture", f"{job}:build", "--world-size", "4"]
    assert status([*command, "--tokens-per-expert", "4,4"]) == 2
    assert "tokens-per-expert 4,4 is invalid: it must be left out" in capsys.readouterr().err
