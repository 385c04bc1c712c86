"""Lightning modules of idioms at random, stopped and gone on with, or with ranks lost: as if nothing had happened."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from differential import test_lightning
from differential.recipes import ended, left_by, losses_of
from differential.test_lightning import drawn, overrides_of, own_parts

from helpers.patience import patience
from helpers.ranks import run_recipe
from helpers.warm import warm_python

pytestmark = [*test_lightning.pytestmark, pytest.mark.usefixtures(own_parts.__name__), pytest.mark.slow]

SEED = int(os.environ.get("DDP_RECIPES_TEST_SEED", "11"))  # the same every day; others by night, by hand
FEW, MANY = 2, 150
FEW_LOST, MANY_LOST = 2, 80
# What hooks log that are called again as a run goes on, with the weights that there are by then; what the module itself
# counts, in no state of its own.
OF_BEFORE = "in_on_train_start|val_sometimes"
UNKNOWN = {
    "mode.net_in_train_start",
    "mode.norms_in_on_train_start",
    "mode.eval_within_a_step",
}  # ways that are the module's at its start
ALWAYS = [
    *("checkpoint=default", "checkpoint.every_n_steps=1", "checkpoint.save_top_k=-1"),
    "+callbacks.stopping._target_=resuming_parts.Stopping",
]


def going_on(random: Random) -> str:
    """Draw idioms that leave something to go on with."""
    return "+".join(each for each in drawn(random).split("+") if not each.startswith("trainer.fast"))


def series(left: dict[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Return the points of each name, in the order of their steps."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in sorted(left["rows"], key=lambda row: int(row["step"])):
        for name, value in row.items():
            if name != "step" and not re.match(OF_BEFORE, name):
                found.setdefault(name, []).append((int(row["step"]), float(value)))
    return found


def alike(one: list[tuple[int, float]], other: list[tuple[int, float]]) -> bool:
    """Whether points are the same, but for the rounding of sums that ranks had each a part of."""
    return [step for step, _ in one] == [step for step, _ in other] and all(
        value == new or test_lightning.near(value, new) for (_, value), (_, new) in zip(one, other, strict=True)
    )


def see_alike(whole: dict[str, Any], found: dict[str, Any], script: str) -> None:
    """Fail unless two runs have left the same."""
    for key in ("weights_sha256", "samples_seen", "status"):
        assert found[key] == whole[key], f"{script}\n{key}"
    ours, expected = series(found), series(whole)
    different = [name for name in {**ours, **expected} if not alike(ours.get(name, []), expected.get(name, []))]
    assert not different, f"{script}\n{[(name, expected.get(name), ours.get(name)) for name in different]}"


def stop_and_go_on(
    case: str, ranks: int, where: tuple[float, int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Play a module whole, and stopped at a part of its steps, by a rank, in a way; return whether it can be."""
    file = {name: tmp_path / f"{name}.pt" for name in ("whole", "parts")}

    def train(name: str, *more: str) -> None:
        own = [*overrides_of(case, file[name]), *ALWAYS, *more]
        run_recipe(own, ranks, tmp_path / name, timeout_s=patience(60))

    try:
        train("whole")
    except Exception as error:  # what is refused, and what a module raises, the machine beside this one looks at
        print("refused:", case, str(error)[:200])
        return False
    whole = left_by(tmp_path / "whole")
    steps = json.loads((tmp_path / "whole" / "summary.json").read_text())["global_step"]
    if steps < 2 or not UNKNOWN.isdisjoint(case.split("+")):
        print("nothing to go on with:", case)
        return False
    stop = 1 + int(where[0] * (steps - 1))
    script = f"{case}; {ranks} ranks, {stop} {where[1]} {where[2]}"
    monkeypatch.setenv("STOPS", f"{stop} {where[1]} {where[2]}")
    with suppress(Exception):
        train("parts")
    status = json.loads((tmp_path / "parts" / "summary.json").read_text())
    assert status["status"] == ("failed" if where[2] == "raise" else "preempted"), f"{script}\n{status['error']}"
    monkeypatch.delenv("STOPS")
    try:
        train("parts", "ckpt_path=auto")
    except Exception as error:
        raise AssertionError(script) from error
    found = left_by(tmp_path / "parts")
    see_alike(whole, found, script)
    one, other = (torch.load(each)["state"] for each in file.values())
    assert all(torch.equal(value, other[name]) for name, value in one.items()), script
    print("same:", script)
    return True


@pytest.mark.parametrize(
    "number", [*range(FEW), *(pytest.param(number, marks=pytest.mark.nightly) for number in range(FEW, MANY))]
)
def test_a_stopped_module_goes_on_as_if_it_had_not_been(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(f"{SEED} {number} resumed")
    case, ranks = going_on(random), random.choice((1, 2))
    where = random.random(), random.randrange(ranks), random.choice(("raise", "SIGTERM"))
    stop_and_go_on(case, ranks, where, tmp_path, monkeypatch)


def test_a_signal_while_other_weights_are_validated_leaves_those_that_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, at_the_end_of_an_epoch = "train_log.loss+val_log.loss+module.averaged_weights", 0.26
    assert stop_and_go_on(case, 2, (at_the_end_of_an_epoch, 1, "SIGTERM"), tmp_path, monkeypatch)


def test_a_signal_does_not_end_the_training_for_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stop_and_go_on("train_log.loss+val_log.loss+hook_log.the_end", 2, (0.5, 1, "SIGTERM"), tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def python_with_lightning() -> Iterator[str]:
    with warm_python("lightning") as python:
        yield python


@pytest.mark.spawn
@pytest.mark.parametrize(
    "number",
    [*range(FEW_LOST), *(pytest.param(number, marks=pytest.mark.nightly) for number in range(FEW_LOST, MANY_LOST))],
)
def test_a_module_that_loses_ranks_ends_as_if_it_had_not(
    number: int, tmp_path: Path, python_with_lightning: str
) -> None:
    random = Random(f"{SEED} {number} lost")
    case, own = going_on(random), ["launcher.nproc_per_node=2", "+callbacks.losing._target_=resuming_parts.Losing"]

    def train(name: str, *more: str, **environ: str) -> subprocess.CompletedProcess[str]:
        overrides = [*overrides_of(case, tmp_path / f"{name}.pt"), *own, *more, "checkpoint.every_n_steps=2"]
        return ended(python_with_lightning, tmp_path / name, *overrides, **environ)

    whole = train("whole")
    if whole.returncode or not (UNKNOWN | {"callback.stops"}).isdisjoint(case.split("+")):
        return print("refused:", case, whole.stderr[-300:])
    summary = json.loads((tmp_path / "whole/run/summary.json").read_text())
    losses = losses_of(random, summary["global_step"], ranks=2)
    script = f"{case}; lost at {losses}"
    found = train("parts", f"launcher.replace_ranks={1 + losses.count(';')}", LOSES=losses)
    if found.returncode == 2:
        return print("refused:", case, found.stderr[-300:])
    assert found.returncode == 0, f"{script}\n{found.stderr}"
    see_alike(left_by(tmp_path / "whole/run"), left_by(tmp_path / "parts/run"), f"{script}\n{found.stderr}")
    print(f"same: {script}\n{found.stderr}")
