"""Connects ranks that something else started: rank 0 posts each job, the followers run it. Loads torch."""

import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ddp_recipes import rank
from ddp_recipes.config.extras import extra
from ddp_recipes.errors import (
    Preempted,
    RecipeError,
    RequestError,
    RunFailed,
    did_not_arrive,
    did_not_end,
    exited_without_report,
)
from ddp_recipes.launchers import reports
from ddp_recipes.launchers.base import RestartNote
from ddp_recipes.launchers.reports import Death, decide
from ddp_recipes.launchers.store import TIMEOUT, agent_holds_store, at_address
from ddp_recipes.launchers.worker import write_at_death
from ddp_recipes.reporting.run_directory import Summary, leave_failure_of_rank_0, leave_trace
from ddp_recipes.runtime.job import ASKS_TO_STOP, Job, Watcher
from ddp_recipes.runtime.messages import CALL_S, LOOK_S, Messages
from ddp_recipes.runtime.process import ignore, state
from ddp_recipes.runtime.world import World

EXITS_S = 1.0  # for a process to have exited, once its connections are closed
DEAD_S = 5.0  # for a killed rank to be dead, and to hold no lock any more


class Peers:
    """The other ranks' processes on this node: which have exited, which hang.

    They are found among the children of torchrun's agent. Without one none is: what started the ranks watches them.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._messages: Messages | None = None
        self._seen: set[int] = set()
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115
        if agent_holds_store():  # anything else that starts ranks may want SIGUSR2 for itself
            write_at_death(self._stacks.fileno())

    def introduce(self, messages: Messages) -> None:
        """Publish where this rank writes its stacks."""
        self._messages = messages
        self.exited()
        messages.set(f"stacks/{self.world.rank}", str(self._stacks.fileno()))

    def exited(self) -> list[int]:
        """Return the ranks of this node whose process was seen to run, and has exited.

        Where the agent starts something else that starts the rank, a script say, no other rank's is ever seen.
        """
        if not agent_holds_store():
            return []
        running = self._running().keys()
        self._seen |= running
        return sorted(self._seen - running)

    def lost(self, error: RuntimeError) -> list[int]:
        """Return those that have exited: of a broken connection, which is closed just before, after a while as well."""
        waits = agent_holds_store() and "onnection" in str(error)
        deadline = time.monotonic() + (EXITS_S if waits else 0.0)
        while not (exited := self.exited()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return exited

    def absent(self) -> set[int]:
        """Return the ranks of this node that do not run: they have exited, or, in its first instants, not begun."""
        running = self._running().keys() if agent_holds_store() else set()
        if self.world.rank not in running:  # the agent starts something else that starts ranks
            return set()
        first = self.world.rank - self.world.local_rank
        return {*range(first, first + self.world.local_world_size)} - running

    def end(self, ranks: Sequence[int], directory: Path | None) -> None:
        """Write the stacks of these ranks, and kill them, those of this node that still run.

        The agent would first send SIGTERM, which a stopped process does not take, and then wait half a minute. This
        rank gets one once another is dead, before it has said why: from now on it is ignored.
        """
        running = self._running() if agent_holds_store() else {}
        ends = running.keys() & {*ranks} - {self.world.rank}
        if ends:
            ignore(ASKS_TO_STOP)
        for number in ends:
            pid = running[number]
            with suppress(OSError), open(f"/proc/{pid}/fd/{self._file_of(number)}", "rb") as file:
                text = reports.request({pid: file})[pid]
                if directory is not None:
                    leave_trace(directory, number, text)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + DEAD_S
        while any(_has_threads(running[number]) for number in ends) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _file_of(self, rank: int) -> str:
        """Return the file descriptor of a rank's stacks; empty if it never came so far."""
        with suppress(RunFailed):
            return (self._messages.get(f"stacks/{rank}") or "") if self._messages is not None else ""
        return ""

    def _running(self) -> dict[int, int]:
        """Return the processes of ranks that this rank's parent started and that have not exited, by rank."""
        found: dict[int, int] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has exited meanwhile, or belongs to somebody else
                letter, parent = state(int(folder.name))
                if parent == os.getppid() and letter not in "ZX":
                    pairs = (folder / "environ").read_bytes().split(b"\0")
                    found |= {int(pair[5:]): int(folder.name) for pair in pairs if pair.startswith(b"RANK=")}
        return found


def _has_threads(process: int) -> bool:
    """Whether a process still runs, or one of its threads does: until the last one has ended its files are open."""
    try:
        return state(process)[0] not in "ZX" or len(os.listdir(f"/proc/{process}/task")) > 1
    except OSError:
        return False


MEET_TO_STOP_S = 10.0  # for followers that still import torch when there is nothing to do
STOP_S = 5.0  # for the followers to read that there are no more jobs, after a failure
END_S = 60.0  # the same where all have come to their end: only a busy machine keeps them from reading it
AFTER_FAILURE_S = 8.0  # for rank 0 to post something to a follower that failed


