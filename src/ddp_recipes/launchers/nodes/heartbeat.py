"""What nodes report to each other in a start: that they are there, whom they lost, that they leave. Loads torch."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ddp_recipes.runtime.messages import Messages

HEARTBEAT_S = 0.5
END_S = 30.0  # for the others to come to the end as well


@dataclass(frozen=True)
class Heartbeat:
    """What a node reports to the others.

    Attributes:
        number: grows, for as long as it is there.
        exited: its ranks that are lost.
        died: whether one of them did not raise an error, which could come of another one's loss.
        silent: ranks that did not respond to one of them.
        reported: how many losses its ranks have reported to the user.
        left: whether none of its ranks is in this start any more.
    """

    number: int = 0
    exited: tuple[int, ...] = ()
    died: bool = False
    silent: tuple[int, ...] = ()
    reported: int = 0
    left: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Heartbeat":
        """Return the one whose fields came as JSON."""
        return cls(**{**values, "exited": tuple(values["exited"]), "silent": tuple(values["silent"])})


class Heartbeats(threading.Thread):
    """Reports how this node is, and reads what the others report: a thread, for a store may not answer.

    Attributes:
        waiting: how many nodes want to join.
    """

    def __init__(
        self, messages: Messages, num_nodes_waiting: Callable[[], int], lost_after_s: float, node: int, nodes: int
    ) -> None:
        super().__init__(daemon=True)
        self._messages, self._num_nodes_waiting, self._node = messages, num_nodes_waiting, node
        self._lost_after_s = lost_after_s
        self._others = [other for other in range(nodes) if other != node]
        self._heartbeats = dict.fromkeys(self._others, Heartbeat())
        self._received = dict.fromkeys(self._others, time.monotonic())
        self._own, self._answered = Heartbeat(), time.monotonic()
        self._news, self._over = threading.Event(), False
        self.waiting = 0
        self.start()

    def run(self) -> None:
        """Look now and then."""
        number, over, patience = 0, False, self._lost_after_s  # a busy file server may take seconds
        names = {f"alive/{other}": other for other in self._others}
        while not over:
            self._news.wait(HEARTBEAT_S)
            self._news.clear()
            number, over = number + 1, self._over
            own = {**asdict(self._own), "number": number}
            self._messages.set(f"alive/{self._node}", json.dumps(own), patience)
            for name, text in self._messages.there(*names, patience=patience).items():
                heartbeat = Heartbeat.of(json.loads(text))
                if heartbeat != self._heartbeats[names[name]]:
                    self._heartbeats[names[name]], self._received[names[name]] = heartbeat, time.monotonic()
            if (waiting := self._messages.call(self._num_nodes_waiting, patience)) is not None:
                self.waiting, self._answered = waiting, time.monotonic()

    def update(self, exited: Iterable[int], died: bool, silent: Iterable[int], reported: int) -> None:
        """Have the others know soon how this node is."""
        lists = tuple(sorted(exited)), tuple(sorted(silent))
        self._publish(replace(self._own, exited=lists[0], died=died, silent=lists[1], reported=reported))

    def leave(self) -> None:
        """Have the others know that none of this node's ranks is in this start any more."""
        self._publish(replace(self._own, left=True))

    def _publish(self, own: Heartbeat) -> None:
        if own != self._own:
            self._own = own
            self._news.set()

    @property
    def cut_off(self) -> bool:
        """Whether the store no longer answers."""
        return time.monotonic() > self._answered + self._lost_after_s

    @property
    def lost(self) -> list[int]:
        """Nodes that have not reported for too long."""
        latest = time.monotonic() - self._lost_after_s
        there = () if self.cut_off else {*self._others} - {*self.left}
        return [node for node in there if self._received[node] < latest]

    @property
    def exited(self) -> set[int]:
        """Ranks that have exited on other nodes, by what those report."""
        return {rank for heartbeat in self._heartbeats.values() for rank in heartbeat.exited}

    @property
    def died(self) -> bool:
        """Whether one of those did not raise an error."""
        return any(heartbeat.died for heartbeat in self._heartbeats.values())

    @property
    def silent(self) -> set[int]:
        """Ranks that did not respond to ranks of other nodes before a timeout."""
        return {rank for heartbeat in self._heartbeats.values() for rank in heartbeat.silent}

    @property
    def reported(self) -> int:
        """How many losses ranks of other nodes have reported to the user."""
        return max((heartbeat.reported for heartbeat in self._heartbeats.values()), default=0)

    @property
    def left(self) -> list[int]:
        """Nodes whose ranks have left this start."""
        return [node for node in self._others if self._heartbeats[node].left]

    @property
    def all_known(self) -> bool:
        """Whether each other node has left this start, or is lost."""
        return self.cut_off or {*self._others} == {*self.left, *self.lost}

    @property
    def ended(self) -> bool:
        """Whether the first node has come to the end of the run."""
        return bool(self._messages.there("ended/0"))

    def end(self, wait: bool) -> None:
        """Be silent from now on; where all have come to the end, ``wait`` for them: the store is one's."""
        if wait:
            self._messages.set(f"ended/{self._node}", "", END_S)
            self._messages.wait([f"ended/{node}" for node in self._others], END_S, lambda: bool(self.lost))
        else:
            self.leave()
        self._over = True
        self._news.set()
        self.join(END_S)
