"""Checkpoints of random strategies, damaged at random: each is read to the bit or refused by name.

What is read is one of the states that were saved, whole; a run that resumes ends with the undisturbed one's weights.
"""

import json
import os
import random
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ddp_recipes.checkpointing.files import named, newest_first
from ddp_recipes.checkpointing.reading import load, load_first
from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.tensors import digest, put_together
from helpers.damage import OTHERS, copied
from helpers.exact import QUIET

Run = Callable[..., Summary]
Result = TypeVar("Result")

COMMON = [
    *QUIET,
    "checkpoint=default",
    "checkpoint.every_n_steps=1",
    "checkpoint.save_top_k=-1",
    "trainer.max_epochs=1",
]
COMMON += ["data.num_samples=40", "data.global_batch_size=8"]
STRATEGIES = {
    "single": (["strategy=single"], 1),
    "ddp": (["strategy=ddp"], 2),
    "ddp_exact": (["strategy=ddp_exact", "strategy.shards=4"], 2),
    "fsdp": (["strategy=fsdp", "strategy.shards=4", "strategy.wrap=[net1,net2]"], 2),
    "fsdp, three": (["strategy=fsdp", "strategy.shards=3", "strategy.wrap=[net2]"], 3),
    "fsdp, replicas": (["strategy=fsdp", "strategy.replicas=2", "strategy.wrap=[net1,net2]"], 4),
    "ddp_pipeline": (["strategy=ddp_pipeline", "strategy.micro_batches=2"], 2),
}
OPTIMIZERS = (["optimizer.momentum=0.9"], ["optimizer=adamw"], ["optimizer=adamw", "callbacks=ema"])
ODD: tuple[Any, ...] = (None, True, -1, 0, 1, 2, 3, 7, 99, 1 << 70, 0.5, "", "F64", "I32", [], {}, [0, 0, 1], "../x")
RESUMED = 8  # of so many cases one is resumed from


@dataclass(frozen=True)
class Saved:
    """A run that saved each of its first three steps, and what became of it.

    Attributes:
        states: digests of what it saved.
        end: the weights after five steps.
    """

    folder: Path
    overrides: list[str]
    ranks: int
    states: frozenset[str]
    end: str