class Channel:
    """The jobs of one torchrun: rank 0 posts them in turn, every rank runs each, until rank 0 posts a stop.

    The store may be the agent's, which outlives restarts of the workers and holds what earlier ones wrote. So a
    follower sends a hello with a name of its own, and rank 0 answers it with the name of this generation, under which
    all else is kept.
    """

    def __init__(self, world: World, note: RestartNote) -> None:
        self.world = world
        self._note = note
        self.root = at_address(world, os.environ)
        self._generation: Messages | None = None
        self.have_met = False
        self._next = 0
        self._peers = Peers(world)
        self._timeout_s = TIMEOUT.total_seconds()
        self._unresponsive: Sequence[int] = ()

    @property
    def messages(self) -> Messages:
        """The messages of this generation of ranks."""
        assert self._generation is not None, "the ranks have not met yet"
        return self._generation

    # --- rank 0

    def former_directory(self, timeout_s: float) -> str:
        """Return the directory of an earlier start that some node has noted; empty if none has."""
        try:
            self._meet(timeout_s)
        except RunFailed as error:
            raise self._explained(error, None) from None
        return next((found["base"] for found in self._found() if found.get("base")), "")

    def _found(self) -> list[Mapping[str, Any]]:
        """Return what the node of each rank has of earlier starts: the directory, and what is in memory."""
        others = (f"here/{follower}" for follower in range(1, self.world.world_size))
        said = (self.messages.get(name, TIMEOUT.total_seconds()) for name in others)  # it is there: all have met
        return [self._here(), *(json.loads(each or "{}") for each in said)]

    def _here(self) -> Mapping[str, Any]:
        kept = self._memory().found() if self._note.text("memory") else {}
        return {"base": self._note.text("run_directory"), **kept}

    def lead(self, job: Job) -> Summary:
        """Post a job and run it as rank 0; with one rank, a plain run."""
        try:
            self._meet(float(job.config["launcher"]["timeout_s"]))
            if self._keeps(job):
                job = self._memory().gone_on(job, self.world, self._found())
            number = self._post(job.to_json(with_main=False))
            try:
                return self._run(job, number)
            finally:
                self.messages.set(f"left/{number}", "")
        except RunFailed as error:
            raise self._explained(error, job.directory) from None
        except RuntimeError as error:
            if not (exited := self._peers.lost(error)):
                raise
            self._unresponsive, message = exited, exited_without_report(exited, self.world.world_size)
            death = Death(exited[0], f"{message}\n{traceback.format_exc().rstrip()}")
            return decide({}, [death]).conclude(job)

    def stop(self, status: int) -> None:
        """Have the followers exit, with the exit code that rank 0 has."""
        with suppress(RunFailed):
            self._meet(MEET_TO_STOP_S, to_stop=status != 0)
        self._post(f"stop {status}", STOP_S if status else END_S)
        if agent_holds_store():
            return
        # Started by srun or mpirun, rank 0 holds the store: it stays until those that still respond have read that.
        readers = [f"stopped/{each}" for each in range(1, self.world.world_size) if each not in self._unresponsive]
        self.messages.wait(readers, STOP_S if status else END_S)

    def _meet(self, timeout_s: float, to_stop: bool = False) -> None:
        """Answer every follower, whenever it comes; raise if some do not come in time.

        Args:
            to_stop: whether all are to end, so that one that has exited need not come.
        """
        if self._generation is not None:
            return
        name = uuid.uuid4().hex
        self._enter(name)
        missing, looked = set(range(1, self.world.world_size)), 0.0
        deadline = time.monotonic() + timeout_s
        while missing and (now := time.monotonic()) < deadline:
            if now > looked + LOOK_S or self.root.there("knock"):  # one question, however many ranks there are
                looked = now
                self.root.delete("knock")  # first: who comes from now on says so again
                missing -= {int(each.split("/")[1]) for each in self.messages.there(*(f"here/{n}" for n in missing))}
                for hello in self.root.there(*(f"hello/{each}" for each in missing)).values():
                    self.root.send(f"welcome/{hello}", name)
                if to_stop:
                    missing -= self._peers.absent()
            time.sleep(0.01)
        if missing:
            raise RunFailed(did_not_arrive(missing, self.world.world_size, timeout_s), unresponsive=sorted(missing))
        self.have_met = True

    def _post(self, message: str, patience: float = CALL_S) -> int:
        number, self._next = self._next, self._next + 1
        self.messages.set(f"message/{number}", message, patience)
        return number

    # --- followers

    def follow(self) -> int:
        """Run what rank 0 posts; return the exit code that it posts at the end, or 1 where it no longer responds."""
        self._arrive()
        failed = False
        while not self._unresponsive:
            message = self._receive(f"message/{self._next}", AFTER_FAILURE_S if failed else None)
            if message is None:
                if 0 in self._peers.exited():
                    print(exited_without_report([0], self.world.world_size), file=sys.stderr, flush=True)
                break
            self._next += 1
            if message.startswith("stop "):
                self.messages.set(f"stopped/{self.world.rank}", "", STOP_S)
                return int(message.removeprefix("stop ")) or int(failed)  # rank 0 may have finished before
            job = replace(Job.from_json(message), main="")
            failed = not self._run_as_follower(job, self._next - 1)
            if failed:
                gc.collect()  # closes this rank's connections: the others, waiting in a collective, notice now
        if failed:
            leave_failure_of_rank_0(job.directory, job.overrides, exited_without_report([0], self.world.world_size))
        return 1

    def _arrive(self) -> None:
        """Send a hello, and wait for the answer."""
        name = uuid.uuid4().hex
        self.root.send(f"hello/{self.world.rank}", name)
        self.root.send("knock")
        generation = self.root.get(f"welcome/{name}", TIMEOUT.total_seconds(), lambda: 0 in self._peers.absent())
        if generation is None:
            if 0 in self._peers.absent():  # a signal may have ended it before it could say so
                raise RunFailed(exited_without_report([0], self.world.world_size))
            raise RunFailed(did_not_arrive([0], self.world.world_size, TIMEOUT.total_seconds()))
        self._enter(generation)
        self.messages.send(f"here/{self.world.rank}", json.dumps(self._here()))
        self.root.send("knock")

    def _receive(self, name: str, seconds: float | None) -> str | None:
        """Return a message of rank 0's, or ``None`` if there will be none, or none in so many seconds."""
        return self.messages.get(name, float("inf") if seconds is None else seconds, self._ended)

    def _ended(self) -> bool:
        """Whether rank 0 has exited, which torchrun's store outlives, or the store does not answer."""
        return 0 in self._peers.exited() or self.messages.silent_s > self._timeout_s

    def _run_as_follower(self, job: Job, number: int) -> bool:
        """Run a job; print why it failed, and return whether it did not."""
        self._timeout_s = float(job.config["launcher"]["timeout_s"])
        try:
            with suppress(RequestError, Preempted):  # rank 0 prints it
                self._run(job, number)
        except RunFailed as error:
            print(f"[rank {self.world.rank}] {self._explained(error, job.directory)}", file=sys.stderr, flush=True)
            return False
        except Exception as error:  # noqa: BLE001 - whatever a rank raises is told to the one that launched it
            text = str(error) if isinstance(error, RecipeError) else traceback.format_exc()
            if isinstance(error, RuntimeError) and (exited := self._peers.lost(error)):
                self._unresponsive = exited
                text = f"{text}{exited_without_report(exited, self.world.world_size)}"
            print(f"Rank {self.world.rank} failed:\n{text}", file=sys.stderr, flush=True)
            return False
        if self._receive(f"left/{number}", self._timeout_s) is None:  # what rank 0 closes may be a user's own
            hangs = RunFailed(did_not_end([0], self.world.world_size, self._timeout_s), unresponsive=[0])
            print(f"[rank {self.world.rank}] {self._explained(hangs, job.directory)}", file=sys.stderr, flush=True)
            leave_failure_of_rank_0(job.directory, job.overrides, str(hangs), known_better=True)
            return False
        return True

    # --- both

    def _enter(self, generation: str) -> None:
        self._generation = self.root.under(generation)
        self._peers.introduce(self._generation)

    def _run(self, job: Job, number: int) -> Summary:
        messages = self.messages.under(f"run/{number}")
        if self._keeps(job):
            job = replace(job, memory=self._memory().slots(job, self.world, messages))
        others = messages if self.world.world_size > 1 else None
        summary = rank.run(job, self.world, others, Watcher(self._peers.exited, partial(self._begun, job)))
        if self.world.local_rank == 0 and self._note.text("memory"):
            self._memory().forget()
        return summary

    def _keeps(self, job: Job) -> bool:
        """Whether states are kept in memory for torchrun's next start."""
        return bool(job.config["checkpoint"].get("in_memory_every_n_steps") and self.world.restarts)

    def _memory(self) -> Any:
        """Return what keeps them."""
        return extra("memory of torchrun")(self._note)

    def _begun(self, job: Job) -> None:
        """Note the directory, once on each node: no rank has refused to begin there."""
        if self.world.local_rank == 0:
            self._note.write(job.base)

    def _explained(self, error: RunFailed, directory: Path | None) -> RunFailed:
        """End unresponsive ranks; return the error, with those named whose process has exited."""
        self._unresponsive = error.unresponsive
        exited = sorted({*error.unresponsive} & {*self._peers.exited()})
        self._peers.end(error.unresponsive, directory)
        if not exited or (message := exited_without_report(exited, self.world.world_size)) in str(error):
            return error
        return RunFailed(f"{error}\n{message}", rank=error.rank, unresponsive=error.unresponsive)
