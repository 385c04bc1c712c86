"""A real Slurm, started once."""

from collections.abc import Iterator

import pytest

from benchmarks import cluster
from benchmarks.cluster import Cluster


@pytest.fixture(scope="session")
def _slurm() -> Iterator[Cluster]:
    if (why := cluster.lacking()) is not None:
        pytest.skip(why)
    with cluster.running() as slurm:
        yield slurm


@pytest.fixture
def slurm(_slurm: Cluster) -> Iterator[Cluster]:
    """A Slurm with both nodes free; what a test leaves in the queue is cancelled."""
    assert _slurm.await_idle(), "busy nodes"
    yield _slurm
    _slurm.command("scancel", "--user=root")
    assert _slurm.await_empty(), "jobs are left in the queue"
