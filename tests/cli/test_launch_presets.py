"""stepmark launch --fabric: the variables of networks."""

import shlex

import pytest

from stepmark.launching.launch import settings_of
from stepmark.launching.launch_options import LaunchOptions
from stepmark.model.fabrics import load_fabrics

from .launch_programs import DOCS, called, script_of

pytestmark = pytest.mark.usefixtures("launch_folder")


@pytest.mark.parametrize("target", ["--slurm", "--mpirun", "--pssh", "--torchrun"])
def test_no_variable_of_a_network_is_set_silently(target: str) -> None:
    hosts = () if target == "--slurm" else ("--hosts", "a,b")
    text = script_of(target, *hosts, "--gpus-per-node", "2")
    assert "# No fabric preset" in text
    assert "NCCL_" not in text
    assert "GLOO_" not in text
    preset = script_of(target, *hosts, "--gpus-per-node", "2", "--fabric", "slingshot")
    assert "# No fabric preset" not in preset
    for setting in load_fabrics()["slingshot"].settings:
        assert f"{setting.name}={shlex.quote(setting.value)}" in preset
        assert setting.why in preset


def test_export_overrides_a_preset() -> None:
    settings = settings_of(
        LaunchOptions(fabric=("slingshot",), export=("NCCL_CROSS_NIC=0,A=1",))
    )
    values = {setting.name: setting.value for setting in settings}
    assert values["NCCL_CROSS_NIC"] == "0"
    assert values["A"] == "1"
    assert len(values) == len(settings) == len(load_fabrics()["slingshot"].settings) + 1


def test_every_setting_has_a_reason_and_a_source() -> None:
    for fabric in load_fabrics().values():
        assert fabric.about
        assert fabric.settings
        for setting in fabric.settings:
            assert setting.source.startswith("https://"), setting
            assert setting.why.isprintable()
            assert setting.why


def test_the_presets_are_listed_and_documented() -> None:
    code, out, err = called("--fabric", "list")
    assert (code, err) == (0, "")
    text = DOCS.read_text()
    for fabric in load_fabrics().values():
        assert f"{fabric.name}: {fabric.about}\n" in out
        assert f"**{fabric.name}**: {fabric.about}" in text
        for each in fabric.settings:
            assert each.source in out
            row = f"| {fabric.name} | `{each.name}` | `{each.value}` | {each.why} |"
            assert f"{row} [page]({each.source}) |\n" in text
