"""``ddp_recipes.testing``: what a test that calls a function on ranks gets of them, however they end."""

import os
import re
import time
from pathlib import Path

import pytest
from torch.distributed import Store

from ddp_recipes.errors import RunFailed
from ddp_recipes.runtime.world import World
from ddp_recipes.testing import on_ranks


def test_ranks_return_in_their_order_what_each_returned() -> None:
    def answer(world: World, store: Store | None) -> tuple[int, int, bool]:
        return world.rank, world.world_size, store is None

    assert on_ranks(answer, 1) == [(0, 1, True)]
    assert on_ranks(answer, 3) == [(rank, 3, False) for rank in range(3)]


def test_what_a_rank_raises_is_raised() -> None:
    def of_a_run(world: World, _: Store | None) -> None:
        raise RunFailed(f"Rank {world.rank} has no more data.")

    def own(world: World, _: Store | None) -> float:
        return 1 / world.rank

    with pytest.raises(RunFailed, match=r"Rank 0 has no more data\."):
        on_ranks(of_a_run, 2)
    with pytest.raises(RuntimeError, match=r"(?s)^Rank 0 failed:\nTraceback.*in own\n.*ZeroDivisionError"):
        on_ranks(own, 2)


def test_a_rank_that_exits_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"^Rank 1 exited without a report\.$"):
        on_ranks(lambda world, _: os._exit(3) if world.rank == 1 else None, 2)


def test_ranks_that_do_not_end_are_killed_and_show_where_they_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def sleep(world: World, _: Store | None) -> None:
        (tmp_path / str(world.rank)).write_text(str(os.getpid()))
        time.sleep(600)

    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"^Rank 0 did not end within 0\.5 seconds\.$"):
        on_ranks(sleep, 2, timeout_s=0.5)
    assert time.monotonic() - began < 60
    assert len(re.findall(r"^Fatal Python error: Aborted", capfd.readouterr().err, re.MULTILINE)) == 2
    assert not any(Path(f"/proc/{path.read_text()}").exists() for path in tmp_path.iterdir())
