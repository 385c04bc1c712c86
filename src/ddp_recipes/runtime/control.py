"""Messages between ranks outside of collectives, over the launcher's store: ready, failed, and what to log."""

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
from ddp_recipes.errors import RequestError, RunFailed, did_not_arrive, exited_without_report
from ddp_recipes.runtime.world import World

T = TypeVar("T")

CALL_S = 1.5  # for one call of the store, once something has failed
VERDICT_S = 2.0  # for rank 0 to name the rank that it waited for, before it times out itself
FAILURE_S = 2.5  # for the other ranks to fail as well, once a collective has timed out
STAY_S = 3.0  # for the others to read why they do not start
LOG_S = 5.0  # for a line that a rank has announced
LOOK_S = 1.0  # between looks at whether the process that is waited for has exited


class Control:
    """The messages of one run. With one process there is no store and nobody to send them to.

    Args:
        exited: returns the ranks whose process is known to have exited, which need not be waited for.
    """

    def __init__(
        self, world: World, store: Store | None, timeout_s: float, exited: Callable[[], Iterable[int]] = tuple
    ) -> None:
        self.world = world
        self.store = store
        self.timeout_s = timeout_s
        self._exited = exited
        self._logged = 0
        self._calls = BoundedCalls()

    def agree(self, error: Exception | None, facts: Mapping[str, str]) -> None:
        """Start together or not at all: every rank reports whether it is ready and with what; rank 0 compares.

        Args:
            error: why this rank cannot start, if it cannot.
            facts: what must be equal on all ranks, by name (digests, versions).

        Raises:
            RequestError: some rank cannot do what was requested, or ranks differ; the same message on every rank.
            RunFailed: a rank failed while it got ready, or is missing after the timeout; names it.
        """
        if self.store is None:
            return
        kind = "ready" if error is None else "refused" if isinstance(error, RequestError) else "failed"
        self.store.set(f"ready/{self.world.rank}", json.dumps([kind, str(error), dict(facts)]))
        if self.world.is_main:
            self.store.set("verdict", json.dumps(self._verdict(facts)))
        try:
            self._wait("ready/0", self.timeout_s, 0)
            kind, text, ranks = json.loads(self._wait("verdict", self.timeout_s + VERDICT_S, 0))
        except TimeoutError:
            kind, text, ranks = "missing", self._absent([0]), [0]
        if kind == "ready":
            return
        self._stay_until_read(by=self.world.world_size - (len(ranks) if kind == "missing" else 0))
        if kind == "missing":
            raise RunFailed(text, unresponsive=ranks)
        if self.world.rank not in ranks:  # that rank raises its own error
            raise RequestError(text) if kind == "refused" else RunFailed(text, rank=ranks[0])

    def _verdict(self, facts: Mapping[str, str]) -> tuple[str, str, list[int]]:
        """Return ``ready``, ``refused``, ``failed`` or ``missing``, why, and the ranks it is about."""
        deadline = time.monotonic() + self.timeout_s
        missing, differing = [], []
        for rank in range(self.world.world_size):
            try:
                report = self._wait(f"ready/{rank}", max(0.1, deadline - time.monotonic()), rank)
            except TimeoutError:
                missing.append(rank)
                continue
            kind, text, theirs = json.loads(report)
            if kind == "refused":
                return kind, text, [rank]
            if kind == "failed":
                return kind, f"Rank {rank} failed while it got ready: {text}", [rank]
            differing += [
                f"{name}: {value} on rank 0, {theirs.get(name)} on rank {rank}"
                for name, value in facts.items()
                if theirs.get(name) != value
            ]
        if missing:
            return "missing", self._absent(missing), missing
        if differing:
            listed = "\n  ".join(differing[:8])
            same = "Use one version, one config and one run directory on every node."
            return "refused", f"The ranks differ:\n  {listed}\n{same}", []
        return "ready", "", []

    def _stay_until_read(self, by: int) -> None:
        """Keep rank 0, and with it the store, until so many ranks have read why they do not start."""
        assert self.store is not None
        count = self._calls.do(partial(self.store.add, "read", 1), 0)
        deadline = time.monotonic() + STAY_S
        while self.world.is_main and count < by and time.monotonic() < deadline:
            time.sleep(0.02)
            count = self.store.add("read", 0)

    def _absent(self, ranks: Iterable[int]) -> str:
        """Return the message on ranks that did not respond."""
        if exited := {*ranks} & {*self._exited()}:
            return exited_without_report(exited, self.world.world_size)
        return did_not_arrive(ranks, self.world.world_size, self.timeout_s)

    def _wait(self, name: str, seconds: float, rank: int) -> str:
        """Return a value that another rank sets; raise ``TimeoutError`` if it does not, or that rank has exited."""
        deadline = time.monotonic() + seconds
        exited = False
        while not self._calls.unanswered and (left := deadline - time.monotonic()) > 0:
            if (value := self._get(name, min(left, LOOK_S))) is not None:
                return value
            if exited:
                break
            exited = rank in self._exited()  # what it had set is there: look once more
        raise TimeoutError(name)

    def _get(self, name: str, seconds: float) -> str | None:
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
        return self._calls.do(get, None, seconds + CALL_S)

    def first_on_node(self, make: Callable[[], T], what: str = "data") -> T:
        """Call ``make()`` on one rank of each node before the others: downloads happen once. Raise if it failed."""
        made: list[T] = []
        first, node = self.world.rank - self.world.local_rank, self.world.node_rank
        failed = f"Local rank 0 of node {node} could not prepare the data; see its message."
        self._of_rank(first, f"node/{node}/{what}", lambda: made.append(make()), failed)
        return made[0] if made else make()

    def of_main(self, name: str, make: Callable[[], T]) -> T:
        """Return on every rank what ``make()`` returns on rank 0, plain data; raise if it failed there."""
        return self._of_rank(0, name, make, f"Rank 0 could not give the others its {name}; see its message.")

    def _of_rank(self, rank: int, name: str, make: Callable[[], T], failed: str) -> T:
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
        """Record a failure and which rank's it is; return rank and text of the first one, the cause of the others."""
        store, mine = self.store, json.dumps([culprit, text])
        if store is None:
            return culprit, text
        self._calls.do(partial(store.set, f"failed/{self.world.rank}", ""), None)
        rank, cause = json.loads(self._calls.do(partial(store.compare_set, "failure", "", mine), mine.encode()))
        return rank, cause

    def unresponsive_ranks(self) -> list[int]:
        """Return the ranks that have not failed a short while after this one timed out: it waited for them."""
        store = self.store
        if store is None:
            return []
        others = {*range(self.world.world_size)} - {self.world.rank}
        deadline = time.monotonic() + FAILURE_S
        while others and not self._calls.unanswered and time.monotonic() < deadline:
            others -= {rank for rank in others if self._calls.do(partial(store.check, [f"failed/{rank}"]), False)}
            time.sleep(0.05)
        return sorted(others)

    def send_log(self, line: str) -> None:
        """Send a line to rank 0's log."""
        if self.store is not None:
            number = self.store.add("log/count", 1)
            self.store.set(f"log/{number}", line)

    def received_logs(self) -> list[str]:
        """Return the lines that other ranks sent since the last call; rank 0 only."""
        if self.store is None:
            return []
        count = self.store.add("log/count", 0)
        lines = [self._get(f"log/{number}", LOG_S) for number in range(self._logged + 1, count + 1)]
        self._logged = count
        return [line.rstrip() for line in lines if line is not None]


def has_failed(store: Store, rank: int) -> bool:
    """Whether a rank has recorded that it failed, which it does before it leaves the others."""
    return store.check([f"failed/{rank}"])


class BoundedCalls:
    """Calls to a store whose process may be dead, stopped or cut off: after one without an answer none is made."""

    def __init__(self) -> None:
        self.unanswered = False

    def do(self, call: Callable[[], T], otherwise: T, seconds: float = CALL_S) -> T:
        """Return what the call returns, or ``otherwise`` if there is no answer in time."""
        if self.unanswered:
            return otherwise
        outcome: list[T] = []

        def run() -> None:
            with suppress(RuntimeError):
                outcome.append(call())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
        self.unanswered = not outcome
        return outcome[0] if outcome else otherwise


class ForwardHandler(logging.Handler):
    """Sends warnings and errors of a rank that has no log of its own to rank 0."""

    def __init__(self, control: Control) -> None:
        super().__init__(logging.WARNING)
        self.control = control

    def emit(self, record: logging.LogRecord) -> None:
        """Send the formatted record; a run does not end by a log line that gets lost."""
        try:
            self.control.send_log(f"rank {self.control.world.rank}: {self.format(record)}")
        except RuntimeError:
            self.handleError(record)
