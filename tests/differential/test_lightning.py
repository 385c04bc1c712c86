"""Modules of idioms at random: what ``lightning.Trainer`` makes of them, or a refusal that says why not.

``NUMBER`` idioms of nets, optimizers, schedulers, steps, logs, modes, data, trainers and callbacks are put together
from a seed, and trained by Lightning, by one rank of ours and by two. Weights, buffers, modes, the order of hooks, what
callbacks see of metrics, and the points that are logged have to be the same.
"""

import csv
import logging
import os
import random
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_recipes.errors import RecipeError
from ddp_recipes.testing import on_ranks
from helpers.patience import patience
from helpers.ranks import run_recipe

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.skipif(find_spec("lightning") is None, reason="needs the package lightning"),
    pytest.mark.filterwarnings("ignore"),  # what Lightning warns of, which its own Trainer does as well
]

Outcome = Mapping[str, Any]
LATE = "trainer.accumulation_of_four+mode.all_in_train_start"  # a step an epoch, of which the second is no better


@pytest.fixture(autouse=True, scope="module")
def own_parts() -> Iterator[None]:
    """Load Lightning once, before ranks are forked; it changes the environment."""
    before = dict(os.environ)
    sys.path.insert(0, str(HERE))
    idioms()
    os.environ.clear()
    os.environ.update(before)
    yield
    sys.path.remove(str(HERE))


def idioms() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module("lightning_options")


def drawn(generator: random.Random) -> str:
    """Put idioms together: a part of each kind, of logs and modes some."""
    kinds = idioms().IDIOMS
    counts = {
        "data": 1,
        "net": 1,
        "optimizer": generator.random() < 0.7,
        "scheduler": generator.random() < 0.4,
        "returns": generator.random() < 0.3,
        "module": generator.choice([0, 0, 1, 2]),
        "mode": generator.choice([0, 1, 1, 2]),
        "train_log": generator.choice([1, 2, 3]),
        "val_log": generator.choice([1, 2, 3]),
        "hook_log": generator.choice([0, 1, 2]),
        "trainer": generator.choice([0, 1, 2, 3, 4]),
        "callback": generator.choice([0, 0, 1, 2, 3]),
        "given": generator.random() < 0.4,
        "checkpoint": generator.random() < 0.15,
    }
    way = "manual" if generator.random() < 0.3 else "stepping"
    if way == "manual":
        counts |= {"returns": 0}
    chosen = ["train_log.loss", "val_log.loss"]
    for kind, count in {**counts, way: 1}.items():
        wrong = idioms().WRONG | (idioms().NOT_MANUAL if way == "manual" else set())
        right = sorted(kinds[kind].keys() - (set() if generator.random() < 0.02 else wrong))
        names = generator.sample(right, int(count))
        chosen += [f"{kind}.{name}" for name in names]
        chosen += ["train_log.both"] if "early_by_epoch" in names else []
    if not idioms().SEVERAL_TIMES.isdisjoint(chosen):
        chosen = [name for name in chosen if not name.startswith(idioms().IN_BETWEEN)]
    for name, others in idioms().APART.items():
        if any(each.startswith(others) for each in chosen):
            chosen = [each for each in chosen if not each.startswith(name)]
    return "+".join(dict.fromkeys(chosen))


def each_once() -> list[str]:
    """Return every idiom by itself, with a loss that is logged."""
    return [
        "+".join(dict.fromkeys(["train_log.loss", "val_log.loss", f"{kind}.{name}"]))
        for kind, found in idioms().IDIOMS.items()
        for name in found
    ]


# --- the three ways --------------------------------------------------------------------------------------------------


def by_lightning(cases: Sequence[str], folder: Path) -> list[Outcome]:
    """Train all by Lightning, in a process of its own."""

    def train(*_: Any) -> list[Outcome]:
        warnings.simplefilter("ignore")
        for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        found: list[Outcome] = []
        for number, case in enumerate(cases):
            file = folder / f"{number}_lightning.pt"
            try:
                found.append({"points": idioms().by_lightning(case, file)})
            except (Exception, SystemExit) as error:
                found.append({"error": error_line(error)})
        return found

    return list(on_ranks(train, 1, timeout_s=patience(60 + 2 * len(cases)))[0])


def overrides_of(case: str, file: Path) -> list[str]:
    """Return the overrides with which we train it."""
    options = {"max_epochs": 3, "log_every_n_steps": 1, **idioms().plan_of(case).trainer}
    return [
        *("task=lightning", "data=lightning", "data.global_batch_size=8", "model=toy", "logger=csv"),
        *("~model", "+model._target_=lightning_options.make", f"+model.idioms='{case}'", f"+model.file={file}"),
        *("trainer.progress=false", "launcher.device=cpu"),
        *(f"trainer.{key}={'null' if value is None else value}" for key, value in options.items()),
        *idioms().overrides_of(case),
    ]


