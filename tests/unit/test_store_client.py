"""What a process asks a store for: nothing follows from an answer that is late, and few questions are enough."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

from ddp_recipes.errors import RunFailed
from ddp_recipes.runtime.control import Control
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.world import World


class Watched(Store):
    """Hands calls on, counts them, and answers none while it is ``held``."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store, self.calls, self.open = store, Counter[str](), threading.Event()
        self.open.set()

    def _called(self, name: str) -> Store:
        self.calls[name] += 1
        self.open.wait()
        return self.store

    def set(self, key: str, value: str) -> None:  # type: ignore[override]
        self._called("set").set(key, value)

    def get(self, key: str) -> bytes:
        return self._called("get").get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return self._called("check").check(list(keys))

    def delete_key(self, key: str) -> bool:
        return self._called("delete_key").delete_key(key)

    def wait(self, keys: Sequence[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self._called("wait").wait(list(keys), timeout)


@pytest.fixture
def store() -> Watched:
    """A store of this process alone."""
    return Watched(HashStore())


@pytest.mark.slow
def test_after_a_late_answer_all_is_as_before(store: Watched) -> None:
    messages = Messages(store)
    store.open.clear()
    began = time.monotonic()
    assert messages.get("name", patience=0.1) is None
    messages.set("name", "text", patience=0.1)  # is written once the store answers
    assert messages.there("name", patience=0.1) == {}
    assert 0 < messages.silent_s < time.monotonic() - began
    store.open.set()
    assert messages.get("name", patience=60) == "text"
    assert (messages.silent_s, messages.closed) == (0.0, False)


@pytest.mark.slow
def test_another_connection_takes_the_place_of_a_dead_one(store: Watched) -> None:
    dead = Watched(store.store)
    dead.open.clear()
    messages = Messages(dead, connect=lambda: store)
    messages.set("name", "text", patience=60)
    assert messages.get("name", patience=60) == "text"
    assert dead.calls == {"set": 1}
    dead.open.set()


class Dropping(Store):
    """A connection that is closed as it is used."""

    def check(self, keys: Sequence[str]) -> bool:
        raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize(("dropped", "found"), [(3, "text"), (30, None)])
def test_connections_that_are_dropped_one_after_the_other_are_no_end_of_the_store(
    dropped: int, found: str | None, store: Watched
) -> None:
    Messages(store).set("name", "text", patience=60)
    connections = iter([*(Dropping() for _ in range(dropped)), store])
    messages = Messages(Dropping(), connect=lambda: next(connections))
    assert messages.get("name", patience=60) == found
    assert messages.closed == (found is None)


def test_whether_another_connection_was_opened_meanwhile_can_be_asked(store: Watched) -> None:
    Messages(store).set("name", "text", patience=60)
    connections = iter([Dropping(), store])
    messages = Messages(next(connections), connect=lambda: next(connections))
    opens_none = messages.opens_none()
    assert opens_none()
    assert messages.get("name", patience=60) == "text"
    assert not opens_none()  # such as one of those between ranks, which are counted while a group is set up
    assert messages.opens_none()()


@pytest.mark.slow
def test_what_a_rank_does_not_say_in_time_names_it(store: Watched) -> None:
    control = Control(World(1, 2), Messages(store, private=True), 0.1)
    with pytest.raises(RunFailed, match=r"Rank 0 of 2 did not arrive within launcher\.timeout_s=0\.1 seconds"):
        control.of_main("name", lambda: None)
    with pytest.raises(RunFailed, match=r"Rank 0 of 2 did not arrive within launcher\.timeout_s=0\.1 seconds"):
        control.shared([lambda: None])


def test_whether_there_are_lines_for_the_log_is_one_question_of_however_many_ranks(store: Watched) -> None:
    ranks = 512
    rank_0 = Control(World(0, ranks), Messages(store, private=True), 60.0)
    for _ in range(10):
        assert rank_0.received_logs() == []
    assert store.calls.total() == 10
    for rank in (3, 400):
        sender = Control(World(rank, ranks), Messages(store.store, private=True), 60.0)
        sender.send_log(f"first of {rank}")
        sender.send_log(f"second of {rank}")
        sender.tell("all", "sent")
    assert rank_0.received_logs() == ["first of 3", "second of 3", "first of 400", "second of 400"]
    before = store.calls.total()
    assert rank_0.received_logs() == []
    assert store.calls.total() <= before + 6  # those that delete what was read
    assert rank_0.received_logs(last=True) == []
    assert store.store.num_keys() == 2  # what was told
