"""Whether the nodes of a start are there: each says so now and then, and listens to the others. Loads torch."""

import threading
import time
from collections.abc import Callable

from ddp_recipes.runtime.messages import Messages

BEAT_S = 0.5
END_S = 30.0  # for the others to come to the end as well


class Alive(threading.Thread):
    """Says that this node is alive, and listens whether others are: a thread, for a store may not answer."""

    def __init__(
        self, messages: Messages, num_nodes_waiting: Callable[[], int], lost_after_s: float, node: int, nodes: int
    ) -> None:
        super().__init__(daemon=True)
        self._messages, self._num_nodes_waiting, self._node = messages, num_nodes_waiting, node
        self._lost_after_s = lost_after_s
        self._heard = {other: ("", time.monotonic()) for other in range(nodes) if other != node}
        self._answered = time.monotonic()
        self._over = threading.Event()
        self.waiting = 0  # nodes that want to join
        self.start()

    def run(self) -> None:
        """Look now and then."""
        beats = 0
        while not self._over.wait(BEAT_S):
            beats += 1
            self._messages.set(f"alive/{self._node}", str(beats))
            for other, (before, _) in list(self._heard.items()):
                if (beat := self._messages.get(f"alive/{other}") or "") != before:
                    self._heard[other] = (beat, time.monotonic())
            waiting = self._messages.call(self._num_nodes_waiting, None)
            if self._messages.lost or waiting is None:
                return
            self.waiting, self._answered = waiting, time.monotonic()

    @property
    def cut_off(self) -> bool:
        """Whether the store no longer answers."""
        return time.monotonic() > self._answered + self._lost_after_s

    @property
    def lost(self) -> list[int]:
        """Nodes that have not been heard for too long."""
        latest = time.monotonic() - self._lost_after_s
        return [] if self.cut_off else [node for node, (_, heard) in list(self._heard.items()) if heard < latest]

    @property
    def all_known(self) -> bool:
        """Whether each other node has left this start, or is lost."""
        names = {f"left/{node}" for node in self._heard if node not in self.lost}
        return self.cut_off or len(self._messages.there(*names)) == len(names)

    def end(self, wait: bool) -> None:
        """Be silent from now on; where all have come to the end, ``wait`` for them: the store is one's."""
        if not wait:
            self._messages.set(f"left/{self._node}", "")
        else:
            self._messages.set(f"ended/{self._node}", "")
            deadline = time.monotonic() + END_S
            names = [f"ended/{node}" for node in self._heard]
            while len(self._messages.there(*names)) < len(names) and not self._messages.lost and not self.lost:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
        self._over.set()
        self.join(END_S)

    @property
    def ended(self) -> bool:
        """Whether the first node has come to the end of the run."""
        return bool(self._messages.there("ended/0"))

    @property
    def first_left(self) -> bool:
        """Whether the first node has left this start, though the run goes on."""
        return bool(self._messages.there("left/0"))
