"""Another user of the machine, who attacks a plain local run."""

import os
import time
from functools import partial
from pathlib import Path
from signal import SIGTERM

import pytest

from helpers.attacks import as_user, flood, knock, listening, ports_of
from helpers.processes import ENDLESS, SMALL, START_S, TWO, ran, started, summary, until, until_saved

pytestmark = [pytest.mark.spawn]


@pytest.mark.alone
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_strangers_at_every_port_change_nothing(ranks: int, stranger: int, folder: Path) -> None:
    own = [f"launcher.nproc_per_node={ranks}", "launcher.timeout_s=20", "strategy.shared_memory=false"]
    undisturbed = ran(folder, *SMALL, *own, "hydra.run.dir=undisturbed")
    assert undisturbed.status == 0, undisturbed.err
    expected = summary(folder / "undisturbed")["weights_sha256"]
    known = listening(os.geteuid())
    knocked = folder / "knocked"
    with knocked.open("w") as seen, as_user(stranger, partial(knock, os.geteuid(), known, seen)):
        began = time.monotonic()
        ended = ran(folder, *SMALL, *own)
    assert knocked.read_text(), "the stranger found no port: then this test shows nothing"
    assert time.monotonic() - began < START_S
    if ended.status == 0:
        assert summary(folder / "run")["weights_sha256"] == expected
    else:  # it was quicker than a rank
        assert f"While the ranks met, user {stranger} of this machine connected to rank" in ended.err


def test_a_run_in_training_is_closed_to_strangers(stranger: int, folder: Path) -> None:
    with started(folder, *ENDLESS, TWO, "launcher.timeout_s=10") as run:
        until_saved(run, folder / "run")
        ranks = [run.rank(number) for number in (0, 1)]
        open_files = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in ranks]
        ports = ports_of(ranks)
        assert ports, "no port is open: then this test shows nothing"
        flooded = folder / "flooded"
        with flooded.open("w") as opened, as_user(stranger, partial(flood, ports, ranks, opened)):
            until(flooded.read_text, START_S, "no flood")
            last = folder / "run" / "checkpoints" / "last.pt"
            before = last.stat().st_mtime_ns
            until(lambda: last.stat().st_mtime_ns > before, START_S, "it trains no more")
            assert flooded.read_text() == "end\n", "the stranger could open files of the ranks"
            assert [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in ranks] < [
                count + 20 for count in open_files
            ]
        run.signal(SIGTERM)
        assert run.end().status == 75
