"""A run loads the core and what its config names."""

import pytest

from benchmarks.extras import part_of
from benchmarks.modules import loaded
from helpers.marks import at_night

# Those that it names: fast paths by default, and guards of the sockets between ranks.
NAMED = {"core", "fast_paths", "socket_guards", "shared memory", "models, data sets, tasks"}
QUICK = ["launcher.nproc_per_node=2", "launcher.device=cpu", "trainer.max_steps=1", "logger=none"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        *at_night(("strategy=ddp", set())),
        # What a rank keeps in memory is coded as parts of checkpoints are.
        (
            "strategy=ddp callbacks=early_stopping launcher.replace_ranks=1",
            {"callbacks", "recovery", "sharded checkpoints"},
        ),
        # It adds up in the order of ddp_exact.
        *at_night(("strategy=fsdp", {"fsdp", "ddp_exact", "deferred models", "sharded checkpoints"})),
    ],
)
def test_a_run_loads_no_extra_that_it_does_not_name(overrides: str, named: set[str]) -> None:
    seen = loaded([*overrides.split(), *QUICK])

    assert {part_of(module) for module in seen} <= NAMED | named
    assert named <= {part_of(module) for module in seen}