class Machine:
    """Damages copies of checkpoints, and reads them."""

    def __init__(self, seed: int, folder: Path, run: Run, variants: int) -> None:
        self.chance, self.folder, self.run = random.Random(seed), folder, run
        self.saved = [self._saved(number) for number in range(variants)]
        self.known = frozenset[str]().union(*(each.states for each in self.saved))
        self.done: list[str] = []  # what was done to the files of a case

    def _saved(self, number: int) -> Saved:
        """Return a run with a random strategy; each kind is taken twice, with other weights."""
        name, (own, ranks) = [*STRATEGIES.items()][number // 2 % len(STRATEGIES)]
        folder = self.folder / f"{name}_{number}"
        overrides = [*COMMON, *own, *self.chance.choice(OPTIMIZERS), f"seed={number}"]
        overrides.append(f"checkpoint.async_save={self.chance.choice(['true', 'false'])}")
        whole = self.run(*overrides, world_size=ranks, directory=folder / "whole")
        self.run(*overrides, "trainer.max_steps=3", world_size=ranks, directory=folder / "run")
        states = frozenset(map(state_in, newest_first(folder / "run" / "checkpoints")))
        assert len(states) == 3
        return Saved(folder / "run", overrides, ranks, states, str(whole["weights_sha256"]))

    def case(self, number: int) -> str:
        """Damage, read and resume; return whether all, some or none was read."""
        saved, there = self.chance.choice(self.saved), self.folder / "case"
        shutil.rmtree(there, ignore_errors=True)
        checkpoints = copied(saved.folder, there) / "checkpoints"
        self.done = [saved.folder.parent.name]
        for _ in range(self.chance.choice((1, 1, 1, 2, 3))):
            self.damage(checkpoints)
        paths = newest_first(checkpoints)
        came = [self.read(path) for path in paths]
        first, refusal = tried(lambda: digest_of(load_first(paths or [named(checkpoints, "last")])[1]))
        assert (first or self.some_state) in self.known, "the first one is read wrong"
        assert refusal is None or "Traceback" not in refusal
        assert first is not None or not any(came) or "this version reads" in str(refusal)
        if number % RESUMED == 0:
            self.resume(saved, there, first)
        return "read" if all(came) else "some" if any(came) else "refused"

    def read(self, path: Path) -> bool:
        """Read a checkpoint; return whether it is whole."""
        found, refusal = tried(lambda: state_in(path, self.chance.choice((0, 2, 3))))
        assert (found or self.some_state) in self.known, f"{path} is read wrong"
        assert refusal is None or (path.name in refusal and "\n" not in refusal), f"{path} is not named: {refusal}"
        return refusal is None

    @property
    def some_state(self) -> str:
        """One of those that were saved."""
        return next(iter(self.known))

    def resume(self, saved: Saved, there: Path, first: str | None) -> None:
        """Go on from what is whole; of another run's that may be refused, or end otherwise."""
        go_on = [*saved.overrides, "ckpt_path=auto"]
        summary, refusal = tried(lambda: self.run(*go_on, world_size=saved.ranks, directory=there))
        folder = there / "checkpoints"
        unnamed = any(path.is_dir() for name in ("last", "best") for path in folder.glob(f"{name}.*"))
        wanted = first is not None and not unnamed
        assert (summary is not None) == wanted or first not in saved.states, f"it is refused: {refusal}"
        assert refusal is None or "Traceback" not in refusal
        if first in saved.states and summary is not None:
            assert summary["weights_sha256"] == saved.end, "it went on to other weights"

    # --- damage --------------------------------------------------------------------------------------------------

    def damage(self, checkpoints: Path) -> None:
        """Do something to a file."""
        files = sorted(path for path in checkpoints.rglob("*") if path.is_file())
        if not files:
            return
        path = self.chance.choice(files)
        how = self.chance.choice((self.bytes, self.bytes, self.end, self.swap, self.swap, self.other, self.field))
        self.done.append(f"{how.__name__} {path.relative_to(checkpoints)}")
        how(checkpoints, path)

    def bytes(self, checkpoints: Path, path: Path) -> None:
        """Change, cut out or repeat bytes somewhere."""
        content = bytearray(path.read_bytes())
        at, length = self.chance.randrange(len(content) + 1), self.chance.choice((1, 1, 8, 64, 4096))
        change = self.chance.choice((self.chance.randbytes(length), b"\0" * length, b"", bytes(content[at:]), b"\xff"))
        content[at : at + length] = change
        path.write_bytes(content)

    def end(self, checkpoints: Path, path: Path) -> None:
        """Cut the file short, or add to it."""
        content = path.read_bytes()
        path.write_bytes(self.chance.choice((content[: self.chance.randrange(len(content) + 1)], content + b"\0")))

    def swap(self, checkpoints: Path, path: Path) -> None:
        """Let it trade places with a file of its kind, of this run or of another."""
        kind = path.suffix
        here = sorted(each for each in checkpoints.rglob(f"*{kind}") if each.is_file())
        if self.chance.random() < 0.5:
            other = self.chance.choice(here)
            content = other.read_bytes()
            other.write_bytes(path.read_bytes())
        else:
            run = self.chance.choice(self.saved).folder / "checkpoints"
            content = self.chance.choice([*sorted(run.rglob(f"*{kind}")), path]).read_bytes()
        path.write_bytes(content)

    def other(self, checkpoints: Path, path: Path) -> None:
        """Put something else in its place, or nothing."""
        self.chance.choice([*OTHERS.values()])(path)

    def field(self, checkpoints: Path, path: Path) -> None:
        """Change what an index says of its parts and rows, mostly with a checksum that is right again."""
        indices = [each for each in newest_first(checkpoints) if each.is_file() and each.read_bytes()[:1] == b"{"]
        if not indices:
            return self.bytes(checkpoints, path)
        index = self.chance.choice(indices)
        try:
            content = json.loads(index.read_text())["content"]
        except (ValueError, KeyError, TypeError):  # damaged already
            return None
        for _ in range(self.chance.choice((1, 1, 2, 4))):
            section = self.chance.choice(("rows", "rows", "rows", "parts", "format", "folder"))
            content[section] = self.changed(content.get(section))
        text = json.dumps(content).encode()
        checksum = f"{zlib.crc32(text):08x}" if self.chance.random() < 0.8 else "0" * 8
        index.write_bytes(b'{"checksum": "%b", "content": %b}' % (checksum.encode(), text))
        return None

    def changed(self, value: Any) -> Any:
        """Return nested plain data with one change, somewhere inside."""
        if not isinstance(value, (dict, list)) or not value or self.chance.random() < 0.1:
            near = [value + 1, value - 1, -value] if type(value) is int else []
            return self.chance.choice([*ODD, *near, *near, *near])
        if isinstance(value, dict):
            name = self.chance.choice(sorted(value))
            return {**value, name: self.changed(value[name])}
        items = [*value]
        at = self.chance.randrange(len(items))
        match self.chance.randrange(5):
            case 0:
                del items[at]
            case 1:
                items.insert(at, items[self.chance.randrange(len(items))])
            case 2:
                self.chance.shuffle(items)
            case _:
                items[at] = self.changed(items[at])
        return items


def tried(work: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """Return what work returns, or why it is refused."""
    try:
        return work(), None
    except RequestError as error:
        return None, str(error)


def digest_of(state: dict[str, Any]) -> str:
    """Return the digest of a state that is put together."""
    return digest(put_together({name: value for name, value in state.items() if name != "checksum"}))


def state_in(path: Path, readers: int = 0) -> str:
    """Return the digest of what a checkpoint holds."""
    return digest_of(load(path, readers=readers))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "variants"), [(50, 2), pytest.param(6000, 28, marks=pytest.mark.nightly)], ids=["sample", "many"]
)
def test_damaged_checkpoints_are_read_right_or_refused(count: int, variants: int, run: Run, tmp_path: Path) -> None:
    seed, began = 862708, time.monotonic()
    if count > 1000:  # other ones each night
        seed = int(os.environ.get("DDP_RECIPES_TEST_SEED", random.SystemRandom().randrange(10**6)))
    came: Counter[str] = Counter()
    machine = Machine(seed, tmp_path, run, variants)
    for number in range(count):
        try:
            came[machine.case(number)] += 1
        except BaseException as error:
            error.add_note(f"seed {seed}, {variants} runs, case {number}: {', '.join(machine.done)}")
            raise
    seconds = time.monotonic() - began
    print(f"seed {seed}: {count} cases of {variants} runs in {seconds:.0f} s: {dict(came)}")
    assert came["refused"] + came["some"] > count // 4
    assert came["read"] + came["some"] > count // 4
