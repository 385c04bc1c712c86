"""What ranks tell each other outside of collectives, over the launcher's store: ready, failed, and what to log."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

from torch.distributed import Store

from ddp_recipes._compat.messages import timed_out
from ddp_recipes.errors import RequestError, RunFailed, ended_without_word, not_arrived
from ddp_recipes.runtime.world import World

T = TypeVar("T")

STORE_PATIENCE_S = 1.5  # for one answer of the store, once something has failed
VERDICT_S = 2.0  # for rank 0 to say which rank it waited for in vain, before it is itself taken to be gone
SILENCE_S = 2.5  # for the other ranks to fail as well, once a collective has timed out
LOG_S = 5.0  # for a line that a rank has announced
LOOK_S = 1.0  # between looks at whether the process that is waited for has ended


class Control:
    """One run's messages. With one process there is no store and nothing to say.

    Args:
        gone: tells the ranks whose process is known to have ended, which need not be waited for.
    """

    def __init__(
        self, world: World, store: Store | None, timeout_s: float, gone: Callable[[], Iterable[int]] = tuple
    ) -> None:
        self.world = world
        self.store = store
        self.timeout_s = timeout_s
        self._gone = gone
        self._logged = 0
        self._patience = Patience()

    def agree(self, error: Exception | None, facts: Mapping[str, str]) -> None:
        """Start together or not at all: every rank says whether it is ready and with what; rank 0 compares.

        Args:
            error: why this rank cannot start, if it cannot.
            facts: what must be equal on all ranks, by name (digests, versions).

        Raises:
            RequestError: some rank was asked for what cannot be, or ranks differ; the same message on every rank.
            RunFailed: a rank failed while it got ready, or is missing after the timeout; names it.
        """
        if self.store is None:
            return
        kind = "ready" if error is None else "refused" if isinstance(error, RequestError) else "failed"
        said = {"kind": kind, "text": str(error), "facts": dict(facts)}
        self.store.set(f"ready/{self.world.rank}", json.dumps(said))
        if self.world.is_main:
            self.store.set("verdict", json.dumps(self._verdict(facts)))
        try:
            self._wait("ready/0", self.timeout_s, 0)
            kind, text, ranks = json.loads(self._wait("verdict", self.timeout_s + VERDICT_S, 0))
        except TimeoutError:
            kind, text, ranks = "missing", self._absent([0]), [0]
        if kind == "missing":
            self._stay_until_others_know(len(ranks))
            raise RunFailed(text, silent=ranks)
        if kind == "go":
            return
        self._stay_until_others_know()
        if self.world.rank not in ranks:  # the rank itself knows better
            raise RequestError(text) if kind == "refused" else RunFailed(text, rank=ranks[0])

    def _verdict(self, facts: Mapping[str, str]) -> tuple[str, str, list[int]]:
        """Return ``go``, ``refused``, ``failed`` or ``missing``, why, and the ranks it is about."""
        deadline = time.monotonic() + self.timeout_s
        missing = []
        differing = []
        for rank in range(self.world.world_size):
            try:
                said = json.loads(self._wait(f"ready/{rank}", max(0.1, deadline - time.monotonic()), rank))
            except TimeoutError:
                missing.append(rank)
                continue
            if said["kind"] == "refused":
                return "refused", said["text"], [rank]
            if said["kind"] == "failed":
                return "failed", f"Rank {rank} failed while it got ready: {said['text']}", [rank]
            differing += [
                f"{name}: {value} on rank 0, {said['facts'].get(name)} on rank {rank}"
                for name, value in facts.items()
                if said["facts"].get(name) != value
            ]
        if missing:
            return "missing", self._absent(missing), missing
        if differing:
            listed = "\n  ".join(differing[:8])
            return (
                "refused",
                f"The ranks differ:\n  {listed}\nUse one version, one config and one run directory on every node.",
                [],
            )
        return "go", "", []

    def _stay_until_others_know(self, absent: int = 0) -> None:
        """Keep rank 0, and with it the store, until the others that are there have read why they do not start."""
        assert self.store is not None
        told = self._patience.ask(partial(self.store.add, "told", 1), 0)
        deadline = time.monotonic() + 3
        while self.world.is_main and told + absent < self.world.world_size and time.monotonic() < deadline:
            time.sleep(0.02)
            told = self.store.add("told", 0)

    def _absent(self, ranks: Iterable[int]) -> str:
        """Say of ranks that were waited for in vain what became of them."""
        gone = {*ranks} & {*self._gone()}
        if gone:
            return ended_without_word(gone, self.world.world_size)
        return not_arrived(ranks, self.world.world_size, self.timeout_s)

    def _wait(self, name: str, seconds: float, rank: int) -> str:
        """Return a value of another rank once it is there.

        Raises:
            TimeoutError: it did not come in time, or the store is gone, or the rank that was to write it.
        """
        deadline = time.monotonic() + seconds
        ended = False
        while not self._patience.lost and (left := deadline - time.monotonic()) > 0:
            if (value := self._ask(name, min(left, LOOK_S))) is not None:
                return value
            if ended:
                break
            ended = rank in self._gone()  # what it had written is there
        raise TimeoutError(name)

    def _ask(self, name: str, seconds: float) -> str | None:
        """Return a value if it is there in time."""
        store = self.store
        assert store is not None

        def get() -> str | None:
            try:
                store.wait([name], timedelta(seconds=seconds))
            except RuntimeError as error:
                if not timed_out(error):
                    raise
                return None
            return store.get(name).decode()

        # Where the process with the store is stopped, torch's own timeout waits for its answer for ever.
        return self._patience.ask(get, None, seconds + STORE_PATIENCE_S)

    def first_on_node(self, make: Any) -> Any:
        """Call ``make()`` on one rank of each node before the others: downloads happen once.

        Raises:
            RequestError: the first one failed, on the others.
        """
        made: list[Any] = []
        first = self.world.rank - self.world.local_rank
        failed = f"Local rank 0 of node {self.world.node_rank} could not prepare the data; see its message."
        self._of_rank(first, f"node/{self.world.node_rank}", lambda: made.append(make()), failed)
        return made[0] if made else make()

    def of_main(self, name: str, make: Callable[[], T]) -> T:
        """Return on every rank what ``make()`` returns on rank 0: plain data.

        Raises:
            RequestError: rank 0 failed, on the others.
        """
        return self._of_rank(0, name, make, f"Rank 0 could not give the others its {name}; see its message.")

    def _of_rank(self, rank: int, name: str, make: Callable[[], T], failed: str) -> T:
        """Return what ``make()`` returns on one rank, plain data, on each rank that asks; or raise if it failed."""
        if self.store is None:
            return make()
        if self.world.rank == rank:
            outcome: list[Any] = []
            try:
                outcome = [make()]
            finally:
                self.store.set(name, json.dumps(outcome))
        else:
            outcome = json.loads(self._wait(name, self.timeout_s, rank))
        if not outcome:
            raise RequestError(failed)
        return cast(T, outcome[0])

    def fail(self, text: str, culprit: int) -> tuple[int, str]:
        """Record a failure and whose it is; return the rank and text of the first one, the cause of the others."""
        store, mine = self.store, json.dumps([culprit, text])
        if store is None:
            return culprit, text
        self._patience.ask(partial(store.set, f"ended/{self.world.rank}", "failed"), None)
        first = self._patience.ask(partial(store.compare_set, "failure", "", mine), mine.encode())
        rank, cause = json.loads(first)
        return rank, cause

    def silent_ranks(self) -> list[int]:
        """Return the ranks that have not failed a short while after this one timed out: it was them it waited for."""
        store = self.store
        if store is None:
            return []
        others = {rank for rank in range(self.world.world_size) if rank != self.world.rank}
        deadline = time.monotonic() + SILENCE_S
        while others and not self._patience.lost and time.monotonic() < deadline:
            others -= {rank for rank in others if self._patience.ask(partial(store.check, [f"ended/{rank}"]), False)}
            time.sleep(0.05)
        return sorted(others)

    def send_log(self, line: str) -> None:
        """Hand a line to rank 0's log."""
        if self.store is not None:
            number = self.store.add("log/count", 1)
            self.store.set(f"log/{number}", line)

    def received_logs(self) -> list[str]:
        """Return the lines that other ranks handed over since the last call; rank 0 only."""
        if self.store is None:
            return []
        count = self.store.add("log/count", 0)
        lines = [self._ask(f"log/{number}", LOG_S) for number in range(self._logged + 1, count + 1)]
        self._logged = count
        return [line.rstrip() for line in lines if line is not None]


class Patience:
    """Asks the store, which may have died, been stopped or cut off with its rank: briefly, and in vain only once."""

    def __init__(self) -> None:
        self.lost = False

    def ask(self, call: Callable[[], T], otherwise: T, seconds: float = STORE_PATIENCE_S) -> T:
        """Return what the call returns, or ``otherwise`` if there is no answer."""
        if self.lost:
            return otherwise
        outcome: list[T] = []

        def run() -> None:
            with suppress(RuntimeError):
                outcome.append(call())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
        self.lost = not outcome
        return outcome[0] if outcome else otherwise


class ForwardHandler(logging.Handler):
    """Sends warnings and errors of a rank that has no log of its own to rank 0."""

    def __init__(self, control: Control) -> None:
        super().__init__(logging.WARNING)
        self.control = control

    def emit(self, record: logging.LogRecord) -> None:
        """Hand the formatted record over; a run is not ended by a log line that gets lost."""
        try:
            self.control.send_log(f"rank {self.control.world.rank}: {self.format(record)}")
        except RuntimeError:
            self.handleError(record)
