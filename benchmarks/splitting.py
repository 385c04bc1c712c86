"""What it costs a step that a model is split: ``python -m benchmarks.splitting``.

On the CPU both stages are on the same device, so what remains is the price of the hooks at their blocks. It is measured
in processor time, for others may disturb, and over several starts: a process may be a tenth slower than the same one
started again.

``--classifiers`` cuts all of torchvision's instead, and says how even their stages are.
"""

import argparse
import os
import statistics
import tempfile
from dataclasses import replace

import torch
import torchvision
from torch import nn

from benchmarks.competitors import ours
from benchmarks.player import Seat
from benchmarks.results import Group, Row, Settings, raw_turns, table
from benchmarks.samples import DATA
from benchmarks.turns import Entry, Session, Spread, session
from ddp_recipes.model_parallel import Rehearsal, split_model
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
    sample = torch.zeros(1, 3, size, size), torch.zeros(1, dtype=torch.int64)
    rehearsal = Rehearsal(Task(model, nn.CrossEntropyLoss()), "training_step", sample, size=8)
    stages = split_model(rehearsal.task, [torch.device("meta")] * devices, None, rehearsal)
    assert rehearsal.failure is None
    return devices * max((stage.time or 0) + (stage.memory or 0) for stage in stages) / 2


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sessions", type=int, default=7, help="times that all is started afresh (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--classifiers", action="store_true", help="how even the stages of torchvision's are")
    options = parser.parse_args()
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
