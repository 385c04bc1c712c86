"""Connects ranks that something else started: rank 0 posts each job, the followers run it. Loads torch."""

import gc
import os
import sys
import time
import traceback
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial

from torch.distributed import PrefixStore, Store, TCPStore, rendezvous

from ddp_recipes import rank
from ddp_recipes._compat.messages import address_in_use, timed_out
from ddp_recipes.errors import (
    Preempted,
    RecipeError,
    RequestError,
    RunFailed,
    did_not_arrive,
    exited_without_report,
)
from ddp_recipes.launchers.peers import Peers, agent_holds_store
from ddp_recipes.launchers.reports import Death, decide
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.control import BoundedCalls
from ddp_recipes.runtime.job import Job
from ddp_recipes.runtime.world import World

STORE_TIMEOUT = timedelta(minutes=30)
MEET_TO_STOP_S = 10.0  # for followers that still import torch when there is nothing to do
STOP_S = 5.0  # for the followers to read that there are no more jobs
AFTER_FAILURE_S = 8.0  # for rank 0 to post something to a follower that failed


def _store(world: World) -> Store:
    """Return the store at ``MASTER_ADDR:MASTER_PORT``: torchrun's agent holds it or rank 0, which waits for nobody."""
    if agent_holds_store():
        store: Store = next(iter(rendezvous("env://", timeout=STORE_TIMEOUT)))[0]
        return store
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return TCPStore(address, port, world.world_size, world.is_main, STORE_TIMEOUT, wait_for_workers=False)
    except RuntimeError as error:
        if not address_in_use(error):
            raise
        raise RequestError(
            f"MASTER_PORT={port} is taken on {address} by another process. Set another one, on every node alike."
        ) from None


