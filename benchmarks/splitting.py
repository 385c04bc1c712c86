"""What it costs a step that a model is split: ``python -m benchmarks.splitting``.

On the CPU both stages are on the same device, so what remains is the price of the hooks at their blocks. It is measured
in processor time, for others may disturb, and over several starts: a process may be a tenth slower than the same one
started again.

``--classifiers`` cuts all of torchvision's instead, and says how even their stages are. ``--times`` cuts some of them
in two by ``model.split=auto`` and ``timed``, and says how even these stages are by the time they really take here.
"""

import argparse
import os
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torchvision
from torch import nn

from benchmarks.competitors import ours
from benchmarks.player import Seat
from benchmarks.results import Group, Row, Settings, raw_turns, table
from benchmarks.samples import DATA
from benchmarks.turns import Entry, Session, Spread, session
from ddp_recipes.model_parallel import DryRun, split_model, timed
from ddp_recipes.tasks import Task

GOAL = 1.02
STEPS = {"resnet18": 2, "toy": 500}  # of a turn
SPLIT = {"resnet18": "layer3", "toy": "net2"}
QUIET = ("checkpoint=none", "logger=none", "trainer.progress=false", "strategy=single")


def measure(settings: Settings) -> Group:
    """Measure a step of each workload, whole and split in two."""
    rows: list[Row] = []
    raw = {}
    for workload, steps in STEPS.items():
        sessions = [run(workload, steps, settings) for _ in range(settings.sessions)]
        title = f"{workload} step"
        goal = GOAL if workload == "resnet18" else None
        pairs = [list(zip(each["split"], each["whole"], strict=True)) for each in sessions]
        more = [[split.cpu_seconds / whole.cpu_seconds for split, whole in rounds] for rounds in pairs]
        rows.append(Row(title, "split / whole", Spread.of(more), goal))
        for name in sessions[0]:
            micros = [[1e6 * turn.cpu_seconds / turn.steps for turn in each[name]] for each in sessions]
            rows.append(Row(title, name, Spread.of(micros), unit="µs"))
        raw[title] = raw_turns(sessions)
    return Group(rows, raw)


def run(workload: str, steps: int, settings: Settings) -> Session:
    """Let both train in turns."""
    seat = Seat("", workload=workload, ranks=1, device=settings.device)
    split = ("model.num_devices=2", f"model.split=[{SPLIT[workload]}]")
    entries = [
        Entry(replace(seat, name="whole"), ours.with_overrides(*QUIET), joins=False),
        Entry(replace(seat, name="split"), ours.with_overrides(*QUIET, *split), joins=False),
    ]
    return session(entries, steps, 5 if settings.quick else 10, warm_up=steps)


def costliest(name: str, devices: int) -> float:
    """Return what the costliest of a classifier's stages costs, for a batch of 8, against an even share."""
    extra = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    with torch.device("cpu" if name.startswith("regnet") else "meta"):  # a RegNet computes its sizes by tensors
        model = torchvision.models.get_model(name, **extra).to("meta")
    size = 299 if name == "inception_v3" else 224
    batch = torch.zeros(8, 3, size, size), torch.zeros(8, dtype=torch.int64)
    dry_run = DryRun(Task(model, nn.CrossEntropyLoss()), "training_step", lambda _: batch, size=8)
    stages = split_model(dry_run.task, [torch.device("meta")] * devices, None, dry_run)
    assert dry_run.failure is None
    return devices * max((stage.time or 0) + (stage.memory or 0) for stage in stages) / 2


def truly(name: str, side: int, batch: int) -> tuple[float, float]:
    """Return what the costlier of two stages costs against an even share, by ``auto`` and by ``timed``.

    A cost is the mean of the shares of time and memory, of which time is measured: a step is watched where the second
    stage begins, forward and backward.
    """
    inputs, targets = torch.randn(batch, 3, side, side), torch.randint(10, (batch,))
    found = []
    for how in ("auto", "timed"):
        model = torchvision.models.get_model(name, num_classes=10)
        dry_run = DryRun(Task(model, nn.CrossEntropyLoss()), "training_step", lambda _: (inputs, targets), size=batch)
        if how == "timed":
            dry_run.times = partial(timed, dry_run, torch.device("cpu"), nullcontext)
        stages = split_model(dry_run.task, [torch.device("cpu")] * 2, None, dry_run)
        first = statistics.median(share_of_first(model, stages[1].first, (inputs, targets)) for _ in range(5))
        cost = first + (stages[0].memory or 0)
        found.append(max(cost, 2 - cost))
    return found[0], found[1]


def share_of_first(model: nn.Module, second: str, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Return the share of a step's time that is spent before the block ``second`` is called, and after its backward."""
    passed: list[float] = []

    def called(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        passed.append(time.perf_counter())
        arguments[0].register_hook(lambda _: passed.append(time.perf_counter()))  # type: ignore[no-untyped-call]

    hook = model.get_submodule(second).register_forward_pre_hook(called)
    begin = time.perf_counter()
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
    end = time.perf_counter()
    hook.remove()
    return (passed[0] - begin + end - passed[1]) / (end - begin)


TIMED = {  # side of the images, batch
    "resnet18": (64, 16),
    "resnet50": (96, 8),
    "vit_b_16": (224, 2),
    "mobilenet_v3_large": (224, 8),
    "efficientnet_b0": (160, 8),
    "convnext_tiny": (160, 4),
    "densenet121": (96, 8),
    "swin_t": (224, 2),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sessions", type=int, default=7, help="times that all is started afresh (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--classifiers", action="store_true", help="how even the stages of torchvision's are")
    parser.add_argument("--times", action="store_true", help="how even some are by the time they take")
    options = parser.parse_args()
    if options.times:
        torch.set_num_threads(1)
        for name, (side, batch) in TIMED.items():
            auto, by_time = truly(name, side, batch)
            print(
                f"{name}: the costlier of two stages costs {auto:.2f} times an even share with auto, "
                f"{by_time:.2f} with timed",
                flush=True,
            )
        raise SystemExit
    if options.classifiers:
        names = torchvision.models.list_models(module=torchvision.models)
        for devices in (2, 3, 4, 8):
            costs = {name: costliest(name, devices) for name in names}
            worst = max(costs, key=lambda name: costs[name])
            median = statistics.median(costs.values())
            print(
                f"{len(costs)} classifiers over {devices} devices: the costliest stage costs {median:.2f} times an "
                f"even share in the median, {costs[worst]:.2f} times in {worst}",
                flush=True,
            )
        raise SystemExit
    with tempfile.TemporaryDirectory(prefix="ddp_recipes_bench_data_") as data:
        os.environ[DATA] = data
        print(table(measure(Settings(options.quick, (1,), options.sessions, "cpu")).rows))
