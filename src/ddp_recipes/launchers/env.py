"""Joins the ranks that torchrun, or anything that sets its variables, started: rank 0 leads, the others follow."""

import sys
import time
import traceback
from datetime import timedelta

from torch.distributed import PrefixStore, Store, rendezvous

from ddp_recipes import rank
from ddp_recipes.errors import Preempted, RecipeError, RequestError, RunFailed
from ddp_recipes.job import Job
from ddp_recipes.run_directory import Summary
from ddp_recipes.world import World

STORE_TIMEOUT = timedelta(minutes=30)
AFTER_FAILURE_S = 8.0  # a rank that failed waits so long for what the leader makes of it


class Channel:
    """The jobs of one torchrun: rank 0 posts them in turn, every rank runs each, until rank 0 says stop."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.store: Store = next(iter(rendezvous("env://", timeout=STORE_TIMEOUT)))[0]
        self._next = 0

    def lead(self, job: Job) -> Summary:
        """Post a job and run it as rank 0; with one rank, a plain run."""
        number = self._post(job.to_json())
        return rank.run(job, self.world, self._store_of(number) if self.world.world_size > 1 else None)

    def stop(self, status: int) -> None:
        """Let the followers go, with the exit status that rank 0 has."""
        self._post(f"stop {status}")

    def follow(self) -> int:
        """Run what rank 0 posts; return the exit status it gives at the end.

        A rank whose own run failed says so, and waits a short while for what comes next.
        """
        failed = False
        while True:
            message = self._receive(AFTER_FAILURE_S if failed else None)
            if message is None:
                return 1
            if message.startswith("stop "):
                return int(message.removeprefix("stop "))
            failed = not self._run_as_follower(Job.from_json(message), self._next - 1)

    def _run_as_follower(self, job: Job, number: int) -> bool:
        try:
            rank.run(job, self.world, self._store_of(number))
        except (RequestError, Preempted):
            pass  # rank 0 says it
        except RunFailed as error:
            print(f"[rank {self.world.rank}] {error}", file=sys.stderr, flush=True)
            return False
        except Exception as error:
            text = str(error) if isinstance(error, RecipeError) else traceback.format_exc()
            print(f"Rank {self.world.rank} failed:\n{text}", file=sys.stderr, flush=True)
            return False
        return True

    def _store_of(self, number: int) -> Store:
        return PrefixStore(f"run/{number}", self.store)

    def _post(self, message: str) -> int:
        number, self._next = self._next, self._next + 1
        self.store.set(f"message/{number}", message)
        return number

    def _receive(self, patience_s: float | None) -> str | None:
        """Return the next message, or ``None`` if it does not come within a given patience."""
        deadline = None if patience_s is None else time.monotonic() + patience_s
        name = f"message/{self._next}"
        while deadline is None or time.monotonic() < deadline:
            try:
                self.store.wait([name], timedelta(seconds=60 if deadline is None else 1))
            except RuntimeError as error:
                if "timed out" in str(error) or "imeout" in str(error):
                    continue
                return None  # the store is gone, and rank 0 with it
            self._next += 1
            return self.store.get(name).decode()
        return None
