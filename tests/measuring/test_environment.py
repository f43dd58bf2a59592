"""Environment: nothing secret leaves, nothing unknown is invented."""

import dataclasses
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepmark.cases.record import DeviceInfo
from stepmark.ground.redaction import REDACTED, redact_variable
from stepmark.measuring import environment, host
from stepmark.measuring.host import PREFIXES, captured_variables

SECRET_WORDS = ["TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL"]


@given(
    prefix=st.sampled_from(PREFIXES),
    word=st.sampled_from(SECRET_WORDS),
    value=st.text(alphabet="abcdefgh0123456789", min_size=12),
)
def test_a_secret_never_leaves(prefix: str, word: str, value: str) -> None:
    captured = captured_variables({f"{prefix}MY_{word}_1": value})
    assert captured == {f"{prefix}MY_{word}_1": REDACTED}


@given(password=st.text(alphabet="abcdefgh0123456789:@!%", min_size=8))
def test_the_login_of_a_url_never_leaves(password: str) -> None:
    shown = redact_variable("TORCH_HOME", f"https://me:{password}@host:80/path")
    assert shown == f"https://{REDACTED}@host:80/path"


def test_other_values_are_kept_as_they_are() -> None:
    kept = {"NCCL_ALGO": "Ring,Tree", "CUDA_VISIBLE_DEVICES": "0", "TORCH_X": "http://h/p?a"}
    assert captured_variables(kept) == kept


def test_only_named_prefixes_are_captured() -> None:
    assert captured_variables({"HOME": "/root", "MY_NCCL_ALGO": "x", "AWS_REGION": "y"}) == {}


@pytest.mark.parametrize(
    "name",
    [
        *("NCCL_ALGO", "RCCL_MSCCL_ENABLE", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"),
        *("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING", "HSA_ENABLE_SDMA", "FI_PROVIDER"),
        *("TORCH_NCCL_HIGH_PRIORITY", "PYTORCH_CUDA_ALLOC_CONF", "UCX_TLS", "CUBLAS_WORKSPACE"),
        "NVIDIA_TF32_OVERRIDE",
    ],
)
def test_what_changes_a_measurement_is_captured(name: str) -> None:
    assert captured_variables({name: "1"}) == {name: "1"}


def git(root: Path, *args: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    command = ["git", *identity, "-C", str(root), *args]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "one")
    return tmp_path


def test_commit_of_a_clean_and_a_dirty_tree(checkout: Path) -> None:
    clean = host.git_commit(checkout)
    assert len(clean) == 40
    (checkout / "a").write_text("2")
    assert host.git_commit(checkout) == f"{clean}+dirty"


def test_a_folder_inside_a_checkout_has_no_commit(checkout: Path) -> None:
    inside = checkout / ".venv" / "lib"
    inside.mkdir(parents=True)
    assert host.git_commit(inside) == ""


def test_without_git_the_commit_is_unknown(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(checkout / "nowhere"))
    assert host.git_commit(checkout) == ""


def test_memory_limit_is_the_smallest_up_the_tree(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/job/step\n")
    mount = tmp_path / "mount"
    (mount / "job" / "step").mkdir(parents=True)
    (mount / "job" / "step" / "memory.max").write_text("max\n")
    assert host.cgroup_limit(membership, mount) is None
    (mount / "job" / "memory.max").write_text("4096\n")
    assert host.cgroup_limit(membership, mount) == 4096
    (mount / "memory.max").write_text("1024\n")
    assert host.cgroup_limit(membership, mount) == 1024


def test_memory_limit_is_unknown_without_cgroups(tmp_path: Path) -> None:
    assert host.cgroup_limit(tmp_path / "none", tmp_path / "mount") is None


def test_names_from_proc_and_etc(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("vendor_id\t: X\nmodel name\t: AMD EPYC 9654\n")
    (tmp_path / "release").write_text('NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04 LTS"\n')
    assert host.cpu_name(tmp_path / "cpuinfo") == "AMD EPYC 9654"
    assert host.os_name(tmp_path / "release") == "Ubuntu 24.04 LTS"
    assert host.cpu_name(tmp_path / "missing")


def test_capture_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    device = environment.local_device(torch.device("cpu"), 0)
    found = environment.capture([device])
    assert found.devices == (device,)
    assert found.variables["NCCL_DEBUG"] == "INFO"
    assert found.torch == torch.__version__
    assert found.num_cores >= 1
    assert found.memory_bytes > 0
    assert all(found.versions.values())


def test_capabilities_of_the_cpu() -> None:
    found = environment.capabilities(torch.device("cpu"))
    assert (found.device_type, found.capability) == ("cpu", (0, 0))


def test_warnings_name_the_device() -> None:
    good = DeviceInfo(
        rank=0,
        index=0,
        name="NVIDIA H200",
        power_limit_w=700,
        default_power_limit_w=700,
        persistence=True,
        host="n1",
    )
    assert host.device_warnings([good, good]) == ()
    capped = dataclasses.replace(good, index=1, power_limit_w=500, persistence=False)
    other = dataclasses.replace(good, name="NVIDIA H100")
    limited, off = host.device_warnings([good, capped])
    assert limited == "n1 device 1: power limited to 500 W, default 700 W"
    assert off == "n1 device 1: persistence mode is off"
    assert host.device_warnings([good, other]) == (
        "mixed device models: NVIDIA H100, NVIDIA H200",
    )


def test_the_peak_of_a_process_is_that_since_its_reset() -> None:
    size = 2**27
    environment.reset_peak_resident()
    before = environment.peak_resident_bytes()
    block = bytearray(size)
    during = environment.peak_resident_bytes()
    del block
    after = environment.peak_resident_bytes()
    environment.reset_peak_resident()
    again = environment.peak_resident_bytes()
    assert before
    assert during
    assert after
    assert again
    assert during - before == pytest.approx(size, rel=0.1)
    assert after == pytest.approx(during, rel=0.01)
    assert again == pytest.approx(before, abs=size // 4)
