"""Recipes drawn from what goes together, ranks that they lose, and what their runs leave."""

import csv
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from ddp_recipes.reporting.run_directory import Summary
from helpers.patience import patience

HERE = Path(__file__).parent
OFTEN = 0.4  # how likely it is that a recipe has something other than the first of several
ALWAYS = (
    "data.num_samples=61",
    "trainer.max_epochs=3",
    "logger=csv",
    "trainer.log_every_n_steps=1",
    "checkpoint.save_top_k=-1",
)
GROWING = (
    "+callbacks.growing._target_=ddp_recipes.callbacks.accumulation.GradientAccumulation"
    " +callbacks.growing.schedule={1:2}"
)
MODEL = "model._target_=resuming_parts.Deep model.hidden_features=16"
STRATEGIES = (
    "strategy=single",
    "strategy=ddp",
    "strategy=ddp strategy.shared_memory=false",
    "strategy=ddp +strategy.comm_hook=bf16",
    "strategy=ddp strategy.find_unused_parameters=true",
    "strategy=ddp strategy.static_graph=true",
    "strategy=ddp_exact strategy.shards=4",
    "strategy=fsdp strategy.wrap=[0,1,2,3,4]",
    "strategy=fsdp strategy.wrap=[0,1,2,3,4] strategy.param_dtype=bfloat16",
    "strategy=fsdp strategy.wrap=[0,1,2,3,4] strategy.level=1",
    "strategy=fsdp strategy.wrap=[0,1,2,3,4] strategy.shards=4 strategy.level=2",
    "strategy=fsdp strategy.wrap=[1,3] strategy.replicas=2",
    "strategy=ddp_pipeline model.split=[2]",
    "strategy=ddp_pipeline model.split=[2] strategy.schedule=gpipe",
    "strategy=parameter_server",
)
CHOICES: tuple[tuple[str, ...], ...] = (
    (
        MODEL,
        f"{MODEL} +model.norm=batch",
        "model._target_=resuming_parts.Teacher model.hidden_features=16",
        "model._target_=resuming_parts.Counted model.hidden_features=16",
    ),
    (
        "optimizer=sgd",
        "optimizer=adamw",
        "optimizer=adamw +optimizer.amsgrad=true",
        "optimizer._target_=torch.optim.RAdam ~optimizer.nesterov ~optimizer.momentum ~optimizer.fused",
        "optimizer=adam +optimizer.foreach=true",
        "optimizer=adamw optimizer.layer_decay=0.7",
        "optimizer=sgd +optimizer.groups.biases={params:'*.bias',weight_decay:0.1,lr:0.02}",
        "optimizer._target_=own_parts.ScheduleFree ~optimizer.nesterov ~optimizer.momentum ~optimizer.fused"
        " ~optimizer.weight_decay",
        "optimizer._target_=torch.optim.ASGD ~optimizer.nesterov ~optimizer.momentum ~optimizer.fused",
    ),
    (
        "scheduler=constant",
        "scheduler=cosine",
        "scheduler=one_cycle",
        "scheduler=step scheduler.step_size=1",
        "scheduler=warmup_cosine scheduler.milestones=[3]",
        "scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau +scheduler.patience=0 scheduler.factor=0.5",
    ),
    ("", "model.freeze=['*.bias']"),
    ("", "task.train_metrics=true", "+task.metrics.wide._target_=metric_parts.Wide"),
    ("trainer.accumulate_grad_batches=1", "trainer.accumulate_grad_batches=2", GROWING),
    (
        "",
        "trainer.gradient_clip_val=0.05",
        "trainer.gradient_clip_val=0.01 trainer.gradient_clip_algorithm=value",
    ),
    (
        "trainer.precision=32-true",
        *(f"trainer.precision={each}" for each in ("bf16-mixed", "16-mixed", "bf16-true", "64-true")),
    ),
    (
        "",
        "callbacks=ema",
        "callbacks=early_stopping callbacks.early_stopping.patience=2",
        "callbacks=[ema,lr_monitor] callbacks.ema.every_n_steps=2 callbacks.ema.start_step=3",
    ),
    ("trainer.val_check_interval=1.0", "trainer.val_check_interval=2", "trainer.check_val_every_n_epoch=2"),
    ("checkpoint.every_n_steps=1", "checkpoint.every_n_steps=3", "checkpoint.every_n_epochs=1"),
    ("", "checkpoint.async_save=true"),
    (
        "data.shuffle=true",
        "data.shuffle=false",
        f"data.weights=[{','.join(['1', '3'] * 30 + ['2'])}]",
        f"data.group_by_length=[{','.join(map(str, range(61)))}]",
    ),
    ("data.drop_last=false", "data.drop_last=true"),
    ("data.shard=contiguous", "data.shard=strided"),
    (
        "",
        "data.train._target_=own_parts.OneByOne data.num_workers=2",
        "data.train._target_=own_parts.OneByOne",
        "data.train._target_=own_parts.OneByOne data.num_workers=1 data.persistent_workers=false",
    ),
    ("", "data.val=null", "trainer.limit_val_batches=1"),
    ("", "task.loss._target_=torch.nn.HuberLoss"),
    ("", "trainer.max_steps=7", "trainer.overfit_batches=2"),
    ("", "model.activation_checkpointing=true"),
    ("", "model.micro_batches=2"),
    ("trainer.limit_train_batches=1.0", "trainer.limit_train_batches=0.7"),
    ("trainer.fast_paths=true", "trainer.fast_paths=false"),
)
SEVERAL_PASSES = ("shards=4", "fsdp", "pipeline", "batches=2", "growing", "activation_checkpointing")
APART = {  # what is refused beside something else, for which the first of its kind is taken
    "resuming_parts.Counted": SEVERAL_PASSES,
    "resuming_parts.Teacher": SEVERAL_PASSES,
    "model.micro_batches": ("fsdp", "pipeline"),
    "trainer.precision": ("param_dtype",),
    "ScheduleFree": ("model.freeze", "fsdp"),  # takes a gradient of each parameter for granted
    "scheduler=one_cycle": ("optimizer._target_",),
    "task.train_metrics": ("pipeline",),
}
EVENTS = (
    *("on_start", "on_epoch_start", "on_step", "on_epoch_end", "on_validation_start", "on_validation"),
    *("on_validation_end", "on_save_start", "on_save", "on_end", "backward"),
)
REFUSED = ("writes to ", "Expected more than 1 value per channel")  # ours in a step, and torch's batch norm
RATES = ("samples_per_second", "peak_memory_bytes")  # what no two runs have alike


