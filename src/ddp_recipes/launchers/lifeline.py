"""A rank's side of the pipes to its launcher: what is said while it runs. Loads torch once ranks meet again."""

import json
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING

from ddp_recipes.runtime.meeting import Leaving, Loss, Meeting
from ddp_recipes.runtime.watcher import Watcher

if TYPE_CHECKING:
    from ddp_recipes.runtime.messages import Messages


class Lifeline:
    """Brings the launcher's word, a line each; its end is the launcher's end, and this process's.

    Args:
        pipe: to read from.
        say: sends the launcher a line.
    """

    def __init__(self, pipe: IO[bytes], say: Callable[[str], None]) -> None:
        self._pipe, self._say = pipe, say
        self._answers: SimpleQueue[Meeting | Leaving | None] = SimpleQueue()
        self._exited: set[int] = set()
        self._moves = False
        self._lost = False  # whether a rank is, since all last met
        self._when_lost: Callable[[], None] = lambda: None
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        """Read to the end, whatever ended the launcher."""
        for line in self._pipe:
            word = json.loads(line)
            if "exited" in word:
                self._exited, self._lost = {*word["exited"]}, True
                self._when_lost()  # what it aborts has ended before the next word is read
            elif "move" in word:
                self._moves = True
            elif "leave" in word:
                self._answers.put(Leaving(word["leave"]))
            else:
                self._exited, self._lost = set(), False
                self._answers.put(None if word["meeting"] is None else Meeting.of(word["meeting"]))
        os._exit(1)

    @property
    def watcher(self) -> Watcher:
        """The functions that the rank calls to watch the others and to report to the launcher."""
        return Watcher(self.exited, self.joined, self.reported, self.ask, self.when_lost, lambda: self._moves)

    def joined(self) -> None:
        """Tell the launcher that this rank has joined the others."""
        self._say(json.dumps({"joined": True}))

    def reported(self, losses: int) -> None:
        """Report to the launcher how many losses are reported to the user."""
        self._say(json.dumps({"reported": losses}))

    def exited(self) -> set[int]:
        """Return the ranks that have exited since all last met."""
        return self._exited

    def when_lost(self, call: Callable[[], None]) -> None:
        """Have another thread call this once a rank is lost; one that is already is no exception."""
        self._when_lost = call
        if self._lost:
            call()

    def ask(self, loss: Loss) -> "tuple[Meeting, Messages] | Leaving | None":
        """Tell the launcher of a loss, and wait for its word: where ranks meet again, or that they do not."""
        from ddp_recipes.launchers.store import in_file

        self._say(loss.to_json())
        meeting = self._answers.get()
        if isinstance(meeting, Meeting):
            return meeting, in_file(os.open(meeting.file, os.O_RDWR))
        return meeting
