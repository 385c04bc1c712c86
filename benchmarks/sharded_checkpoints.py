"""What it takes to save and to load the checkpoint of a sharded model, beside writing and reading its files plainly.

Both in turns, of the same size, by the same ranks at once, to and from the disk.
"""

import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store

from benchmarks.results import Group, Row, Settings, in_ranks
from benchmarks.samples import ROOT
from benchmarks.turns import Spread
from ddp_recipes import rank
from ddp_recipes.build import resume
from ddp_recipes.callbacks import Callback
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.world import World
from ddp_recipes.testing import make_job, on_ranks

SAVE_GOAL, LOAD_GOAL = 1.1, 1.2
SIZES = ("model.layers=12", "model.width=384", "model.heads=4")  # 21 million parameters, 256 MB with AdamW's state
BLOCK = 4 << 20
ROUNDS, QUICK_ROUNDS = 7, 3
LIMIT_S = 120.0  # for all rounds; a rank that fails would be waited for else

Spans = dict[str, list[tuple[float, float]]]
"""When this rank began and ended what, on the clock that all ranks share."""

spans: Spans = {}
meeting: Barrier  # of the ranks that are forked
mine = 0  # this rank


def timed(name: str, function: Callable[..., Any], together: bool = False) -> Callable[..., Any]:
    """Return the function, noting when it was at work; ``together``: no rank waits for another one in it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if together:
            meeting.wait()
        began = time.monotonic()
        result = function(*args, **kwargs)
        spans.setdefault(name, []).append((began, time.monotonic()))
        return result

    return call


class BesidePlain(Callback):
    """Times each save, then writes as many bytes plainly."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.began = 0.0

    def on_save_start(self, step: int) -> None:
        """Begin together."""
        meeting.wait()
        self.began = time.monotonic()

    def on_save(self, step: int) -> None:
        """Note the time; do the same plainly."""
        spans.setdefault("save", []).append((self.began, time.monotonic()))
        own = parts(self.folder, mine)[-1]
        meeting.wait()
        timed("write", write)(self.folder / f"plain_{own.name}", own.stat().st_size)
        meeting.wait()


def parts(folder: Path, rank: int) -> list[Path]:
    """Return a rank's files of all checkpoints, the newest last."""
    return sorted((folder / "run" / "checkpoints").glob(f"step_*-*/rank_{rank}_of_*.safetensors"))


def write(path: Path, size: int) -> None:
    """Write so many bytes, and see them on disk."""
    content = memoryview(os.urandom(BLOCK))
    aside = path.with_suffix(".part")
    with aside.open("wb", buffering=0) as file:
        for at in range(0, size, BLOCK):
            file.write(content[: size - at])
        os.fsync(file.fileno())
    aside.replace(path)


def forget(folder: Path) -> None:
    """Have all ranks read files from the disk when they are next asked for."""
    gc.collect()  # what is mapped stays
    meeting.wait()
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    meeting.wait()


def measure(settings: Settings) -> Group:
    """Measure saves and loads at each number of ranks."""
    rows: list[Row] = []
    raw = {}
    for ranks in sorted({1, *settings.ranks}):
        title = f"checkpoint, {in_ranks(ranks)}"
        found = raw[title] = seconds(ranks, QUICK_ROUNDS if settings.quick else ROUNDS)
        for ours, plain, goal in (("save", "write", SAVE_GOAL), ("load", "read", LOAD_GOAL)):
            ratios = [mine / theirs for mine, theirs in zip(found[ours], found[plain], strict=True)]
            rows.append(Row(title, f"{ours} / {plain} plainly", Spread.of([ratios]), goal))
        rows += [Row(title, name, Spread.of([[1e3 * each for each in found[name]]]), unit="ms") for name in found]
    return Group(rows, raw)


def seconds(ranks: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each save, write, load and read, of the slowest rank."""
    global meeting
    meeting = multiprocessing.Barrier(ranks, timeout=LIMIT_S)
    outputs = ROOT / "outputs"  # not where memory is a disk
    outputs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench_", dir=outputs) as folder:
        common = (
            *("data=text", "data.context=32", "data.val=null", "data.batch_size=1", "model=gpt", *SIZES),
            *("optimizer=adamw", f"trainer.max_steps={rounds}", "checkpoint.every_n_steps=1", "trainer.progress=false"),
            *("checkpoint.async_save=false", "logger=none", "launcher.device=cpu", "strategy=fsdp", "ckpt_path=auto"),
            f"+callbacks.beside={{_target_: benchmarks.sharded_checkpoints.BesidePlain, folder: {folder}}}",
        )
        job = make_job(common, Path(folder) / "run")

        def train(world: World, store: Store | None) -> Spans:
            global mine
            mine = world.rank
            for name in ("load_first", "restore"):
                setattr(resume, name, timed(name, getattr(resume, name), together=True))
            for number in range(rounds + 1):  # one run that trains, others that find nothing left to do
                if number:
                    forget(Path(folder))
                    timed("read", Path.read_bytes)(parts(Path(folder), mine)[-1])
                forget(Path(folder))
                messages = None if store is None else Messages(PrefixStore(str(number), store), private=True)
                rank.run(job, world, messages)
            return spans

        of_ranks: list[Spans] = on_ranks(train, ranks, timeout_s=LIMIT_S)
    took = {
        name: [max(end - began for began, end in each) for each in zip(*(own[name] for own in of_ranks), strict=True)]
        for name in of_ranks[0]
    }
    loads = [sum(each) for each in zip(took.pop("load_first"), took.pop("restore"), strict=True)]
    return {**took, "load": loads}
