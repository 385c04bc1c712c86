"""What nodes say to each other in a start: that they are there, whom they have lost, that they leave. Loads torch."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ddp_recipes.runtime.messages import Messages

BEAT_S = 0.5
END_S = 30.0  # for the others to come to the end as well


@dataclass(frozen=True)
class Beat:
    """What a node says.

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
    def of(cls, values: Mapping[str, Any]) -> "Beat":
        """Return the one whose fields came as JSON."""
        return cls(**{**values, "exited": tuple(values["exited"]), "silent": tuple(values["silent"])})


class Alive(threading.Thread):
    """Says how this node is, and listens to the others: a thread, for a store may not answer.

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
        self._beats = dict.fromkeys(self._others, Beat())
        self._heard = dict.fromkeys(self._others, time.monotonic())
        self._own, self._answered = Beat(), time.monotonic()
        self._news, self._over = threading.Event(), False
        self.waiting = 0
        self.start()

    def run(self) -> None:
        """Look now and then."""
        number, over, patience = 0, False, self._lost_after_s  # a busy file server may take seconds
        names = {f"alive/{other}": other for other in self._others}
        while not over:
            self._news.wait(BEAT_S)
            self._news.clear()
            number, over = number + 1, self._over
            own = {**asdict(self._own), "number": number}
            self._messages.set(f"alive/{self._node}", json.dumps(own), patience)
            for name, text in self._messages.there(*names, patience=patience).items():
                beat = Beat.of(json.loads(text))
                if beat != self._beats[names[name]]:
                    self._beats[names[name]], self._heard[names[name]] = beat, time.monotonic()
            if (waiting := self._messages.call(self._num_nodes_waiting, patience)) is not None:
                self.waiting, self._answered = waiting, time.monotonic()

    def say(self, exited: Iterable[int], died: bool, silent: Iterable[int], reported: int) -> None:
        """Have the others know soon how this node is."""
        lists = tuple(sorted(exited)), tuple(sorted(silent))
        self._say(replace(self._own, exited=lists[0], died=died, silent=lists[1], reported=reported))

    def leave(self) -> None:
        """Have the others know that none of this node's ranks is in this start any more."""
        self._say(replace(self._own, left=True))

    def _say(self, own: Beat) -> None:
        if own != self._own:
            self._own = own
            self._news.set()

    @property
    def cut_off(self) -> bool:
        """Whether the store no longer answers."""
        return time.monotonic() > self._answered + self._lost_after_s

    @property
    def lost(self) -> list[int]:
        """Nodes that have not been heard for too long."""
        latest = time.monotonic() - self._lost_after_s
        there = () if self.cut_off else {*self._others} - {*self.left}
        return [node for node in there if self._heard[node] < latest]

    @property
    def exited(self) -> set[int]:
        """Ranks that have exited on other nodes, by what those report."""
        return {rank for beat in self._beats.values() for rank in beat.exited}

    @property
    def died(self) -> bool:
        """Whether one of those did not raise an error."""
        return any(beat.died for beat in self._beats.values())

    @property
    def silent(self) -> set[int]:
        """Ranks that did not respond to ranks of other nodes before a timeout."""
        return {rank for beat in self._beats.values() for rank in beat.silent}

    @property
    def reported(self) -> int:
        """How many losses ranks of other nodes have reported to the user."""
        return max((beat.reported for beat in self._beats.values()), default=0)

    @property
    def left(self) -> list[int]:
        """Nodes whose ranks have left this start."""
        return [node for node in self._others if self._beats[node].left]

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
