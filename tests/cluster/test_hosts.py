"""Ranks on two hosts measure what ranks on one host do."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.job import Job
from tests.cluster.network import Host

from stepmark.collectives.measured_curves import run_curves

pytestmark = pytest.mark.cluster

CPU = ("--device", "cpu")
TRAIN = ("train", "gpt2-125m", "--strategy", "fsdp", "--scale", "tiny", "--steps", "5")


def trained(job: Job, num_hosts: int) -> dict[str, Any]:
    try:
        assert job.end() == [0] * num_hosts, job.err()
    finally:
        job.kill()
    (record,) = job.records()
    training: dict[str, Any] = record["training"]
    return training


def test_training_on_two_hosts_equals_one_host(hosts: list[Host], tmp_path: Path) -> None:
    """The same ranks compute the same losses and send the same messages."""
    words = (*TRAIN, "--messages", *CPU)
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    one = trained(Job(hosts[:1], folders[0], *words, nproc=2), 1)
    two = trained(Job(hosts, folders[1], *words), 2)
    num_steps = min(len(one["loss"]), len(two["loss"]))  # more warm-up steps on a busy machine
    assert one["loss"][:num_steps] == two["loss"][:num_steps]
    assert num_steps >= 5
    assert one["messages"] == two["messages"]
    assert one["messages"]


def test_bus_bandwidth_is_that_of_the_link(hosts: list[Host], tmp_path: Path) -> None:
    rate_mbit = 400  # at which the link takes much longer than the sums of the ranks
    for host in hosts:
        host.shape(rate_mbit)
    try:
        words = ("-b", "32M", "-e", "32M", "-n", "4", "--json", str(tmp_path / "comm.json"))
        job = Job(hosts, tmp_path, "comm", "all_reduce", *CPU, *words)
        try:
            assert job.end() == [0, 0], job.err()
        finally:
            job.kill()
    finally:
        for host in hosts:
            host.unshape()
    (row,) = json.loads((tmp_path / "comm.json").read_text())["rows"]
    assert math.isclose(row["busbw_gb_s"], rate_mbit / 8000, rel_tol=0.1)
    assert row["num_wrong"] == 0
    ranks = re.findall(r"^#  Rank +(\d+) .* on +(\S+)", job.out(), re.MULTILINE)
    assert ranks == [("0", "n1"), ("1", "n2")]
    for host, err in ((hosts[0], job.err()), (hosts[1], job.err(1))):
        assert f"# host {host.address}: GLOO_SOCKET_IFNAME=eth0 ({host.address})\n" in err


def test_bad_input_ends_all_hosts(hosts: list[Host], tmp_path: Path) -> None:
    job = Job(hosts, tmp_path, "comm", "all_reduce", *CPU, "-f", "inf")
    try:
        assert job.end(30) == [2, 2]
    finally:
        job.kill()
    assert job.err().count("-f inf is invalid") == 1
    assert "invalid" not in job.err(1)


def test_curves_inside_a_host_and_over_hosts(hosts: list[Host], tmp_path: Path) -> None:
    """`predict` gets both from one run, by the hosts of its ranks."""
    words = ("comm", "all_reduce", *CPU, "-b", "1M", "-e", "1M", "-n", "3", "--ranks", "2,4")
    job = Job(hosts, tmp_path, *words, nproc=2)
    try:
        assert job.end() == [0, 0], job.err()
    finally:
        job.kill()
    (run,) = job.folder.glob("runs/*")
    curves = {(curve.num_ranks, curve.num_hosts) for curve in run_curves(run)}
    assert curves == {(2, 1), (4, 2)}
