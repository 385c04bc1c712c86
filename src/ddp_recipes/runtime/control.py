"""What ranks say outside of collectives, over the launcher's store: ready, failed, ended, and what to log."""

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from ddp_recipes.errors import (
    RequestError,
    RunFailed,
    did_not_arrive,
    did_not_end,
    exited_without_report,
    store_is_silent,
)
from ddp_recipes.runtime.job import ExitRequest, Loss, Regroup, Watcher
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.world import World

T = TypeVar("T")

OWN = "device"  # a fact
FELL_BACK = "whole model made"  # another one: why a rank did otherwise than planned, or "no"
_ONE_EACH = "Start no more ranks than there are devices (nproc_per_node), or give each task one of its own."
VERDICT_S = 2.0  # for rank 0 to name the rank that it waited for, before it times out itself
FAILURE_S = 2.5  # for the other ranks to fail as well, once a collective has timed out
STAY_S = 3.0  # for the others to read why they do not start, or that all have come to their end
NOBODY = Watcher()
NEWS_S = 0.2  # for the store to say whether there are lines for the log
LOG_S = 2.0  # for rank 0 to read them
HOLDS_S = 10.0  # for the store to say whether a rank had failed
MOST_LINES = 1000  # of a rank's log at once


class Control:
    """The messages of one run. With one process there are none, and nobody to send them to."""

    def __init__(
        self,
        world: World,
        messages: Messages | None,
        timeout_s: float,
        watcher: Watcher = NOBODY,
    ) -> None:
        self.world = world
        self.messages = messages
        self.timeout_s = timeout_s
        self.watcher = watcher
        self.joins = False  # whether this rank takes the place of a lost one, and the others know what was agreed on
        self._outcomes: dict[str, list[Any]] = {}  # of what one rank made for the others
        self.connections = set[int]()  # to the other ranks, by their inodes
        self.unexpected = set[int]()  # other users who connected to this rank while ranks met
        self._sent = self._shared = 0
        self._read = dict.fromkeys(range(1, world.world_size), 0)  # lines of each rank's log

    def await_regroup(self, loss: Loss) -> Regroup | ExitRequest | None:
        """Report to the launcher that another rank is lost, and wait; return where the ranks regroup, if they do.

        New ranks find there what all agreed on before.
        """
        if not isinstance(found := self.watcher.request(loss), tuple):
            return found
        regroup, self.messages = found
        self._sent = self._shared = 0
        self._read = dict.fromkeys(self._read, 0)
        for name, outcome in self._outcomes.items():
            self.messages.set(name, json.dumps(outcome))
        return regroup

    def agree(self, error: Exception | None, facts: Mapping[str, str]) -> None:
        """Start together or not at all: every rank reports whether it is ready and with what; rank 0 compares.

        Args:
            error: why this rank cannot start, if it cannot.
            facts: what must be equal on all ranks, by name (digests, versions); of ``OWN`` no two may have the same. If
                some fell back (``FELL_BACK``) and others did not, those have failed.

        Raises:
            RequestError: some rank cannot do what was requested, or ranks differ; the same message on every rank.
            RunFailed: a rank failed while it got ready, or is missing after the timeout; names it.
        """
        if self.messages is None:
            return
        kind = "ready" if error is None else "refused" if isinstance(error, RequestError) else "failed"
        self.messages.set(f"ready/{self.world.rank}", json.dumps([kind, str(error), dict(facts)]))
        if self.world.is_main:
            self.messages.set("verdict", json.dumps(self._verdict(facts)))
        verdict = self._said("ready/0", self.timeout_s, 0) and self._said("verdict", self.timeout_s + VERDICT_S, 0)
        if verdict is None:
            kind, text, ranks = self._missing([0])
        else:
            kind, text, ranks = json.loads(verdict)
        if kind == "ready":
            return
        self._stay_until_read({*range(self.world.world_size)} - {*(ranks if kind == "missing" else ())})
        if kind == "missing":
            raise RunFailed(text, unresponsive=ranks)
        if self.world.rank not in ranks or error is None:  # else that rank raises its own error
            raise RequestError(text) if kind == "refused" else RunFailed(text, rank=ranks[0])

    def _verdict(self, facts: Mapping[str, str]) -> tuple[str, str, list[int]]:
        """Return ``ready``, ``refused``, ``failed`` or ``missing``, why, and the ranks it is about."""
        deadline = time.monotonic() + self.timeout_s
        missing, differing, owners, fell_back = [], [], dict[str, int](), dict[int, str]()
        for rank in range(self.world.world_size):
            report = self._said(f"ready/{rank}", max(0.1, deadline - time.monotonic()), rank)
            if report is None:
                missing.append(rank)
                continue
            kind, text, theirs = json.loads(report)
            if kind == "refused":
                return kind, text, [rank]
            if kind == "failed":
                return kind, f"Rank {rank} failed while it got ready: {text}", [rank]
            fell_back[rank] = theirs.get(FELL_BACK, "no")
            if (own := theirs.get(OWN)) and (other := owners.setdefault(own, rank)) != rank:
                return "refused", f"Ranks {other} and {rank} would both be on the device {own}. {_ONE_EACH}", []
            differing += [
                f"{name}: {value} on rank 0, {theirs.get(name)} on rank {rank}"
                for name, value in facts.items()
                if name != OWN and theirs.get(name) != value
            ]
        if missing:
            return self._missing(missing)
        alone = [rank for rank, why in fell_back.items() if why != "no"]
        if 0 < len(alone) < len(fell_back):  # where all do, it is how the model is made
            text = f"Rank {alone[0]} failed while it got ready, where others did not: {fell_back[alone[0]]}"
            return "failed", text, alone
        if differing:
            listed = "\n  ".join(differing[:8])
            same = "Use one version, one config, the same data and one run directory on every node."
            return "refused", f"The ranks differ. {same}\n  {listed}", []
        return "ready", "", []

    def _stay_until_read(self, by: Iterable[int], seconds: float = STAY_S) -> None:
        """Keep rank 0, and with it the store if that is rank 0's, until these ranks have read what was last said."""
        assert self.messages is not None
        if self.messages.private:
            return
        self.messages.set(f"read/{self.world.rank}", "")
        if self.world.is_main:
            self._await("read", by, seconds)

    def refuse_together(self, text: str) -> None:
        """Stay, on a rank that found what all refuse once it had joined, until the others have: they may still join.

        Those that have not found it fail for the lack of this rank, and give ``text`` as the cause.
        """
        self.fail(text, self.world.rank)
        if self.messages is not None:
            self.messages.set(f"refusing/{self.world.rank}", "")
            self._await("refusing", {*range(self.world.world_size)} - {self.world.rank}, STAY_S)

    def _await(self, name: str, ranks: Iterable[int], seconds: float, strict: bool = False) -> set[int]:
        """Wait until these ranks have written something, as long as they live; return which have not."""
        assert self.messages is not None
        names, deadline = {f"{name}/{rank}": rank for rank in ranks}, time.monotonic() + seconds
        while waited := {name: rank for name, rank in names.items() if rank not in self.watcher.exited()}:
            exited, left = partial(self._some_exited, waited), deadline - time.monotonic()
            there = self.messages.wait([*waited], left, exited, strict)
            if there and len(waited) == len(names):
                return set()
            if there or self.messages.closed or time.monotonic() > deadline:
                break
        return {*names.values()} - {names[name] for name in self.messages.there(*names)}

    def _some_exited(self, waited: Mapping[str, int]) -> bool:
        return not {*waited.values()}.isdisjoint(self.watcher.exited())

    def _missing(self, ranks: Iterable[int]) -> tuple[str, str, list[int]]:
        """Return the verdict on a start whose other ranks do not respond."""
        assert self.messages is not None
        ranks = self._silent(ranks)
        return "missing", self._absent(ranks) if ranks else store_is_silent(self.messages.silent_s), ranks

    def _silent(self, ranks: Iterable[int]) -> list[int]:
        """Return which ranks kept this one waiting for these: where the store does not respond, those that have it."""
        assert self.messages is not None
        # It is in a file that one has locked, or another process has it: then nothing is known of the others.
        return self.messages.holders() if self.messages.silent else sorted(ranks)

    def _absent(self, ranks: Iterable[int]) -> str:
        """Return the message on ranks that did not respond."""
        if exited := {*ranks} & {*self.watcher.exited()}:
            return exited_without_report(exited, self.world.world_size)
        return did_not_arrive(ranks, self.world.world_size, self.timeout_s)

    def _said(self, name: str, seconds: float, rank: int) -> str | None:
        """Return another rank's message; nothing if there is none in time, or that rank has exited without one."""
        assert self.messages is not None
        return self.messages.get(name, seconds, lambda: rank in self.watcher.exited())

    def _loaded(self, text: str | None, rank: int) -> Any:
        """Return what a rank has written; raise if that is nothing."""
        if text is None:
            _, why, ranks = self._missing([rank])
            raise RunFailed(why, unresponsive=ranks)
        return json.loads(text)

    def tell(self, name: str, value: object) -> None:
        """Write a value of this rank's, plain data."""
        if self.messages is not None:
            self.messages.set(f"{name}/{self.world.rank}", json.dumps(value))

    def told(self, name: str, rank: int) -> Any:
        """Return what a rank wrote.

        Raises:
            RunFailed: it has not in time.
        """
        return self._loaded(self._said(f"{name}/{rank}", self.timeout_s + VERDICT_S, rank), rank)

    def end(self, ranks: Collection[int], note: str = "") -> list[str]:
        """Say that this rank has come to its end, and wait until these have, too; return on rank 0 the notes of those.

        Raises:
            RunFailed: some have not in time; names them.
        """
        self._together("ended", ranks, note)
        if self.messages is None:
            return [note]
        told = (self._said(f"ended/{rank}", self.timeout_s, rank) for rank in ranks if self.world.is_main)
        notes = [text for text in told if text is not None]
        self._stay_until_read(ranks, self.timeout_s)
        self._stay_until_read({*range(self.world.world_size)} - {*ranks})  # some of which may be dead
        return notes

    def leave_together(self) -> None:
        """Say that this rank leaves the group next, and wait until all are about to.

        Raises:
            RunFailed: some are not in time; names them.
        """
        self._together("leaves", range(self.world.world_size))

    def _together(self, name: str, ranks: Collection[int], note: str = "") -> None:
        if self.messages is None:
            return
        self.messages.set(f"{name}/{self.world.rank}", note)
        if self.world.is_main:  # asks for all: the others ask for its word alone
            left = self._await(name, ranks, self.timeout_s, strict=True)
            missing = sorted(left & {*self.watcher.exited()}) or self._silent(left)
            self.messages.set(f"{name}/all", json.dumps(missing), patience=self.timeout_s)  # this process may end next
        elif (told := self._said(f"{name}/all", self.timeout_s + VERDICT_S, 0)) is None:
            left, missing = {0}, self._silent([0])
        else:
            left = missing = json.loads(told)
        if left:
            text = did_not_end(missing, self.world.world_size, self.timeout_s)
            raise RunFailed(text if missing else store_is_silent(self.messages.silent_s), unresponsive=missing)

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

    def shared(self, checks: Sequence[Callable[[], str | None]]) -> list[str | None]:
        """Return on every rank what each of these returns, one after the other on some rank."""
        if self.messages is None:
            return [check() for check in checks]
        self._shared += 1
        name, ranks = f"shared/{self._shared}", self.world.world_size
        self.tell(name, [check() for check in checks[self.world.rank :: ranks]])
        if self.world.is_main:  # asks all: the others ask it alone
            found = [self._shared_by(rank, f"{name}/{rank}", self.timeout_s) for rank in range(ranks)]
            self.messages.set(f"{name}/all", json.dumps([found[at % ranks][at // ranks] for at in range(len(checks))]))
        answers: list[str | None] = self._shared_by(0, f"{name}/all", self.timeout_s + VERDICT_S)
        return answers

    def _shared_by(self, rank: int, name: str, seconds: float) -> Any:
        """Return what a rank has written, unless it has something else to say of this start."""
        assert self.messages is not None
        messages, other = self.messages, f"ready/{rank}"

        def given_up() -> bool:
            return rank in self.watcher.exited() or bool(messages.there(other))

        text = messages.get(name, seconds, given_up)
        if text is None and (refusal := messages.there(other)):
            raise RequestError(json.loads(refusal[other])[1])
        return self._loaded(text, rank)

    def _of_rank(self, rank: int, name: str, make: Callable[[], T], failed: str) -> T:
        if self.messages is None:
            return make()
        if self.world.rank == rank and not self.joins:
            outcome: list[Any] = []
            try:
                outcome = [make()]
            finally:
                self.messages.set(name, json.dumps(outcome))
        else:
            outcome = self._loaded(self._said(name, self.timeout_s + VERDICT_S, rank), rank)
        if not outcome:
            raise RequestError(failed)
        self._outcomes[name] = outcome
        return cast(T, outcome[0])

    def fail(self, text: str, culprit: int) -> tuple[int, str]:
        """Record a failure and which rank's it is; return rank and text of the first one, the cause of the others."""
        if self.messages is None:
            return culprit, text
        self.messages.send(f"failed/{self.world.rank}", json.dumps(sorted(self.unexpected)))
        try:
            rank, cause = json.loads(self.messages.first("failure", json.dumps([culprit, text])))
        except RunFailed as error:  # that somebody else writes there is no reason to lose one's own
            return culprit, f"{text}{error}\n"
        return rank, cause

    def unexpected_peers(self) -> dict[int, list[int]]:
        """Return, by rank, other users who connected to it while ranks met, of the ranks that have failed by now."""
        met = {self.world.rank: sorted(self.unexpected)}
        if self.messages is not None:
            others = self._failures()
            met |= {others[name]: json.loads(users) for name, users in self.messages.there(*others).items()}
        return {rank: users for rank, users in sorted(met.items()) if users}

    def unresponsive_ranks(self) -> list[int]:
        """Return the ranks that have not failed a short while after this one timed out: it waited for them."""
        if self.messages is None:
            return []
        others = self._failures()
        if not self.messages.silent and self.messages.wait([*others], FAILURE_S):
            return []
        return self._silent({*others.values()} - {others[name] for name in self.messages.there(*others)})

    def _failures(self) -> dict[str, int]:
        """Return the other ranks, by the name under which each says that it has failed."""
        return {f"failed/{rank}": rank for rank in range(self.world.world_size) if rank != self.world.rank}

    def send_log(self, line: str) -> None:
        """Send a line to rank 0's log, and wait for nothing."""
        if self.messages is not None:
            self._sent += 1
            self.messages.send(f"log/{self.world.rank}/{self._sent}", line)
            self.messages.send("log")

    def received_logs(self, last: bool = False) -> list[str]:
        """Return the lines that other ranks sent since the last call, rank by rank; rank 0 only.

        Whether there are any is one question, however many ranks there are.
        """
        if self.messages is None or not (last or self.messages.there("log", patience=NEWS_S)):
            return []
        self.messages.delete("log")  # first: what is sent from now on says so again
        lines: list[str] = []
        for name in self.messages.claimed(*map(self._next_line, self._read), patience=LOG_S):
            lines += self._lines_of(int(name.split("/")[1]))
        return lines

    def _lines_of(self, rank: int) -> list[str]:
        """Return and delete the lines of a rank."""
        assert self.messages is not None
        lines: list[str] = []
        while len(lines) < MOST_LINES:
            name = self._next_line(rank)
            try:
                if (line := self.messages.get(name)) is None:
                    return lines
                lines.append(line.rstrip())
            except RunFailed as error:
                lines.append(f"rank {rank}: a line is left out. {error}")
            self.messages.delete(name)
            self._read[rank] += 1
        self.messages.send("log")  # there is more
        return lines

    def _next_line(self, rank: int) -> str:
        return f"log/{rank}/{self._read[rank] + 1}"


def has_failed(messages: Messages, rank: int) -> bool:
    """Whether a rank has recorded that it failed, which it does before it leaves the others."""
    return bool(messages.there(f"failed/{rank}", patience=HOLDS_S))
