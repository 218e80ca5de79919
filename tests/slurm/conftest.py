"""A real Slurm on this machine, for as long as these tests run: `make test-slurm`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.slurm_jobs import testbed

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and "SHARDWISE_TEST_SLURM" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="needs a real Slurm, which `make test-slurm` installs and starts"))


@pytest.fixture(scope="session")
def slurm() -> Iterator[dict[str, str]]:
    with testbed() as environment:
        yield environment