def by_us(case: str, world_size: int, file: Path, directory: Path) -> Outcome:
    """Train one by so many ranks."""
    kept = idioms().plan_of(case).checkpoint or ("checkpoint=none",)
    try:
        run_recipe([*overrides_of(case, file), *kept], world_size, directory, timeout_s=patience(60))
    except RecipeError as error:
        return {"refused": str(error)}
    except BaseException as error:
        return {"error": " | ".join(str(error).strip().splitlines()[-3:])}
    return {"points": points_of(directory)}


def error_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip().splitlines()[0]


def points_of(directory: Path) -> list[tuple[int, dict[str, float]]]:
    if not (file := directory / "csv" / "metrics.csv").exists():  # where fast_dev_run leaves out loggers
        return []
    with file.open() as file:
        rows = list(csv.DictReader(file))
    others = ("step", "time")
    return [
        (int(row["step"]), {name: float(value) for name, value in row.items() if value and name not in others})
        for row in rows
    ]


# --- what has to be the same -----------------------------------------------------------------------------------------

OURS = {"train/loss", "train/lr", "train/grad_norm", "train/samples_per_second", "train/epoch", "val/loss", "epoch"}


def differences(theirs: Any, ours: Any, their_points: Any, our_points: Any, every: int) -> Iterator[str]:
    """Yield what is not the same; each so many steps are logged."""
    if theirs["calls"] != ours["calls"]:
        pairs = enumerate(zip(theirs["calls"], ours["calls"], strict=False))
        at = next((number for number, pair in pairs if len({*pair}) > 1), -1)
        around = slice(max(at - 2, 0), at + 3)
        yield f"hooks: {theirs['calls'][around]} is {ours['calls'][around]}, at {at}"
    if theirs["modes"] != ours["modes"]:
        pairs = zip(theirs["modes"], ours["modes"], strict=False)
        yield f"modes: {next((pair for pair in pairs if pair[0] != pair[1]), 'their number')}"
    if theirs["steps"] != ours["steps"]:
        pairs = zip(theirs["steps"], ours["steps"], strict=False)
        yield f"steps: {next((pair for pair in pairs if pair[0] != pair[1]), 'their number')}"
    for name, value in theirs["state"].items():
        if not torch.allclose(value.double(), ours["state"][name].double(), rtol=1e-3, atol=2e-5):
            yield f"{name}: {value.flatten()[:3].tolist()} is {ours['state'][name].flatten()[:3].tolist()}"
    for (hook, found), (_, mine) in zip(theirs["metrics"], ours["metrics"], strict=False):
        if wrong := [name for name in found if not near(found[name], mine.get(name))]:
            yield f"metrics in {hook}: {[(name, found[name], mine.get(name)) for name in wrong]}"
            break
    series, mine = series_of(their_points), series_of(sorted(our_points, key=lambda point: point[0]))
    for name, values in series.items():
        if len(values) != len(mine.get(name, [])) or not all(map(near, values, mine[name])):
            yield f"points of {name}: {values} are {mine.get(name)}"
    # A run that is shorter than log_every_n_steps is logged once, in Lightning not at all.
    steps = min(theirs["calls"].count("on_train_batch_end"), max((step for _, step, *_ in theirs["steps"]), default=0))
    if (more := mine.keys() - series.keys()) and steps >= every:
        yield f"points of {', '.join(sorted(more))} are not Lightning's"


def near(one: float, other: float | None) -> bool:
    return other is not None and (abs(one - other) <= 2e-5 + 1e-3 * abs(one) or (one != one and other != other))


def series_of(points: Sequence[tuple[int, dict[str, float]]]) -> dict[str, list[float]]:
    """Return the points of each name, of which a file keeps the latest of a step."""
    series: dict[str, dict[int, float]] = {}
    for step, values in points:
        for name, value in values.items():
            if name not in OURS and not re.fullmatch(r"val/\w/loss", name):
                series.setdefault(name, {})[step] = value
    return {name: list(values.values()) for name, values in series.items()}


