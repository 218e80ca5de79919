"""A real Slurm on this machine, for as long as these tests run: `make test-slurm`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTBED = Path(__file__).resolve().parents[2] / "slurm" / "testbed"
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and "SHARDWISE_TEST_SLURM" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="needs a real Slurm, which `make test-slurm` installs and starts"))


@pytest.fixture(scope="session")
def slurm() -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands work. The testbed is left as it was found: up or down."""
    was_up = subprocess.run(["pgrep", "-f", "slurmctld.*shardwise-testbed"], capture_output=True, check=False)
    subprocess.run([TESTBED / "up"], check=True, timeout=300)
    said = subprocess.run(
        ["bash", "-c", ". /var/lib/shardwise-testbed/env && env -0"], capture_output=True, text=True, check=True
    )
    yield dict(word.split("=", 1) for word in said.stdout.split("\0") if word.startswith(("SLURM_CONF=", "PATH=")))
    if was_up.returncode:
        subprocess.run([TESTBED / "down"], check=True, timeout=120)
