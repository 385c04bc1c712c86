"""How ranks end together."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from time import sleep
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.control import OWN, Control
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.world import World

PATIENCE_S = 60.0
RANK_0 = """
from torch.distributed import TCPStore
from ddp_recipes.runtime.control import Control
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.world import World
store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
Control(World(0, 2), Messages(store), 60.0).end([0, 1])
"""


class Slow(Messages):
    """Those of a rank on a busy machine: it reads its own last message only once rank 0 could be gone."""

    def get(self, name: str, *others: Any, **named: Any) -> str | None:
        if name == "ended/all":
            sleep(1.0)
        return super().get(name, *others, **named)


@pytest.mark.slow
def test_rank_0_keeps_the_store_until_a_slow_rank_has_read_that_all_have_ended(python: str) -> None:
    with subprocess.Popen([python, "-c", RANK_0], stdout=subprocess.PIPE, text=True) as rank_0:
        assert rank_0.stdout is not None
        store = TCPStore("127.0.0.1", int(rank_0.stdout.readline()), 2, is_master=False)
        Control(World(1, 2), Slow(store), PATIENCE_S).end([0, 1])
    assert rank_0.returncode == 0


class Late(Messages):
    """Those of a rank whose store has no answer at once."""

    def get(self, name: str, *others: Any, **named: Any) -> str | None:
        return super().get(name, *others, **named) if others or named else None


def test_notes_of_ranks_that_have_ended_are_waited_for() -> None:
    store = HashStore()

    def end(rank: int) -> list[str]:
        return Control(World(rank, 2), Late(store), PATIENCE_S).end([0, 1], f"note of {rank}")

    with ThreadPoolExecutor(2) as ranks:
        ends = [ended.result() for ended in [ranks.submit(end, rank) for rank in (0, 1)]]
    assert ends == [["note of 0", "note of 1"], []]


@pytest.mark.parametrize("taken", [("one", "one"), ("one", "other"), ("", "")])
def test_two_ranks_on_one_device_are_refused(taken: tuple[str, str]) -> None:
    store = HashStore()

    def agree(rank: int) -> None:
        Control(World(rank, 2), Messages(store), PATIENCE_S).agree(None, {OWN: taken[rank]})

    with ThreadPoolExecutor(2) as ranks:
        ends = [ended.exception() for ended in [ranks.submit(agree, rank) for rank in (0, 1)]]
    if taken == ("one", "one"):
        assert all(isinstance(each, RequestError) for each in ends)
        assert "Ranks 0 and 1 would both be on the device one." in str(ends[0])
    else:
        assert ends == [None, None]
