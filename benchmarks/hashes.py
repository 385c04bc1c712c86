"""The first digits of ``weights_sha256``, for strategies, world sizes and what a step does: all have to be the same.

``python -m benchmarks.hashes`` trains a small transformer with dropout: the table of ``benchmarks/sharding.md``.
"""

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from torch.distributed import PrefixStore, Store

from ddp_recipes import rank
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.world import World
from ddp_recipes.testing import make_job, on_ranks

SHARDS, STEPS, DIGITS = 12, 6, 8
COMMON = (
    *("data=text", "data.context=16", "data.val=null", "data.batch_size=1", "model=gpt", "model.layers=2"),
    *("model.width=20", "model.heads=2", "model.dropout=0.1", "optimizer=adamw", f"strategy.shards={SHARDS}"),
    *("trainer.progress=false", "trainer.num_sanity_val_steps=0", "logger=none", "launcher.device=cpu"),
)
DOES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "clip": ("trainer.gradient_clip_val=0.5",),
    "bf16": ("trainer.precision=bf16-mixed",),
    "accumulate": ("trainer.accumulate_grad_batches=2",),
    "resume": (),  # the first half with ddp_exact on one process
}
STRATEGIES: dict[str, tuple[str, ...]] = {
    "ddp_exact": ("strategy=ddp_exact",),
    "fsdp, level 3": ("strategy=fsdp",),
    "fsdp, level 2": ("strategy=fsdp", "strategy.level=2"),
    "fsdp, level 1": ("strategy=fsdp", "strategy.level=1"),
    "fsdp, 2 replicas": ("strategy=fsdp", "strategy.replicas=2"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 0 if each column has one value."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default="1,2,3,4,6", help="numbers of processes (default: %(default)s)")
    sizes = [*map(int, parser.parse_args(argv).ranks.split(","))]
    rows: list[tuple[str, int, list[str]]] = []
    with tempfile.TemporaryDirectory(prefix="hashes_") as folder, quiet():
        text = Path(folder) / "text.txt"
        text.write_text("to be, or not to be, that is the question: " * 400)
        common = (*COMMON, f"data.path={text}")
        half = hashes({"resume": (*common, *STRATEGIES["ddp_exact"], f"trainer.max_steps={STEPS // 2}")}, 1, folder)
        assert half
        checkpoint = f"ckpt_path={folder}/1_resume_0/checkpoints/last.pt"
        for number, (strategy, own) in enumerate(STRATEGIES.items(), start=1):
            for size in sizes:
                if "replicas=2" in own[-1] and (size < 4 or size % 2):
                    continue
                ends = {
                    name: (*common, *own, *does, f"trainer.max_steps={STEPS}", *([checkpoint] * (name == "resume")))
                    for name, does in DOES.items()
                }
                rows.append((strategy, size, hashes(ends, size, folder, number)))
    print(f"| strategy | processes | {' | '.join(DOES)} |\n| --- | --- |{' --- |' * len(DOES)}")
    for strategy, size, found in rows:
        print(f"| {strategy} | {size} | {' | '.join(found)} |")
    return 0 if all(found == rows[0][2] for _, _, found in rows) else 1


def hashes(runs: dict[str, tuple[str, ...]], size: int, folder: str, number: int = 0) -> list[str]:
    """Train with each of these overrides on the same ranks, one after the other; return what came of each."""
    jobs = {name: make_job(overrides, Path(folder) / f"{size}_{name}_{number}") for name, overrides in runs.items()}

    def train(world: World, store: Store | None) -> list[str]:
        found = []
        for name, job in jobs.items():
            messages = None if store is None else Messages(PrefixStore(name, store), private=True)
            found.append(str(rank.run(job, world, messages)["weights_sha256"])[:DIGITS])
        return found

    digits: list[str] = on_ranks(train, size)[0]
    return digits


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what runs print."""
    logging.disable()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


if __name__ == "__main__":
    sys.exit(main())