def tried(cases: Sequence[str], folder: Path, two_ranks: bool = True) -> Counter[str]:
    """Train all of them in the three ways; print what differs, and return how many of each outcome there are."""
    count: Counter[str] = Counter()
    for number, (case, theirs) in enumerate(zip(cases, by_lightning(cases, folder), strict=True)):
        alone = idioms().plan_of(case).alone
        for world_size in (1,) if alone or not two_ranks else (1, 2):
            file = folder / f"{number}_{world_size}.pt"
            ours = by_us(case, world_size, file, folder / f"{number}_{world_size}")
            every = idioms().plan_of(case).trainer.get("log_every_n_steps", 1)
            outcome, said = judged(theirs, ours, folder / f"{number}_lightning.pt", file, every)
            count[outcome] += 1
            if outcome in ("other", "failed"):
                lines = "".join(f"  {line}\n" for line in said)
                sys.stderr.write(f"\n{outcome} at {world_size} ranks: {case}\n{lines}")
            elif outcome == "refused":
                sys.stdout.write(f"refused at {world_size}: {case}: {said[0][:200]}\n")
            elif outcome == "refused by both":
                sys.stdout.write(f"both at {world_size}: {case}: {said[0][:200]}\n")
            elif outcome == "taken":
                sys.stdout.write(f"taken at {world_size}: {case}: {said[0][:200]}\n")
    return count


def judged(theirs: Outcome, ours: Outcome, their_file: Path, our_file: Path, every: int) -> tuple[str, list[str]]:
    """Return ``same``, ``other``, ``failed``, ``refused`` by us or ``refused by both``, or ``taken`` by us alone."""
    if "error" in theirs:
        said = f"Lightning: {theirs['error']} Here: {ours}"
        return ("taken" if "points" in ours else "refused by both"), [said]
    if "refused" in ours:
        return "refused", [ours["refused"]]
    if "error" in ours:
        return "failed", [ours["error"]]
    found = list(
        differences(
            torch.load(their_file, weights_only=False),
            torch.load(our_file, weights_only=False),
            theirs["points"],
            ours["points"],
            every,
        )
    )
    return ("other", found) if found else ("same", [])


def report(kind: str, seed: object, cases: int, count: Counter[str], seconds: float) -> None:
    outcomes = ", ".join(f"{number} {outcome}" for outcome, number in sorted(count.items()))
    sys.stdout.write(f"{kind}: {idioms().NUMBER} idioms, {cases} cases, seed {seed}: {outcomes}, {seconds:.0f} s\n")


@pytest.mark.slow
def test_idioms_put_together_at_random_give_what_lightning_gives(tmp_path: Path) -> None:
    seed, began = 27, time.monotonic()
    generator = random.Random(seed)
    cases = [drawn(generator) for _ in range(6)]
    count = tried(cases, tmp_path)
    report("a sample", seed, len(cases), count, time.monotonic() - began)
    assert not count["other"]
    assert not count["failed"]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8))
def test_many_more_of_them(seed: int, tmp_path: Path) -> None:
    began, generator = time.monotonic(), random.Random(1000 + seed)
    cases = [drawn(generator) for _ in range(100)]
    count = tried(cases, tmp_path)
    report("many", 1000 + seed, len(cases), count, time.monotonic() - began)
    assert not count["other"]
    assert not count["failed"]


@pytest.mark.slow
def test_what_meets_at_the_end_of_an_epoch_is_as_in_lightning(tmp_path: Path) -> None:
    """A rest of batches to accumulate, and early stopping by what training logs."""
    own = "trainer.accumulation", "callback.early_by_training", "train_log.both+callback.early_by_epoch"
    cases = [f"train_log.loss+val_log.loss+{each}" for each in own]
    assert tried(cases, tmp_path) == {"same": 2 * len(cases)}


@pytest.mark.slow
def test_what_modules_and_callbacks_do_with_lightnings_own_methods_is_as_in_lightning(tmp_path: Path) -> None:
    own = "hook_log.own_log+scheduler.follows_the_steps+callback.summary+callback.measures"
    assert tried([f"train_log.loss+val_log.loss+{own}"], tmp_path) == {"same": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "ways"),
    [
        ("trainer.in_bfloat16+manual.manual_sharpness_aware", 1),  # weights change between two forward passes
        ("checkpoint.best_of_training+callback.stops", 2),
        ("hook_log.by_the_logger+hook_log.the_end", 2),  # also before training starts
        ("module.reads_the_trainer", 2),
        ("data.longer_and_shorter", 2),
        # A plateau of steps is looked at before hooks at an epoch's end.
        (f"net.batch_norm+scheduler.plateau_by_step+module.reads_the_trainer+{LATE}", 1),
        ("trainer.no_epoch", 2),  # nor a start or end of training
        ("module.stops_before_training", 2),
        ("module.has_hooks_of_callbacks", 2),
    ],
)
def test_what_surrounds_a_module_is_as_in_lightning(own: str, ways: int, tmp_path: Path) -> None:
    assert tried([f"train_log.loss+val_log.loss+{own}"], tmp_path) == {"same": ways}


@pytest.mark.nightly
def test_each_idiom_by_itself(tmp_path: Path) -> None:
    began, cases = time.monotonic(), each_once()
    assert len(cases) >= 150
    count = tried(cases, tmp_path)
    report("each", "none", len(cases), count, time.monotonic() - began)
    assert not count["other"]
    assert not count["failed"]
