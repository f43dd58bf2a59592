"""Two hosts for all tests of this folder, which `make test-cluster` runs."""

import shutil
import subprocess
from collections.abc import Iterator

import pytest
from tests.cluster import network
from tests.cluster.network import Host


@pytest.fixture(scope="session")
def hosts() -> Iterator[list[Host]]:
    """Two hosts without a link limit. Not to be shared by two test runs at once."""
    assert shutil.which("ip"), "make test-cluster needs iproute2"
    made = network.up(2)
    yield made
    network.down(made)


@pytest.fixture(autouse=True)
def _links_are_up(hosts: list[Host]) -> Iterator[None]:
    yield
    for host in hosts:
        subprocess.run(["ip", "link", "set", f"v{host.number}", "up"], check=True)
