"""A store that answers late, twice or never, drawn at random: whatever trains to its end is finished, and the same."""

import json
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
from typing import TypeVar

import pytest
from torch.distributed import PrefixStore, Store, TCPStore

from ddp_recipes import rank
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.job import Job
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.world import World
from ddp_recipes.testing import make_job, on_ranks
from helpers.patience import patience
from helpers.recipes import QUICK

T = TypeVar("T")

SEED = int(os.environ.get("DDP_RECIPES_TEST_SEED", "7"))  # the same every day; others by night, by hand
LATE, TWICE, NEVER = 0.04, 0.04, 0.004  # of the calls
LATE_S = 1.0  # on average
NEVER_S = 3600.0
LONGEST_S = 120.0  # of a run
STRATEGIES = ("ddp", "ddp_exact", "fsdp", "parameter_server")
FEW, SIZES = (2, 3, 4), (2, 2, 3, 4, 5, 8, 12, 16)


OWN = ("data.global_batch_size=16", "model._target_=store_parts.Talkative")


class Disturbed(Store):
    """Hands each call on, to a store or a connection to one, and the answer late, after a second call, or never."""

    def __init__(self, store: Store, random: Random, never: float) -> None:
        super().__init__()
        self._store, self._random, self._never = store, random, never

    def _answer(self, call: Callable[[], T]) -> T:
        late, twice, never, how = (self._random.random() for _ in range(4))
        if late < LATE / 2:
            time.sleep(self._random.expovariate(1 / LATE_S))
        answer = call()
        if twice < TWICE:  # as where an answer got lost, and the caller asked again
            answer = call()
        if never < self._never:
            if how < 0.5:
                time.sleep(NEVER_S)
            raise RuntimeError("Connection reset by peer")
        if late > 1 - LATE / 2:
            time.sleep(self._random.expovariate(1 / LATE_S))
        return answer

    def set(self, key: str, value: str | bytes) -> None:
        self._answer(lambda: self._store.set(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._answer(lambda: self._store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._answer(lambda: self._store.multi_get(keys))

    def check(self, keys: Sequence[str]) -> bool:
        return self._answer(lambda: self._store.check(list(keys)))

    def delete_key(self, key: str) -> bool:
        return self._answer(lambda: self._store.delete_key(key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._answer(lambda: self._store.compare_set(key, expected, desired))  # type: ignore[arg-type]

    def wait(self, keys: Sequence[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self._answer(lambda: self._store.wait(list(keys), timeout))


def messages(world: World, file: Store | None, port: int, name: str, in_file: bool) -> Messages:
    """Return a rank's messages, in a file as the local launcher's or at an address, over a disturbed store."""
    if in_file:
        assert file is not None
        return Messages(Disturbed(file, Random(f"{name} {world.rank}"), 0.0), b"key", private=True)
    number = iter(range(10**6))

    def connect() -> Store:
        client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        return Disturbed(PrefixStore(name, client), Random(f"{name} {world.rank} {next(number)}"), NEVER)

    return Messages(connect(), b"key", connect=connect)


def on_rank(job: Job, port: int, name: str, in_file: bool, world: World, file: Store | None) -> Summary:
    return rank.run(job, world, messages(world, file, port, name, in_file))


@pytest.fixture
def port(python: str) -> Iterator[int]:
    """The port of a store in a process of its own: ranks are forked from this one, which is to have no threads."""
    code = """if True:
        from torch.distributed import TCPStore
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        print(store.port, flush=True)
        input()
    """
    command = [python, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield int(server.stdout.readline())
        server.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("cases", "sizes"), [(1, FEW), pytest.param(150, SIZES, marks=pytest.mark.nightly)])
def test_what_trains_to_its_end_is_finished(
    cases: int,
    sizes: Sequence[int],
    port: int,
    run: Callable[..., Summary],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    random, began, seen = Random(SEED), time.monotonic(), Counter[str]()
    whole: dict[tuple[str, int], Summary] = {}
    for case in range(cases):
        strategy, size, in_file = random.choice(STRATEGIES), random.choice(sizes), random.random() < 0.25
        name, folder = f"{SEED} {case}", tmp_path / f"case_{case}"
        own = [*OWN, f"strategy={strategy}", *([f"strategy.shards={size}"] if strategy == "ddp_exact" else [])]
        print(f"DDP_RECIPES_TEST_SEED={SEED}, case {case}: {strategy} on {size} ranks, {in_file=}", flush=True)
        if (strategy, size) not in whole:
            whole[strategy, size] = run(*own, world_size=size)
        job = make_job([*QUICK, *own, f"launcher.nproc_per_node={size}"], folder)
        at = partial(on_rank, job, port, name, in_file)
        on_ranks(at, size, timeout_s=patience(LONGEST_S))
        left = json.loads((folder / "summary.json").read_text())
        assert left["status"] == "finished"
        assert left["global_step"] == whole[strategy, size]["global_step"]
        if strategy != "parameter_server":
            assert left["weights_sha256"] == whole[strategy, size]["weights_sha256"]
        lines = re.findall(r"^rank \d+: line \d+ of \d+$", (folder / "train.log").read_text(), re.MULTILINE)
        assert len(lines) == len(set(lines)), "a line came twice"
        seen[strategy] += 1
        seen["lines"] += len(lines)
    print(f"{cases} cases, all finished, {dict(seen)}, {time.monotonic() - began:.0f} s, seed {SEED}")
