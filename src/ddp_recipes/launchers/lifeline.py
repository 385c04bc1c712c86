"""A rank's side of the pipes to its launcher: what is said while it runs. Loads torch once ranks meet again."""

import json
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING

from ddp_recipes.runtime.meeting import Loss, Meeting

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
        self._answers: SimpleQueue[Meeting | None] = SimpleQueue()
        self._exited: set[int] = set()
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        """Read to the end, whatever ended the launcher."""
        for line in self._pipe:
            word = json.loads(line)
            if "exited" in word:
                self._exited = {*word["exited"]}
            else:
                self._exited = set()
                self._answers.put(None if word["meeting"] is None else Meeting.of(word["meeting"]))
        os._exit(1)

    def joined(self) -> None:
        """Tell the launcher that this rank has joined the others."""
        self._say(json.dumps({"joined": True}))

    def exited(self) -> set[int]:
        """Return the ranks that have exited since all last met."""
        return self._exited

    def ask(self, loss: Loss) -> "tuple[Meeting, Messages] | None":
        """Tell the launcher of a loss, and wait for its word: where ranks meet again, or that the run ends."""
        from ddp_recipes.launchers.store import in_file

        self._say(loss.to_json())
        meeting = self._answers.get()
        return None if meeting is None else (meeting, in_file(os.open(meeting.file, os.O_RDWR)))
