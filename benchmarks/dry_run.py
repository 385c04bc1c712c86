"""What a dry run of sharded models says, beside what real ranks take of memory and give to collectives.

``python -m benchmarks.dry_run`` prints the table of ``benchmarks/sharding.md``. Memory is what the C library has given
out; bytes are counted as tensors are given to collectives.
"""

import argparse
import ctypes
import gc
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import Store
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.hashes import quiet
from ddp_recipes._compat.torch_ import local, tree_leaves
from ddp_recipes.build.recipe import make_recipe
from ddp_recipes.build.run import join, make_run, make_stop_controller
from ddp_recipes.data import loader
from ddp_recipes.runtime.control import Control
from ddp_recipes.runtime.job import Job
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.world import World
from ddp_recipes.testing import make_job, on_ranks
from ddp_recipes.tools.dry_run import make_plan
from ddp_recipes.tools.dry_run.memory import bytes_of
from ddp_recipes.training.metrics import evaluate
from ddp_recipes.training.update import clip, forward_backward

QUIET = ("trainer.progress=false", "logger=none", "launcher.device=cpu", "trainer.num_sanity_val_steps=0")
MODELS: dict[str, tuple[str, ...]] = {
    "gpt": ("data=text", "data.context=64", "data.batch_size=4", "model=gpt", "model.layers=4", "model.width=128"),
    "mlp": (
        "data=random",
        "data.in_features=256",
        "data.batch_size=32",
        "model=mlp",
        f"model.hidden_features={[512] * 8}",
    ),
}
MODELS["repeating"] = (*MODELS["mlp"][:3], "model=toy", "model._target_=benchmarks.dry_run.Repeating")
MODELS["larger gpt"] = (*MODELS["gpt"], "model.layers=6", "model.width=256", "optimizer=adamw")
CASES: list[tuple[str, int, tuple[str, ...]]] = [
    *(("gpt", size, (f"strategy.level={level}", "optimizer=adamw")) for level in (3, 2, 1) for size in (2, 4)),
    ("gpt", 2, ("optimizer=sgd",)),
    ("gpt", 4, ("strategy.replicas=2", "optimizer=adamw")),
    *(("gpt", size, ("strategy.shards=8", "optimizer=adamw")) for size in (2, 4)),
    ("gpt", 2, ("strategy.shards=4", "strategy.level=2", "trainer.accumulate_grad_batches=2")),
    ("gpt", 4, ("strategy.shards=8", "strategy.replicas=2", "trainer.gradient_clip_val=0.5")),
    ("gpt", 2, ("trainer.accumulate_grad_batches=3", "optimizer=adamw")),
    ("gpt", 2, ("strategy.level=1", "trainer.accumulate_grad_batches=3", "optimizer=adamw")),
    ("gpt", 2, ("trainer.precision=bf16-mixed", "optimizer=adamw")),
    ("gpt", 2, ("strategy.param_dtype=bfloat16", "optimizer=adamw")),
    ("gpt", 4, ("strategy.param_dtype=bfloat16", "strategy.shards=8")),
    ("gpt", 2, ("strategy.wrap=1000",)),
    ("gpt", 2, ("model.dropout=0.1", "model.freeze=[embedding,blocks.0]")),
    ("gpt", 2, ("model.activation_checkpointing=true", "data.batch_size=16", "optimizer=adamw")),
    *(("larger gpt", size, ()) for size in (2, 4)),
    ("larger gpt", 4, ("model.activation_checkpointing=true", "trainer.precision=bf16-mixed")),
    *(("mlp", size, ("optimizer=adamw",)) for size in (2, 4)),
    ("mlp", 4, ("optimizer=sgd", "strategy.level=1")),
    *(("repeating", 2, (f"strategy.level={level}",)) for level in (3, 2)),
    ("repeating", 4, ("strategy.shards=8",)),
]  # fmt: skip
GIVEN = {  # by the name of the operation: the kind, and which argument is given
    "c10d::_allgather_base_": ("gathered", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scattered", 1),
    "c10d::alltoall_base_": ("scattered", 1),
    "c10d::allreduce_": ("all_reduced", 0),
    "c10d::broadcast_": ("broadcast", 0),
}


class Repeating(nn.Module):
    """Runs its blocks again and again; has a parameter that is a single number."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(in_features, in_features) for _ in range(3))
        self.head = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [n, out_features] of [n, in_features]."""
        for number in (0, 1, 0, 2, 1, 0):
            inputs = inputs + self.blocks[number](inputs).tanh()
        output: Tensor = self.scale * self.head(inputs)
        return output


@dataclass(frozen=True)
class Taken:
    """What a rank takes: at most in a training step, at most in a validation, and what it gives to collectives."""

    training: int
    validation: int
    given: dict[str, int]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 0 if no figure is further from the real one than allowed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--allowed", type=float, default=0.1, help="relative error (default: %(default)s)")
    torch.set_num_threads(1)  # else a fork does not survive
    allowed, worst = parser.parse_args(argv).allowed, 0.0
    print("| model | ranks | with | peak, planned | real | error | sent a step, planned | real | error |")
    print(f"|{' --- |' * 9}")
    with tempfile.TemporaryDirectory(prefix="dry_run_") as folder:
        (text := Path(folder) / "text.txt").write_text("to be, or not to be, that is the question: " * 400)
        for model, size, own in CASES:
            path = (f"data.path={text}",) if "gpt" in model else ()
            overrides = (*QUIET, "strategy=fsdp", *MODELS[model], *path, *own)
            with quiet():
                planned, real = compared(overrides, size)
            pairs = (planned.training, real.training), (sum(planned.given.values()), sum(real.given.values()))
            cells = []
            for said, taken in pairs:
                error = said / taken - 1
                worst = max(worst, abs(error))
                cells.append(f"{said / 1e6:.2f} MB | {taken / 1e6:.2f} MB | {error:+.1%}")
            print(f"| {model} | {size} | {' '.join(own)} | {' | '.join(cells)} |", flush=True)
    return 0 if worst <= allowed else 1


def compared(overrides: Sequence[str], world_size: int) -> tuple[Taken, Taken]:
    """Return what a dry run says of a rank, and the most that a real rank takes."""
    sizes = f"launcher.nproc_per_node={world_size}"
    job, dry = make_job([*overrides, sizes]), make_job([*overrides, sizes, "plan=true"])
    plan = on_ranks(lambda _, __: planned(dry), 1)[0]
    ranks = on_ranks(lambda world, store: real(job, world, store), world_size, timeout_s=300)
    kinds = {kind for kind, _ in GIVEN.values()}
    return (
        Taken(**plan),
        Taken(
            max(each["training"] for each in ranks),
            max(each["validation"] for each in ranks),
            {kind: max(each["given"].get(kind, 0) for each in ranks) for kind in kinds},
        ),
    )


def planned(job: Job) -> dict[str, Any]:
    """Return what a dry run says."""
    found = make_plan(make_recipe(job, World(), Control(World(), None, 60)))
    (memory,) = found["memory"]
    given = {kind: found["exchange"][f"{kind}_bytes"] for kind, _ in GIVEN.values()}
    return {"training": memory["training"], "validation": memory["validation"], "given": given}


def real(job: Job, world: World, store: Store | None) -> dict[str, Any]:
    """Train a few steps and validate, once the optimizer has its state; note what two of each take."""
    loader._may_prefetch = lambda dataset: False  # which a dry run leaves out
    messages = None if store is None else Messages(store, private=True)
    recipe = make_recipe(job, world, Control(world, messages, 60))
    join(recipe)
    run = make_run(recipe, make_stop_controller(recipe))
    accumulated = run.trainer.accumulate_grad_batches
    batches = chain.from_iterable(run.train.batches(epoch, 0, accumulated) for epoch in count())

    def step() -> None:
        run.task.train()  # as an evaluation does not leave it
        forward_backward(run, batches)
        clip(run, False)
        run.optimizer.step()
        run.optimizer.zero_grad()

    step()
    with Given() as given:
        step()
    evaluate(run.task, run.val, run.strategy, run.precision)
    step()
    own = [each for group in run.optimizer.param_groups for each in group["params"]]
    state = [*tree_leaves(list(run.optimizer.state.values())), *run.task.buffers()]
    held = bytes_of((*own, *state, *(local(each.grad) for each in run.task.parameters() if each.grad is not None)))
    taken = []
    for _ in range(3):  # a tensor that a thread of gloo has not freed yet counts twice
        gc.collect()
        with Heap() as heap:
            step()
            step()
            training, heap.peak = heap.peak, 0
            evaluate(run.task, run.val, run.strategy, run.precision)
        before = held[recipe.device] - heap.before
        taken.append((before + training, before + heap.peak))
    training, validation = (int(median(each)) for each in zip(*taken, strict=True))
    return {"training": training, "validation": validation, "given": given.bytes}


class _MallInfo2(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("_0", "_1", "_2", "_3", "mapped", "_5", "_6", "used", "_8", "_9")]


class Heap(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the most bytes that the C library has given out, whoever to, as each operation ends."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.library = ctypes.CDLL("libc.so.6")
        self.library.mallinfo2.restype = _MallInfo2
        self.before, self.peak = self.given_out(), 0

    def given_out(self) -> int:
        """Return how many there are now."""
        info = self.library.mallinfo2()
        return int(info.mapped + info.used)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, self.given_out())
        return output


class Given(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are given to collectives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in GIVEN:
            kind, at = GIVEN[func.name()]
            given = args[at]
            self.bytes[kind] += sum(each.nbytes for each in (given if isinstance(given, (list, tuple)) else [given]))
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":
    sys.exit(main())
