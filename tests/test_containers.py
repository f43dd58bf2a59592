"""The images: their Dockerfiles are sound, and their one RUN step works without Docker."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTAINERS = ROOT / "containers"
INSTALL = CONTAINERS / "install.sh"
BACKENDS = {"nvidia": "cuda", "amd": "rocm"}
NAMES = sorted(BACKENDS)
# What would let a build of these tests' own environment decide instead of the image's.
OURS = ("PIP_CONSTRAINT", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in OURS}
    return kept | changes


def dockerfile(name: str) -> Path:
    return CONTAINERS / f"{name}.Dockerfile"


def instructions(name: str) -> list[list[str]]:
    """Return the words of each instruction; no line of ours is continued."""
    lines = dockerfile(name).read_text().splitlines()
    return [line.split() for line in lines if line and not line.startswith("#")]


def copied(name: str) -> list[tuple[str, str]]:
    """Return each source that is copied, with its target."""
    copies = (words[1:] for words in instructions(name) if words[0] == "COPY")
    return [(source, target) for *sources, target in copies for source in sources]


def locked() -> dict[str, str]:
    """Return the version of each requirement of the lock file."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pairs = (line.partition("==") for line in lines if not line.startswith("#"))
    return {name: version for name, _, version in pairs}


def install(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", INSTALL, *arguments],
        cwd=ROOT,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_dockerfile_is_known() -> None:
    assert sorted(path.name for path in CONTAINERS.glob("*Dockerfile*")) == [
        dockerfile(name).name for name in NAMES
    ]


def lint(path: Path) -> str:
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    program = shutil.which("hadolint", path=search)
    assert program, "hadolint is missing: pip install -r requirements-dev.lock"
    command = [program, "--no-color", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("name", NAMES)
def test_hadolint_has_no_complaint(name: str) -> None:
    assert lint(dockerfile(name)) == ""


def test_hadolint_is_able_to_complain(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM ubuntu:latest\nRUN cd /tmp && pip install x\n")
    assert {"DL3003", "DL3007", "DL3042"} <= set(
        re.findall(r"DL\d+", lint(tmp_path / "Dockerfile"))
    )


@pytest.mark.parametrize("name", NAMES)
def test_base_has_a_version(name: str) -> None:
    first, second = instructions(name)[:2]
    assert first[0] == "ARG"
    assert re.fullmatch(r"BASE=[\w./]+:\S*\d+\.\d+\S*", first[1])
    assert second == ["FROM", "${BASE}"]


@pytest.mark.parametrize("name", NAMES)
def test_sources_exist_and_are_in_the_build_context(name: str) -> None:
    context = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in context
    for source, _ in copied(name):
        assert (ROOT / source).exists(), source
        assert f"!{source}" in context
    assert {f"!{source}" for source, _ in copied(name)} == {
        line for line in context if line.startswith("!")
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_only_step_is_the_shared_script(name: str) -> None:
    steps = [words[1:] for words in instructions(name) if words[0] == "RUN"]
    script = ["containers/install.sh", BACKENDS[name], "/opt/stepmark"]
    assert steps == [["PIP_NO_CACHE_DIR=1", *script]]
    assert os.access(INSTALL, os.X_OK)


def test_script_is_strict_bash() -> None:
    subprocess.run(["bash", "-n", INSTALL], check=True)
    lines = INSTALL.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert next(line for line in lines if not line.startswith("#")) == "set -euo pipefail"


def test_script_downloads_by_pip_alone_and_only_what_is_pinned() -> None:
    text = INSTALL.read_text()
    assert not re.search(r"\b(curl|wget|git|apt|apt-get|conda|dnf|yum)\b", text)
    assert re.findall(r"^pip_install (.*)", text, re.M) == [
        "-r requirements.lock",
        "--no-deps --no-build-isolation .",
    ]
    assert all(re.fullmatch(r"[\w.]+", version) for version in locked().values())
    assert not {name for name in locked() if re.match(r"torch|nvidia-n?cc|triton", name)}


FAKE_TORCH = """\
__version__ = {version!r}
class version:
    cuda = {cuda!r}
    hip = {hip!r}
"""


def with_torch(folder: Path, version: str, *, cuda: str | None, hip: str | None) -> Path:
    """Write a package that looks like torch to the script."""
    (folder / "torch").mkdir()
    text = FAKE_TORCH.format(version=version, cuda=cuda, hip=hip)
    (folder / "torch" / "__init__.py").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("version", "cuda", "hip", "backend", "message"),
    [
        ("2.10.0a0+b4e4ee81d3", "13.1", None, "cuda", "out of range: stepmark needs torch>="),
        ("2.9.1+rocm6.4", None, "6.4", "rocm", "out of range"),
        ("2.14.0", "13.2", None, "any", "out of range"),
        ("2.11.0+cpu", None, None, "cuda", "built for cpu, not for cuda"),
        ("2.11.0+rocm7.14.0", None, "7.14", "cuda", "built for rocm, not for cuda"),
        ("2.11.0+cu130", "13.0", None, "rocm", "built for cuda, not for rocm"),
        ("2.11.0", "13.0", None, "nvidia", "must be cuda, rocm or any"),
    ],
)
def test_wrong_torch_ends_the_build(
    tmp_path: Path, version: str, cuda: str | None, hip: str | None, backend: str, message: str
) -> None:
    path = with_torch(tmp_path, version, cuda=cuda, hip=hip)
    prefix = tmp_path / "prefix"
    done = install(backend, str(prefix), PYTHON=sys.executable, PYTHONPATH=str(path))
    assert done.returncode == 1
    assert message in done.stderr
    assert not prefix.exists()


@pytest.mark.parametrize("version", ["2.11.0a0+a6c236b9fd.nv26.03", "2.13.0+cu130"])
def test_torch_of_an_image_is_in_range(tmp_path: Path, version: str) -> None:
    """The script goes on, as far as to a prefix that is a file."""
    path = with_torch(tmp_path, version, cuda="13.2", hip=None)
    prefix = tmp_path / "prefix"
    prefix.touch()
    done = install("cuda", str(prefix), PYTHON=sys.executable, PYTHONPATH=str(path))
    assert done.returncode != 0
    assert "install.sh" not in done.stderr
    assert str(prefix) in done.stderr


def test_python_without_torch_ends_the_build(tmp_path: Path) -> None:
    done = install("any", str(tmp_path / "prefix"), PYTHON="false")
    assert done.returncode == 1
    assert "false cannot import torch" in done.stderr


def requirements(name: str, known: dict[str, None]) -> dict[str, None]:
    """Add a distribution and all that it needs here."""
    if name not in known:
        known[name] = None
        for line in distribution(name).requires or ():
            wanted, _, marker = line.partition(";")
            match = re.match(r"[\w.-]+", wanted)
            assert match
            try:
                distribution(match[0])
            except ModuleNotFoundError:
                continue  # of another platform or an extra
            if "extra ==" not in marker:
                requirements(match[0], known)
    return known


def torch_entries() -> Iterator[Path]:
    """Yield the files and folders of torch, and of what it needs, in site-packages."""
    for name in requirements("torch", {}):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            yield Path(str(found.locate_file(top)))


@pytest.fixture
def image_python(tmp_path: Path) -> Path:
    """The Python of an image: a virtual environment with pip and torch, and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "image"], check=True)
    site = next((tmp_path / "image" / "lib").glob("python*/site-packages"))
    for entry in torch_entries():
        if not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    return tmp_path / "image" / "bin" / "python"


@pytest.mark.slow
def test_script_installs_beside_the_torch_of_an_image(
    tmp_path: Path, image_python: Path
) -> None:
    """The steps of both images in a folder that has what the Dockerfiles copy, and no more."""
    context, prefix = tmp_path / "context", tmp_path / "stepmark"
    assert copied("nvidia") == copied("amd")
    for source, target in copied("nvidia"):
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, context / target)
        else:
            (context / target).mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, context / target)

    def run(*command: str | Path, **changes: str) -> subprocess.CompletedProcess[str]:
        cwd = context if context.exists() else tmp_path
        return subprocess.run(
            command,
            cwd=cwd,
            env=environment(**changes),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )

    def output(*command: str | Path, **changes: str) -> str:
        done = run(*command, **changes)
        assert done.returncode == 0, done.stdout
        return done.stdout

    before = output(image_python, "-m", "pip", "freeze", "--all")
    script = context / "containers" / "install.sh"
    build_log = output(script, "any", prefix, PYTHON=str(image_python))
    assert re.search(r"^stepmark \d", build_log, re.M)
    assert output(image_python, "-m", "pip", "freeze", "--all") == before

    assert not list(prefix.glob("lib*/python*/site-packages/torch*"))
    # Packages of the machine, which every virtual environment sees, may not fit together.
    conflicts = run(image_python, "-m", "pip", "--python", prefix / "bin" / "python", "check")
    ours = {"stepmark", "torch", *locked()}
    assert not [line for line in conflicts.stdout.splitlines() if line.split()[0] in ours]
    shutil.rmtree(context)

    path = f"{prefix / 'bin'}{os.pathsep}{os.environ['PATH']}"
    assert output("stepmark", "--version", PATH=path).startswith("stepmark ")
    gemm = ("stepmark", "op", "gemm", "--device", "cpu", "--m", "64", "--n", "64", "--k", "64")
    assert "1 case; none was run" in output(*gemm, "--dry-run", PATH=path)
    ranks = ("torchrun", "--nproc-per-node", "2", "-m", "stepmark", "comm", "all_reduce")
    assert "all_reduce" in output(*ranks, "-b", "1K", "-e", "1K", "--device", "cpu", PATH=path)
