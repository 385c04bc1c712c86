"""Another user of the machine, who connects to every port that opens: other tests' runs would meet him, too."""

import os
import time
from functools import partial
from pathlib import Path

import pytest

from helpers.attacks import as_user, knock, listening
from helpers.patience import patience
from helpers.processes import SMALL, START_S, ran, summary

pytestmark = [pytest.mark.spawn, pytest.mark.alone, pytest.mark.slow]


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
def test_strangers_at_every_port_change_nothing(ranks: int, stranger: int, folder: Path) -> None:
    own = [
        f"launcher.nproc_per_node={ranks}",
        f"launcher.timeout_s={round(patience(20))}",
        "strategy.shared_memory=false",
    ]
    undisturbed = ran(folder, *SMALL, *own, "hydra.run.dir=undisturbed")
    assert undisturbed.status == 0, undisturbed.err
    expected = summary(folder / "undisturbed")["weights_sha256"]
    known = listening(os.geteuid())
    knocked = folder / "knocked"
    with knocked.open("w") as seen, as_user(stranger, partial(knock, os.geteuid(), known, seen)):
        began = time.monotonic()
        ended = ran(folder, *SMALL, *own)
    assert knocked.read_text(), "the stranger found no port: then this test shows nothing"
    assert time.monotonic() - began < patience(START_S)
    if ended.status == 0:
        assert summary(folder / "run")["weights_sha256"] == expected
    else:  # it was quicker than a rank
        assert f"While the ranks met, user {stranger} of this machine connected to rank" in ended.err
