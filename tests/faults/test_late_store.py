"""A store that answers late: nobody fails and nobody is blamed, wherever the run is."""

import time
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import pytest

from helpers.marks import slow_but
from helpers.processes import SMALL, START_S, TORCHRUN, started, summary, until

pytestmark = [pytest.mark.spawn, pytest.mark.slow]

LATE_S = 5.0
HELD = {
    "start": ["model._target_=own_models.HeldWhileMade"],
    "step": ["model._target_=own_models.Loud", "+callbacks.held._target_=own_models.HeldInSave"],
    "end": ["+callbacks.held._target_=own_models.HeldAtEnd"],
}


@pytest.mark.parametrize("where", slow_but([], HELD, daily=["end"]))
def test_an_agent_that_is_stopped_for_a_while_with_the_store_harms_nobody(where: str, folder: Path) -> None:
    with started(folder, *SMALL, *HELD[where], "checkpoint.every_n_steps=5", command=TORCHRUN) as run:
        until(lambda: (folder / "held").exists() or run.process.poll() is not None, START_S, "it does not begin")
        run.signal(SIGSTOP)
        (folder / "attacked").touch()  # the run goes on, and asks the store
        time.sleep(LATE_S)
        run.signal(SIGCONT)
        ended = run.end()
    assert ended.status == 0, ended.err
    assert summary(folder / "run")["status"] == "finished"
    assert "Rank" not in ended.err