class Channel:
    """The jobs of one torchrun: rank 0 posts them in turn, every rank runs each, until rank 0 posts a stop.

    The store may be the agent's, which outlives restarts of the workers and holds what earlier ones wrote. So a
    follower sends a hello with a name of its own, and rank 0 answers it with the name of this generation, under which
    all else is kept.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.root = _store(world)
        self._generation: Store | None = None
        self._next = 0
        self._peers = Peers(world)
        self._unresponsive: Sequence[int] = ()

    @property
    def store(self) -> Store:
        """The store of this generation."""
        assert self._generation is not None, "the ranks have not met yet"
        return self._generation

    # --- rank 0

    def lead(self, job: Job) -> Summary:
        """Post a job and run it as rank 0; with one rank, a plain run."""
        try:
            self._meet(float(job.config["launcher"]["timeout_s"]))
            number = self._post(job.to_json())
            return self._run(job, number)
        except RunFailed as error:
            raise self._explained(error, job) from None
        except RuntimeError:
            if not (exited := self._peers.exited()):
                raise
            self._unresponsive, message = exited, exited_without_report(exited, self.world.world_size)
            death = Death(exited[0], f"{message}\n{traceback.format_exc().rstrip()}")
            return decide({}, [death]).conclude(job)

    def stop(self, status: int) -> None:
        """Have the followers exit, with the exit code that rank 0 has."""
        with suppress(RunFailed):
            self._meet(MEET_TO_STOP_S)
        self._post(f"stop {status}")
        if agent_holds_store():
            return
        # Started by srun or mpirun, rank 0 holds the store: it stays until those that still respond have read that.
        deadline = time.monotonic() + STOP_S
        readers = self.world.world_size - 1 - len(self._unresponsive)
        while self.store.add("stopped", 0) < readers and time.monotonic() < deadline:
            time.sleep(0.02)

    def _meet(self, timeout_s: float) -> None:
        """Answer every follower, whenever it comes; raise if some do not come in time."""
        if self._generation is not None:
            return
        name = uuid.uuid4().hex
        self._enter(name)
        missing = set(range(1, self.world.world_size))
        deadline = time.monotonic() + timeout_s
        while missing and time.monotonic() < deadline:
            for follower in sorted(missing):
                hello = f"ddp_recipes/hello/{follower}"
                if self.store.check([f"here/{follower}"]):
                    missing.remove(follower)
                elif self.root.check([hello]):
                    self.root.set(f"ddp_recipes/welcome/{self.root.get(hello).decode()}", name)
            time.sleep(0.01)
        if missing:
            raise RunFailed(did_not_arrive(missing, self.world.world_size, timeout_s), unresponsive=sorted(missing))

    def _post(self, message: str) -> int:
        number, self._next = self._next, self._next + 1
        self.store.set(f"message/{number}", message)
        return number

    # --- followers

    def follow(self) -> int:
        """Run what rank 0 posts; return the exit code that it posts at the end, or 1 where it no longer responds."""
        self._arrive()
        failed = False
        while not self._unresponsive:
            if failed and BoundedCalls().do(partial(self.root.check, ["ddp_recipes"]), None) is None:
                break  # cut off from rank 0, or it has exited
            message = self._receive(AFTER_FAILURE_S if failed else None)
            if message is None:
                break
            if message.startswith("stop "):
                with suppress(RuntimeError):  # the store has ended: rank 0 did not wait
                    self.store.add("stopped", 1)
                return int(message.removeprefix("stop ")) or int(failed)  # rank 0 may have finished before
            failed = not self._run_as_follower(Job.from_json(message), self._next - 1)
            if failed:
                gc.collect()  # closes this rank's connections: the others, waiting in a collective, notice now
        return 1

    def _arrive(self) -> None:
        """Send a hello, and wait for the answer."""
        name = uuid.uuid4().hex
        self.root.set(f"ddp_recipes/hello/{self.world.rank}", name)
        welcome = f"ddp_recipes/welcome/{name}"
        self.root.wait([welcome], STORE_TIMEOUT)
        self._enter(self.root.get(welcome).decode())
        self.store.set(f"here/{self.world.rank}", "")

    def _receive(self, seconds: float | None) -> str | None:
        """Return the next message, or ``None`` if there will be none, or none in so many seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        name = f"message/{self._next}"
        exited = False  # rank 0; what it had posted is there
        while deadline is None or time.monotonic() < deadline:
            try:
                self.store.wait([name], timedelta(seconds=1))
            except RuntimeError as error:
                if not timed_out(error):
                    return None  # the store has ended, and rank 0 with it
                if exited:
                    print(exited_without_report([0], self.world.world_size), file=sys.stderr, flush=True)
                    return None
                exited = 0 in self._peers.exited()  # the store may be torchrun's, which outlives it
                continue
            self._next += 1
            return self.store.get(name).decode()
        return None

    def _run_as_follower(self, job: Job, number: int) -> bool:
        """Run a job; print why it failed, and return whether it did not."""
        try:
            self._run(job, number)
        except (RequestError, Preempted):
            pass  # rank 0 prints it
        except RunFailed as error:
            print(f"[rank {self.world.rank}] {self._explained(error, job)}", file=sys.stderr, flush=True)
            return False
        except Exception as error:
            text = str(error) if isinstance(error, RecipeError) else traceback.format_exc()
            if isinstance(error, RuntimeError) and (exited := self._peers.exited()):
                self._unresponsive = exited
                text = f"{text}{exited_without_report(exited, self.world.world_size)}"
            print(f"Rank {self.world.rank} failed:\n{text}", file=sys.stderr, flush=True)
            return False
        return True

    # --- both

    def _enter(self, generation: str) -> None:
        self._generation = PrefixStore(f"ddp_recipes/{generation}", self.root)
        self._peers.introduce(self._generation)

    def _run(self, job: Job, number: int) -> Summary:
        store = PrefixStore(f"run/{number}", self.store) if self.world.world_size > 1 else None
        return rank.run(job, self.world, store, self._peers.exited)

    def _explained(self, error: RunFailed, job: Job) -> RunFailed:
        """End unresponsive ranks; return the error, with those named whose process has exited."""
        self._unresponsive = error.unresponsive
        exited = sorted({*error.unresponsive} & {*self._peers.exited()})
        self._peers.end(error.unresponsive, job)
        if not exited or (message := exited_without_report(exited, self.world.world_size)) in str(error):
            return error
        return RunFailed(f"{error}\n{message}", rank=error.rank, unresponsive=error.unresponsive)
