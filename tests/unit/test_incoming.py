"""What ranks send, where one is replaced at what another one sent."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from ddp_recipes.launchers.local.ranks import Rank, incoming


@pytest.fixture
def joined() -> Iterator[Callable[[int, bool], Rank]]:
    """Return a rank that says that it has joined, and perhaps that it says no more."""
    with ExitStack() as stack:

        def made(number: int, no_more: bool) -> Rank:
            read_end, connection = os.pipe()
            reports, report = os.pipe()
            os.close(read_end)
            os.write(report, b'{"joined": true}\n')
            if no_more:
                os.close(report)
            else:
                stack.callback(os.close, report)
            process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            pipes = os.fdopen(connection, "wb", buffering=0), os.fdopen(reports, "rb", buffering=0)
            rank = Rank(number, process, *pipes, stack.enter_context(tempfile.TemporaryFile()))
            stack.callback(rank.end)
            return rank

        yield made


@pytest.mark.spawn
def test_a_rank_is_replaced_whose_pipe_has_more(joined: Callable[[int, bool], Rank]) -> None:
    ranks = [joined(0, False), joined(1, True)]
    coming = incoming(ranks)
    next(coming)
    assert [rank.joined for rank in ranks] == [True, False]
    ranks[1].end()
    ranks[1] = joined(1, False)
    while not ranks[1].joined:
        next(coming)
    coming.close()
