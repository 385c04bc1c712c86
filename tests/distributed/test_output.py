"""What a run leaves behind: one of everything, written by rank 0."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_recipes.checkpointing.reading import load
from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.tensors import digest
from helpers.marks import quick_each, slow_but
from helpers.ranks import run_recipe
from helpers.recipes import OF_KIND

Run = Callable[..., Summary]

PROMISED = {
    "status": "finished",
    "error": None,
    "world_size": 2,
    "nnodes": 1,
    "devices_per_replica": 1,
    "strategy": "ddp",
    "device": "cpu",
    "global_step": 8,
    "epoch": 2,
    "samples_seen": 128,
}


def files_of(folder: Path) -> set[str]:
    """Return the files of a run; event files have the host's name and the time in theirs."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return {name if "tfevents" not in name else "tensorboard/events" for name in names}


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()


def steps_of(folder: Path, tag: str) -> list[int]:
    return [event.step for event in events(folder).Scalars(tag)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_run_leaves_one_of_everything(world_size: int, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run("logger=tensorboard", "trainer.log_every_n_steps=1", directory=folder, world_size=world_size)
    steps = 2 * -(-64 // (8 * world_size))
    names = {"config.yaml", "train.log", "summary.json", "tensorboard/events"}
    checkpoints = {path.name for path in (folder / "checkpoints").glob("step_*.pt")}
    assert f"step_{steps:08d}.pt" in checkpoints
    assert len(checkpoints) <= 2, "the best and the last"
    linked = {"checkpoints/last.pt", "checkpoints/best.pt"}
    assert files_of(folder) == names | linked | {f"checkpoints/{name}" for name in checkpoints}
    assert len(list((folder / "tensorboard").iterdir())) == 1
    assert steps_of(folder, "train/loss") == list(range(1, steps + 1))
    assert not [path for path in tmp_path.iterdir() if path != folder], "nothing beside it"


def test_the_summary_says_what_was_promised(run: Run) -> None:
    summary = run(world_size=2)
    assert json.loads((Path(summary["run_directory"]) / "summary.json").read_text()) == summary
    assert {name: summary[name] for name in PROMISED} == PROMISED
    assert summary["samples_per_second"] > 0
    assert summary["step_time_ms"] > 0
    assert summary["peak_memory_bytes"] is None  # as on any CPU
    assert summary["wall_time_s"] > 0
    assert {"val/loss", "val/mae"} <= set(summary["metrics"])
    assert {"torch", "ddp_recipes"} <= set(summary)
    state = load(Path(summary["last_checkpoint"]))
    assert summary["weights_sha256"] == digest(state["model"])
    assert load(Path(summary["best_checkpoint"]))["metrics"]["val/loss"] <= summary["metrics"]["val/loss"]


def test_the_config_is_the_one_that_ran(run: Run) -> None:
    summary = run("optimizer.lr=0.125")
    config = OmegaConf.load(Path(summary["run_directory"]) / "config.yaml")
    assert isinstance(config, DictConfig)
    assert config["optimizer"]["lr"] == 0.125
    assert config["model"]["in_features"] == 10
    assert "hydra" not in config


def test_the_environment_reaches_no_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_SECRET", "hunter2")
    monkeypatch.setenv("OWN_HIDDEN", "12")
    summary = run(
        "+own.token=${oc.env:OWN_SECRET}",
        "model.hidden_features='${oc.decode:${oc.env:OWN_HIDDEN}}'",
        "logger=tensorboard",
        world_size=2,
    )
    folder = Path(summary["run_directory"])
    assert load(Path(summary["last_checkpoint"]))["model"]["net1.weight"].shape == (12, 10)
    for path in folder.rglob("*"):
        assert not path.is_file() or b"hunter2" not in path.read_bytes()
    assert "${oc.env:OWN_SECRET}" in (folder / "config.yaml").read_text()


def test_rates_are_those_of_steps_that_take_their_time(run: Run, tmp_path: Path) -> None:
    sleep_s, samples = 0.01, 16
    slow = ["model._target_=helpers.own_models.Slow", f"+model.sleep_s={sleep_s}", f"data.global_batch_size={samples}"]
    summary = run(*slow, "logger=tensorboard", "trainer.log_every_n_steps=1", directory=tmp_path)
    logged = [event.value for event in events(tmp_path).Scalars("train/samples_per_second")]
    for rate in (summary["samples_per_second"], *logged):
        assert samples / sleep_s / 100 < rate <= samples / sleep_s


@pytest.mark.slow
def test_ranks_find_files_where_tests_are(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(world_size=2)  # from elsewhere, by the same warm ranks
    (tmp_path / "table.csv").write_text("a,b,kind\n" + "1,2,x\n3,4,y\n" * 20)
    monkeypatch.chdir(tmp_path)
    own = ["data=csv", "data.path=table.csv", "data.inputs=[a,b]", "data.target=kind", "data.val=null"]
    own += ["model=linear", "launcher.device=cpu"]
    summary = run_recipe([*own, "trainer.max_epochs=1", "logger=none"], 2, tmp_path / "run")
    assert summary["status"] == "finished"


@pytest.mark.parametrize("world_size", quick_each(2, [2, 1]))
def test_tensorboard_has_each_step_once_after_a_resume(world_size: int, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    overrides = ["logger=tensorboard", "trainer.log_every_n_steps=1", "data.global_batch_size=8"]
    saving = ["checkpoint.every_n_steps=5", "checkpoint.save_top_k=-1"]
    run(*overrides, *saving, directory=folder, world_size=world_size)
    path = folder / "checkpoints" / "step_00000005.pt"
    run(*overrides, *saving, f"ckpt_path={path}", directory=folder, world_size=world_size)
    assert len(list((folder / "tensorboard").iterdir())) == 2, "one event file a start"
    run(*overrides, *saving, "ckpt_path=auto", directory=folder, world_size=world_size)  # with nothing left to do
    for tag in ("train/loss", "train/lr", "train/grad_norm", "train/samples_per_second"):
        assert steps_of(folder, tag) == list(range(1, 17))
    assert steps_of(folder, "val/loss") == [8, 16]


@pytest.mark.parametrize("named", [True, False], ids=["mappings", "pairs"])
def test_the_graph_of_a_model_is_written_or_said_not_to_be(named: bool, run: Run) -> None:
    data = ["data.train._target_=own_parts.Ignoring", "data.val._target_=own_parts.Ignoring", "task=classification"]
    if named:
        data += ["+data.train.named=true", "+data.val.named=true", "task=model_loss"]
        data += ["model._target_=own_parts.Ignorant"]
    summary = run(*data, "model.out_features=2", "logger=tensorboard", "logger.graph=true", "trainer.max_steps=2")
    assert events(Path(summary["run_directory"])).Tags()["graph"] == (not named)
    log = (Path(summary["run_directory"]) / "train.log").read_text()
    assert ("The graph is not written: a batch is a dict, not inputs and targets." in log) == named


def test_logged_numbers_are_the_same_at_any_world_size(run: Run) -> None:
    overrides = [
        "logger=tensorboard",
        "trainer.log_every_n_steps=1",
        "data.num_samples=61",
        "data.global_batch_size=16",
    ]
    one, two = (Path(run(*overrides, world_size=size)["run_directory"]) for size in (1, 2))
    for tag in ("train/loss", "train/lr", "train/grad_norm", "train/epoch", "val/loss", "val/mae"):
        values = [[event.value for event in events(folder).Scalars(tag)] for folder in (one, two)]
        assert values[1] == pytest.approx(values[0], rel=1e-5), tag


def test_lines_come_from_rank_0_and_warnings_from_all(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    wary = ["model._target_=own_parts.Wary", "trainer.progress=false"]
    log = (Path(run(*wary, world_size=2)["run_directory"]) / "train.log").read_text()
    terminal = capfd.readouterr()
    assert log.count("WARNING the cat looks") == log.count("rank 1: the cat looks") == 8
    assert terminal.err.count("the cat looks at the keyboard") == 8, "told also where no progress is shown"
    began, _, ended = terminal.out.partition("finished in")
    assert "val/loss" not in began
    shown = [{line[2:].partition("  ")[0] for line in table.splitlines()} for table in (began, ended)]
    assert {"model", "strategy", "replicas x devices", "data", "global batch", "steps", "run directory"} <= shown[0]
    assert {"val/loss", "train/lr", "median step"} <= shown[1]
    assert log.count("epoch 1  step 4  val/loss") == 1
    assert log.count("epoch 2  step 8  val/loss") == 1


@pytest.mark.slow
def test_what_data_workers_log_is_in_the_log_of_the_run(run: Run) -> None:
    data = "+data.train={_target_: data_parts.Complaining, size: 24}"
    keys = ["data.num_workers=2", "~data.train", data, "data.val=null", "trainer.max_epochs=1", "task=regression"]
    log = (Path(run(*keys, "data.batch_size=4", world_size=2)["run_directory"]) / "train.log").read_text()
    for number in range(24):
        assert log.count(f"sample {number} is torn") == 1
        assert log.count(f"sample {number} is worn out") == 1
    assert log.count("rank 1: sample") == 12
    assert log.count("…") == 24
    assert log.count("ValueError: number") == 24, "a long traceback is shortened in its middle"


def test_what_ranks_print_has_their_number(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    run("model._target_=own_parts.Talking", "trainer.max_epochs=1", world_size=3)
    terminal = capfd.readouterr()
    lines = [line for line in terminal.out.splitlines() if " of " in line]
    said = [f"{word} of {{}}" for word in ("one", "two", "three")]
    assert sorted(lines) == sorted(
        [line.format(0) for line in said] + [f"rank {rank}: {line.format(rank)}" for rank in (1, 2) for line in said]
    )
    assert sorted(line for line in terminal.err.splitlines() if "error of" in line) == [
        "error of 0",
        "rank 1: error of 1",
        "rank 2: error of 2",
    ]


@pytest.mark.parametrize(("model", "said"), [("Annealed", True), ("SavedAnnealed", False), ("Drawing", False)])
def test_numbers_that_steps_change_and_no_checkpoint_has_are_named(model: str, said: bool, run: Run) -> None:
    summary = run(f"model._target_=own_parts.{model}", "trainer.max_steps=4", world_size=2)
    log = (Path(summary["run_directory"]) / "train.log").read_text()
    assert ("Steps change what the model keeps in Python attributes: model.calls (1 → 3). No" in log) == said
    assert log.count("Python attributes") == said


@pytest.mark.parametrize("stateful", [True, False])
@pytest.mark.parametrize("strategy", slow_but(["ddp_exact"], ["ddp_exact", "fsdp"]))
def test_a_state_that_a_pass_hands_to_the_next_is_named(strategy: str, stateful: bool, run: Run) -> None:
    model = ["model._target_=own_parts.Recurrent", f"+model.stateful={str(stateful).lower()}"]
    blocks = ["strategy.wrap=[cell,out]"] if strategy == "fsdp" else []
    short = ["data.global_batch_size=16", "trainer.max_epochs=2"]
    summary = run(*model, f"strategy={strategy}", *blocks, *short, world_size=2)
    log = (Path(summary["run_directory"]) / "train.log").read_text()
    assert log.count("Steps change what the model keeps in Python attributes: model.state. No") == stateful
    assert log.count("Python attributes") == stateful


@pytest.mark.parametrize("shards", [2, 4, 6])  # an even number of passes a step
def test_a_state_that_lies_where_the_last_one_has_lain_is_named(shards: int, run: Run) -> None:
    exact = "strategy=ddp_exact", f"strategy.shards={shards}", f"data.global_batch_size={shards}"
    summary = run("model._target_=own_parts.Replacing", *exact, "trainer.max_steps=4")
    log = (Path(summary["run_directory"]) / "train.log").read_text()
    assert log.count("Steps change what the model keeps in Python attributes: model.passes. No") == 1


NO_BEST = "There will be no best checkpoint: none is due at a step that is validated, so of none val/loss is known."


@pytest.mark.parametrize(
    ("overrides", "meets"),
    [
        (["checkpoint.every_n_steps=3", "trainer.max_epochs=2"], False),
        (["checkpoint.every_n_steps=3", "trainer.max_epochs=3"], True),
        (["checkpoint.every_n_steps=3", "trainer.max_epochs=3", "trainer.check_val_every_n_epoch=2"], False),
        (["checkpoint.every_n_steps=3", "trainer.val_check_interval=3"], True),
        (["checkpoint.every_n_epochs=1", "trainer.check_val_every_n_epoch=2", "trainer.max_epochs=1"], False),
        (["checkpoint.every_n_epochs=1", "trainer.accumulate_grad_batches=3"], True),
        (["checkpoint.every_n_steps=3", "checkpoint.monitor=train/loss"], True),
        (["checkpoint.every_n_steps=3", "checkpoint.save_top_k=0"], True),
    ],
    ids=str,
)
def test_that_no_checkpoint_will_be_the_best_is_said_once(overrides: list[str], meets: bool, run: Run) -> None:
    """An epoch has four steps."""
    summary = run("data.global_batch_size=16", *overrides, world_size=2)
    log = (Path(summary["run_directory"]) / "train.log").read_text()
    assert log.count(NO_BEST) == (not meets)
    if "save_top_k" not in overrides[-1]:
        assert (summary["best_checkpoint"] is not None) == meets


def test_a_batch_larger_than_the_data_is_said_once(run: Run) -> None:
    summary = run("data.batch_size=40", world_size=2)
    log = (Path(summary["run_directory"]) / "train.log").read_text()
    assert log.count("A global batch of 80 samples is more than data.train has: each step takes all 64.") == 1
    log = (Path(run("data.batch_size=32", world_size=2)["run_directory"]) / "train.log").read_text()
    assert "A global batch" not in log


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ([], ["best", "last"]),
        (["checkpoint=none"], []),
        (["checkpoint.save_top_k=0"], ["last"]),
        (["checkpoint.save_last=false"], ["best"]),
        (["checkpoint.every_n_epochs=2"], ["best", "last"]),
    ],
    ids=str,
)
def test_checkpoints_that_are_kept(overrides: list[str], kept: list[str], run: Run) -> None:
    summary = run(*overrides, "data.batch_size=16", "trainer.max_epochs=3", world_size=2)
    folder = Path(summary["run_directory"]) / "checkpoints"
    assert {path.stem for path in folder.glob("*.pt")} - {path.stem for path in folder.glob("step_*")} == set(kept)
    for name in ("best", "last"):
        assert summary[f"{name}_checkpoint"] == (str(folder / f"{name}.pt") if name in kept else None)
    assert "val/loss" in summary["metrics"]


@pytest.mark.slow
def test_checkpoints_come_when_they_are_due(run: Run, notes: Callable[[], list[dict[str, Any]]], noting: str) -> None:
    def saves(*overrides: str) -> list[list[int]]:
        run("data.global_batch_size=8", "trainer.max_epochs=3", noting, *overrides, world_size=2)
        return [note["saves"] for note in notes()]

    assert saves() == [[8, 16, 24]] * 2
    assert saves("checkpoint.every_n_steps=10") == [[10, 20, 24]] * 2
    assert saves("checkpoint.every_n_epochs=2") == [[16, 24]] * 2
    assert saves("trainer.val_check_interval=0.5") == [[4, 8, 12, 16, 20, 24]] * 2
    assert saves("data.val=null") == [[8, 16, 24]] * 2


def test_the_best_checkpoint_is_that_of_the_best_value(run: Run) -> None:
    summary = run(
        "checkpoint.save_top_k=-1", "checkpoint.monitor=val/mae", "checkpoint.mode=max", "trainer.max_epochs=4"
    )
    folder = Path(summary["run_directory"]) / "checkpoints"
    values = {path: load(path)["metrics"]["val/mae"] for path in folder.glob("step_*.pt")}
    assert len(values) == 4
    assert (folder / "best.pt").samefile(max(values, key=lambda path: values[path]))


def test_a_metric_that_nothing_measures_is_refused(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for world_size in (1, 2):
        with pytest.raises(RequestError, match=r"val/acuracy is not measured. Measured are: .*val/mae"):
            run("checkpoint.monitor=val/acuracy", directory=folder, world_size=world_size)
    assert not folder.exists() or not any(folder.iterdir())


@pytest.mark.parametrize("world_size", [1, 2])
def test_evaluation_writes_a_summary_too(world_size: int, run: Run) -> None:
    trained = run()
    summary = run("mode=validate", f"ckpt_path={trained['run_directory']}", "logger=tensorboard", world_size=world_size)
    folder = Path(summary["run_directory"])
    assert files_of(folder) == {"config.yaml", "train.log", "summary.json", "tensorboard/events"}
    assert summary["weights_sha256"] == trained["weights_sha256"]
    assert steps_of(folder, "val/loss") == [16]
    assert folder != Path(trained["run_directory"])


OF_STRATEGIES = {
    "single": (["strategy=single"], 1),
    "ddp": (["strategy=ddp", "model.activation_checkpointing=net1"], 2),
    "fsdp": (["strategy=fsdp", "strategy.wrap=[net1,net2]"], 2),
    "ddp_pipeline": (["strategy=ddp_pipeline"], 2),
}


@pytest.mark.parametrize("name", slow_but(["single"], OF_STRATEGIES))
def test_operations_are_counted_where_it_is_asked_for(name: str, run: Run) -> None:
    """They are those of the model, whatever it is run by."""
    strategy, ranks = OF_STRATEGIES[name]
    own = [*strategy, "data.global_batch_size=8", "trainer.accumulate_grad_batches=2", "trainer.log_every_n_steps=1"]
    plain = run(*own, world_size=ranks)
    summary = run(*own, "trainer.peak_flops=1e9", world_size=ranks)
    of_sample = 2 * 2 * (10 * 10 + 10 * 5) + 2 * 10 * 5
    assert summary["flops_per_step"] == 16 * of_sample
    processes = 1 if name == "single" else 2
    assert summary["mfu"] == pytest.approx(of_sample * summary["samples_per_second"] / (processes * 1e9))
    assert summary["metrics"]["train/mfu"] == pytest.approx(
        summary["metrics"]["train/flops_per_second"] / (processes * 1e9)
    )
    assert summary["weights_sha256"] == plain["weights_sha256"]
    assert (plain["flops_per_step"], plain["mfu"]) == (None, None)
    assert not {"train/mfu", "train/flops_per_second"} & {*plain["metrics"]}


VALUES = "model._target_=own_parts.Deciding"  # whose flow depends on them


LIGHTNING = "model._target_=own_parts.Lit task=lightning"


@pytest.mark.parametrize(
    ("name", "model"),
    slow_but([("single", VALUES)], [("single", VALUES), ("fsdp", VALUES), ("ddp", LIGHTNING), ("fsdp", LIGHTNING)]),
)
def test_operations_of_what_needs_values_are_counted_in_the_first_step(name: str, model: str, run: Run) -> None:
    strategy, ranks = OF_STRATEGIES[name]
    own = [each for each in strategy if "checkpointing" not in each] + model.split()
    own += ["data.num_samples=60", "data.global_batch_size=7", "trainer.accumulate_grad_batches=2"]
    summary = run(*own, "trainer.peak_flops=1e9", world_size=ranks)
    assert summary["flops_per_step"] == pytest.approx(14 * (2 * 2 * (10 * 10 + 10 * 5) + 2 * 10 * 5))
    assert summary["weights_sha256"] == run(*own, world_size=ranks)["weights_sha256"]


@pytest.mark.parametrize(
    "own", [[VALUES, "model.activation_checkpointing=net1"], [*OF_KIND, "data.collate_fn.kind=nested"]], ids=len
)
def test_operations_that_cannot_be_counted_are_named(own: list[str], run: Run) -> None:
    """The first step computes more than the model's: activations, again. Or torch's counter fails in it."""
    summary = run("trainer.peak_flops=auto", *own)
    assert (summary["status"], summary["flops_per_step"]) == ("finished", None)
    log = (Path(summary["run_directory"]) / "train.log").read_text()
    assert "trainer.peak_flops: the model's operations could not be counted (" in log


def test_operations_of_several_devices_of_a_process_are_not_counted(run: Run) -> None:
    summary = run("trainer.peak_flops=auto", VALUES, "strategy._target_=plan_parts.OverTwo")
    assert (summary["status"], summary["flops_per_step"]) == ("finished", None)
    log = (Path(summary["run_directory"]) / "train.log").read_text()
    assert "trainer.peak_flops: the operations of several devices of a process cannot be counted." in log


def test_without_a_known_peak_operations_are_counted_alone(run: Run) -> None:
    summary = run("trainer.peak_flops=auto", "strategy=single")
    assert summary["flops_per_step"] > 0
    assert (summary["mfu"], "train/mfu" in summary["metrics"]) == (None, False)