def drawn(random: Random, strategies: Sequence[str] = STRATEGIES) -> tuple[list[str], int, int | None]:
    """Return overrides, the number of ranks, and another one to go on with where that changes no bits."""
    strategy = random.choice(strategies)
    chosen = [random.choice(each[1:]) if random.random() < OFTEN else each[0] for each in CHOICES]
    for place, option in enumerate(chosen):
        others = " ".join((strategy, *chosen[:place], *chosen[place + 1 :]))
        if any(name in option and other in others for name, rest in APART.items() for other in rest):
            chosen[place] = CHOICES[place][0]
    ranks = 1 if "single" in strategy else 2 if "pipeline" in strategy else random.choice((2, 3))
    ranks = 4 if "replicas=2" in strategy else ranks
    other = None
    if "shards=4" in strategy:
        ranks, other = random.sample((1, 2, 4), 2)
    return f"{strategy} {' '.join(chosen)}".split(), ranks, other


def left_by(directory: Path) -> dict[str, Any]:
    """Return what a run came to: everything but times and paths."""
    summary: Summary = json.loads((directory / "summary.json").read_text())
    with (directory / "csv" / "metrics.csv").open() as file:
        rows = [
            {key: value for key, value in row.items() if value and not key.endswith(RATES)}
            for row in csv.DictReader(file)
        ]
    metrics = {key: value for key, value in summary["metrics"].items() if not key.endswith(RATES)}
    best = summary["best_checkpoint"] and Path(summary["best_checkpoint"]).resolve().name
    own = {key: summary[key] for key in ("weights_sha256", "samples_seen", "status", "step") if key in summary}
    return {**own, "metrics": metrics, "rows": [row for row in rows if len(row) > 1], "best": best}


def see_same(whole: dict[str, Any], found: dict[str, Any], script: str) -> None:
    """Fail unless two runs have left the same."""
    different = {key: (whole[key], found[key]) for key in whole if whole[key] != found[key]}
    assert not different, f"{script}\n{json.dumps(different, indent=1)[:3000]}"


def ended(python: str, folder: Path, *overrides: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a recipe in a folder. A rank that does not respond is named, with its stack, before the test gives up."""
    folder.mkdir()
    bound = f"launcher.timeout_s={round(patience(60))}"
    paths = os.pathsep.join(map(str, (HERE, HERE.parent / "distributed", HERE.parent)))
    return subprocess.run(
        [python, "-m", "ddp_recipes", bound, *overrides, "hydra.run.dir=run"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([paths, os.environ.get("PYTHONPATH", "")]), **environ},
        capture_output=True,
        text=True,
        timeout=patience(180),
    )


def losses_of(random: Random, steps: int, ranks: int) -> str:
    """Return one loss or two, as ``resuming_parts.Losing`` takes them.

    One raises at most: a run ends whose ranks raise the same twice at a step.
    """
    ways = iter((random.choice(("raise", "SIGKILL", "SIGKILL")), "SIGKILL"))
    return ";".join(
        f"{random.randrange(steps + 1)} {random.randrange(ranks)} {random.choice(EVENTS)} {next(ways)}"
        for _ in range(random.choice((1, 1, 2)))
    )
