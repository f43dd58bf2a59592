"""The memory test counts wrong bytes; changes of a device's state are failures."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stepmark.ground.units import MIB
from stepmark.measuring.nvidia import Health, Links
from stepmark.nodes import bench_node_check

SIZE = 4 * MIB


def test_good_memory_has_no_wrong_byte() -> None:
    result = bench_node_check.check_memory("cpu", limit_s=60, num_bytes=SIZE)
    assert result.num_wrong == 0
    assert result.num_patterns == len(bench_node_check.PATTERNS)
    assert 0.8 * SIZE <= result.num_bytes <= SIZE


@pytest.mark.parametrize("num_wrong", [1, 3, 8, 11])
def test_wrong_bytes_are_counted(num_wrong: int) -> None:
    """In the last block, over word boundaries; each pattern sees them again."""

    def corrupt(blocks: Sequence[Tensor]) -> None:
        blocks[-1].view(torch.uint8)[5 : 5 + num_wrong] ^= 0x10

    result = bench_node_check.check_memory("cpu", limit_s=60, num_bytes=SIZE, between=corrupt)
    assert result.num_wrong == num_wrong * result.num_patterns


def test_two_blocks_at_one_address_are_wrong() -> None:
    """The pattern of addresses alone shows it."""

    def alias(blocks: Sequence[Tensor]) -> None:
        blocks[0].copy_(blocks[1])

    result = bench_node_check.check_memory("cpu", limit_s=60, num_bytes=SIZE, between=alias)
    assert result.num_wrong > 0


def test_a_memory_test_ends_early_but_tests_something() -> None:
    assert bench_node_check.check_memory("cpu", limit_s=1e-9, num_bytes=SIZE).num_patterns == 1


def with_health(
    faults: tuple[str, ...] | None = (), **values: int | bool
) -> bench_node_check.State:
    before = bench_node_check.state("cpu")
    device = replace(before.device, health=Health(**values))  # type: ignore[arg-type]
    return replace(before, device=device, faults=faults)


def test_a_state_without_changes_is_no_failure() -> None:
    state = with_health(ecc_uncorrected=7, remapped_rows=2)
    assert bench_node_check.failures(state, state) == []
    assert bench_node_check.failures(with_health(None), with_health(None)) == []


def test_changes_and_pending_repairs_are_failures() -> None:
    before = with_health(("old",), ecc_uncorrected=7, remapped_rows=2)
    after = with_health(
        ("old", "NVRM: Xid 79"), ecc_uncorrected=9, remapped_rows=3, remap_pending=True
    )
    texts = bench_node_check.failures(before, after)
    assert len(texts) == 4
    for text, words in zip(texts, ("2 uncorr", "1 memory", "reset", "Xid 79"), strict=True):
        assert words in text


def test_facts_of_a_gpu_are_those_that_do_not_change_with_its_load() -> None:
    """The generation of an idle PCIe link falls; its width and the greatest one do not."""
    before = bench_node_check.state("cpu")
    assert bench_node_check.facts(before) == {"CPU": before.device.info.name}
    links = Links(
        pcie_generation=1,
        pcie_max_generation=5,
        pcie_width=8,
        pcie_max_width=16,
        fabric="NVLink",
        num_fabric_links=0,
    )
    info = replace(
        before.device.info, name="card", num_sms=132, memory_bytes=2**37, power_limit_w=700.0
    )
    gpu = replace(before, device=replace(before.device, info=info, links=links))
    assert bench_node_check.facts(gpu) == {
        "GPU": "card",
        "memory of the GPU": "128 GiB",
        "power limit": "700 W",
        "PCIe": "gen5, x8 of x16",
        "NVLink links": "0",
    }
    unknown = replace(gpu, device=replace(gpu.device, links=Links()))
    assert "PCIe" not in bench_node_check.facts(unknown)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_the_memory_of_a_gpu() -> None:
    free = torch.cuda.mem_get_info()[0]
    result = bench_node_check.check_memory("cuda", limit_s=20)
    assert result.num_wrong == 0
    assert result.num_bytes > 0.7 * free
    state = bench_node_check.state("cuda")
    assert bench_node_check.failures(state, state) == []
