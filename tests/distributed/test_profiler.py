"""``debug=profiler``: where a step's time goes, and nothing else changes."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_recipes.reporting.run_directory import Summary
from helpers.marks import slow_but

Run = Callable[..., Summary]

# Steps 3 to 5 of 8: the middle of two epochs, so that a validation and a checkpoint are within.
PROFILED = [
    "debug=profiler",
    *(f"callbacks.profiler.{name}" for name in ("wait=1", "warmup=1", "active=3")),
    "trainer.log_every_n_steps=2",
    "data.global_batch_size=16",
]
PHASES = ["data", "forward", "backward", "all-reduce", "optimizer", "logging", "other"]
SLEEPY_SAMPLES = "data.train._target_=profiled_parts.SleepySamples"
ROW = re.compile(r"^  (\S.*?) +([\d.]+) ms +(\d+)%$", re.MULTILINE)


def log_of(summary: Summary) -> str:
    return (Path(summary["run_directory"]) / "train.log").read_text()


def table_of(summary: Summary) -> dict[str, float]:
    """Return the table in a run's log: ms by phase, and at last those of the step."""
    return {name: float(took) for name, took, _ in ROW.findall(log_of(summary))}


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    slow_but(
        [(["strategy=single"], 1), (["strategy=ddp"], 2)],
        [
            (["strategy=single"], 1),
            (["strategy=dp"], 1),
            (["strategy=ddp"], 2),
            (["strategy=ddp", "strategy.comm_hook=bf16"], 2),  # which torch sends while backward goes on
            (["strategy=ddp", "trainer.accumulate_grad_batches=2", "trainer.max_epochs=4"], 2),
            (["strategy=ddp_exact", "strategy.shards=4"], 2),
            (["strategy=single", "model.micro_batches=2", "trainer.gradient_clip_val=0.1"], 1),
            (["strategy=single", SLEEPY_SAMPLES, "data.num_workers=1"], 1),
            (["strategy=ddp", "model._target_=own_parts.Lit", "task=lightning"], 2),
            (["strategy=ddp_pipeline"], 2),
            (["strategy=single", "trainer.overfit_batches=4"], 1),
        ],
    ),
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_phases_add_up_to_the_step_and_the_run_is_the_same(overrides: list[str], world_size: int, run: Run) -> None:
    summary = run(*PROFILED, *overrides, world_size=world_size)
    assert "where a step's time goes, mean of 3 steps on rank 0" in log_of(summary)
    phases = table_of(summary)
    step = phases.pop("step")
    passes = ["forward and backward"] if overrides == ["strategy=ddp_pipeline"] else ["forward", "backward"]
    assert list(phases) == ["data", *passes, *PHASES[3:]]
    assert sum(phases.values()) == pytest.approx(step, abs=0.01), "each is rounded"
    assert all(phases[name] > 0 for name in phases)
    folder = Path(summary["run_directory"]) / "tensorboard"
    assert [path.name for path in folder.iterdir()] == ["rank_0.pt.trace.json"]
    seen = {event.get("name") for event in json.loads((folder / "rank_0.pt.trace.json").read_text())["traceEvents"]}
    assert {"data", *passes, "all-reduce", "optimizer", "logging"} <= seen
    without = run(*PROFILED[4:], *overrides, world_size=world_size)
    assert without["weights_sha256"] == summary["weights_sha256"]
    assert without["metrics"]["val/loss"] == summary["metrics"]["val/loss"]
    assert not table_of(without)


@pytest.mark.parametrize(
    ("overrides", "phase"),
    [(["model._target_=profiled_parts.SleepsForward"], "forward"), ([SLEEPY_SAMPLES], "data")],
    ids=["forward", "data"],
)
def test_what_sleeps_shows_where_it_does(overrides: list[str], phase: str, run: Run) -> None:
    phases = table_of(run(*PROFILED, *overrides))
    step = phases.pop("step")
    assert max(phases, key=lambda name: phases[name]) == phase
    assert phases[phase] > step / 2


def test_validation_and_saving_belong_to_no_step(run: Run) -> None:
    phases = table_of(
        run(*PROFILED, "model._target_=profiled_parts.SleepsInEvaluation", "trainer.num_sanity_val_steps=0")
    )
    assert phases["step"] < 500 / 3, "one of three steps follows a validation that takes longer"


@pytest.mark.parametrize("world_size", [1, 2])
def test_tensorboard_shows_the_table_and_a_picture(world_size: int, run: Run) -> None:
    pytest.importorskip("matplotlib")
    summary = run(*PROFILED, "logger=tensorboard", world_size=world_size)
    folder = Path(summary["run_directory"])
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    (text,) = events.Tensors("profile/text_summary")
    table = text.tensor_proto.string_val[0].decode()
    rows = dict(re.findall(r"^\| (\S[\w -]*) \| ([\d.]+) ms \| \d+% \|$", table, re.MULTILINE))
    assert {name: float(took) for name, took in rows.items()} == table_of(summary)
    (image,) = events.Images("profile")
    assert image.encoded_image_string == (folder / "profile.png").read_bytes()


def test_a_run_that_ends_early_leaves_the_steps_it_had(run: Run) -> None:
    summary = run(*PROFILED, "trainer.max_steps=3")
    assert "mean of 1 step on rank 0" in log_of(summary)
    assert list(table_of(summary)) == [*PHASES, "step"]
    nothing = run(*PROFILED, "trainer.max_steps=1")
    assert nothing["status"] == "finished"
    assert "There is no profile: it begins after 2 steps of a run." in log_of(nothing)


def test_a_run_without_the_profiler_records_nothing(run: Run, tmp_path: Path) -> None:
    run(f"+callbacks.ranges={{_target_: profiled_parts.Ranges, file: {tmp_path / 'names'}}}")
    names = set(json.loads((tmp_path / "names").read_text()))
    assert "aten::addmm" in names
    assert not names & {*PHASES, "validation"}
