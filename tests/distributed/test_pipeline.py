"""Pipelines over processes: what one process learns, in the order of the schedule, with checkpoints for all."""

import json
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_recipes.checkpointing.reading import load
from ddp_recipes.config.request import Request
from ddp_recipes.devices import NONE
from ddp_recipes.errors import RecipeError, RequestError, RunFailed
from ddp_recipes.model_parallel.timeline import bubble, order, timeline
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.testing import make_job
from helpers.marks import quick_each, slow_but
from helpers.recipes import OF_KIND

Run = Callable[..., Summary]
Weights = Callable[[Summary], dict[str, Any]]

for heavy in ("torch.distributed.pipelining", "torch.utils.flop_counter", "matplotlib.backends.backend_agg"):
    with suppress(ModuleNotFoundError):
        import_module(heavy)  # once here, not in each forked rank

PIPELINE = "strategy=ddp_pipeline"
MODELS = {
    "mlp": ["model=mlp"],
    "chain": ["model._target_=own_chains.Chain", "~model.hidden_features"],
    "frozen": ["model._target_=own_chains.Frozen", "~model.hidden_features"],
    "encoder": ["model._target_=own_chains.Encoder", "~model.hidden_features"],
    "recurrent": ["model._target_=own_chains.Recurrent", "~model.hidden_features"],
    "unet": ["model._target_=own_chains.UNet", "~model.hidden_features"],
    "deciding": ["model._target_=own_chains.Deciding", "~model.hidden_features"],
    "checkpointed": ["model._target_=own_chains.Checkpointed", "~model.hidden_features"],
    "images": ["model._target_=own_chains.Images", "~model.hidden_features"],
    "skip": ["model._target_=own_chains.Skip", "~model.hidden_features"],
    "hooked": ["model._target_=own_chains.Hooked", "~model.hidden_features"],
    "rotary": ["model._target_=own_chains.Rotary", "~model.hidden_features"],
}
THREE = ["strategy.stages=3", "strategy.micro_batches=4"]
INTERLEAVED = ["strategy.stages=4", "strategy.schedule=interleaved_1f1b"]


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


# --- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "overrides", "world_size"),
    slow_but(
        [("mlp", [], 2)],
        [
            ("mlp", [], 2),
            ("hooked", [], 2),
            ("recurrent", [], 2),
            ("recurrent", INTERLEAVED, 2),
            ("unet", [], 2),
            ("unet", THREE, 3),
            ("deciding", ["+model.by_inputs=true"], 2),
            ("checkpointed", [], 2),
            ("checkpointed", INTERLEAVED, 2),
            ("checkpointed", ["+model.segments=2"], 2),
            ("mlp", ["strategy.schedule=gpipe", *THREE], 3),
            ("mlp", ["model.split=[layers.2]"], 4),
            ("chain", ["model.split=[3,6]", *THREE], 3),
            ("chain", INTERLEAVED, 2),
            ("frozen", ["model.split=[3,5]", *THREE], 3),
            ("frozen", INTERLEAVED, 2),
            ("encoder", [], 2),
            ("encoder", ["model.split=[encoder.layers.1,encoder.layers.2]", *THREE], 3),
            ("skip", THREE, 3),
            ("rotary", THREE, 3),
            ("rotary", INTERLEAVED, 2),
            ("rotary", ["model.split=[layers.1]"], 4),
        ],
        [
            ("skip", THREE, 3),
            ("rotary", INTERLEAVED, 2),
            ("checkpointed", [], 2),
            ("recurrent", [], 2),
            ("frozen", INTERLEAVED, 2),
            ("deciding", ["+model.by_inputs=true"], 2),
            ("mlp", ["model.split=[layers.2]"], 4),
        ],
    ),
)
def test_stages_learn_what_one_process_learns(
    model: str, overrides: list[str], world_size: int, run: Run, weights: Weights
) -> None:
    """61 samples: the last batch has 13, or with two replicas 7 and 6, which micro-batches do not divide."""
    common = [*MODELS[model], "data.num_samples=61", "data.global_batch_size=16", "trainer.log_every_n_steps=1"]
    of_model = [each for each in overrides if each.startswith("+model.")]
    one = run(*common, *of_model, "strategy=single")
    staged = run(*common, PIPELINE, *overrides, world_size=world_size)
    assert_same(weights(staged), weights(one))
    assert staged["metrics"].keys() == one["metrics"].keys()
    for name in ("train/loss", "train/grad_norm", "val/loss", "val/mae"):
        assert staged["metrics"][name] == pytest.approx(one["metrics"][name], rel=1e-5)
    assert staged["samples_seen"] == one["samples_seen"]


@pytest.mark.nightly
def test_batch_norm_takes_its_statistics_from_micro_batches(run: Run, weights: Weights) -> None:
    common = [
        *MODELS["images"],
        "data.num_samples=16",
        "data.batch_size=8",
        "trainer.max_epochs=1",
        "optimizer.lr=0.01",
    ]
    one = run(*common, "strategy=single", "model.micro_batches=2")
    staged = run(*common, PIPELINE, "strategy.micro_batches=2", "model.split=[net.layer3]", world_size=2)
    assert_same(weights(staged), weights(one))
    assert staged["metrics"]["val/loss"] == pytest.approx(one["metrics"]["val/loss"], rel=1e-5)


LEARNING = {
    "fewer samples than micro-batches": ["data.num_samples=50"],
    "a replica without a sample": ["data.num_samples=33", "strategy.micro_batches=2", "trainer.max_epochs=1"],
    "accumulation": ["data.num_samples=75", "trainer.accumulate_grad_batches=3"],
    "clipped by norm": ["trainer.gradient_clip_val=0.05"],
    "clipped by value": ["trainer.gradient_clip_val=0.01", "trainer.gradient_clip_algorithm=value"],
    "adamw, cosine": ["optimizer=adamw", "optimizer.lr=0.01", "scheduler=cosine"],
    "sample by sample": ["data.train._target_=own_parts.OneByOne"],
}


@pytest.mark.parametrize("name", slow_but(["accumulation"], LEARNING))
def test_whatever_a_step_does_stages_learn_what_one_process_learns(name: str, run: Run, weights: Weights) -> None:
    common = [*MODELS["chain"], "data.global_batch_size=16", *LEARNING[name]]
    world_size = 4 if "replica" in name else 2
    one = run(*[each for each in common if "strategy." not in each], "strategy=single")
    staged = run(PIPELINE, *common, world_size=world_size)
    assert (staged["world_size"], staged["devices_per_replica"]) == (world_size, 2)
    assert_same(weights(staged), weights(one))


@pytest.mark.slow
def test_schedules_and_dropout_agree_bit_for_bit(run: Run) -> None:
    """Masks belong to a stage and a micro-batch, not to a moment."""
    common = [*MODELS["chain"], "+model.dropout=0.5", PIPELINE]
    runs = [run(*common, f"strategy.schedule={name}", world_size=2) for name in ("gpipe", "1f1b")]
    assert runs[0]["weights_sha256"] == runs[1]["weights_sha256"]
    assert run(*common, "seed=7", world_size=2)["weights_sha256"] != runs[0]["weights_sha256"]


@pytest.mark.slow
def test_bfloat16_learns_about_the_same(run: Run) -> None:
    losses = [
        run(*MODELS["chain"], PIPELINE, f"trainer.precision={name}", world_size=2)["metrics"]["val/loss"]
        for name in ("32-true", "bf16-mixed")
    ]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_checkpoints_move_between_strategies(run: Run, weights: Weights, tmp_path: Path) -> None:
    common = [*MODELS["chain"], "data.global_batch_size=16", "optimizer=adamw", "scheduler=cosine"]
    folder = tmp_path / "moved"
    layouts: list[tuple[list[str], int]] = [
        ([PIPELINE], 2),
        (["strategy=single"], 1),
        ([PIPELINE, *INTERLEAVED], 2),
        (["strategy=ddp"], 2),
    ]
    for epochs, (layout, world_size) in enumerate(layouts, start=1):
        limit = [f"trainer.max_epochs={epochs}", "scheduler.T_max=16"]
        last = run(*common, *limit, *layout, "ckpt_path=auto", world_size=world_size, directory=folder)
    whole = run(*common, "strategy=single", "trainer.max_epochs=4", "scheduler.T_max=16")
    assert last["global_step"] == whole["global_step"] == 16
    assert_same(weights(last), weights(whole))
    (ours, its) = (load(Path(each["run_directory"]) / "checkpoints" / "last.pt") for each in (last, whole))
    assert list(ours["optimizer"]["state"]) == list(its["optimizer"]["state"])
    assert ours["optimizer"]["param_groups"] == its["optimizer"]["param_groups"]


@pytest.mark.slow
def test_a_resumed_pipeline_ends_with_the_same_bits(run: Run, tmp_path: Path) -> None:
    common = [*MODELS["chain"], PIPELINE, "+model.dropout=0.3", "optimizer=adamw", "data.batch_size=16"]
    whole = run(*common, "trainer.max_epochs=4", world_size=4)
    folder = tmp_path / "resumed"
    run(*common, "trainer.max_epochs=4", "trainer.max_steps=5", world_size=4, directory=folder)
    resumed = run(*common, "trainer.max_epochs=4", "ckpt_path=auto", world_size=4, directory=folder)
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["metrics"]["val/loss"] == whole["metrics"]["val/loss"]


@pytest.mark.slow
def test_a_pipeline_measures_and_predicts(run: Run, tmp_path: Path) -> None:
    trained = run(*MODELS["chain"], "strategy=single", "data.global_batch_size=16")
    start = [*MODELS["chain"], PIPELINE, f"ckpt_path={trained['last_checkpoint']}"]
    measured = run(*start, "mode=validate", world_size=4)
    assert measured["metrics"]["val/loss"] == pytest.approx(trained["metrics"]["val/loss"], rel=1e-6)
    assert measured["weights_sha256"] == trained["weights_sha256"]
    predictions = []
    for name, strategy, world_size in (("one", "single", 1), ("staged", "ddp_pipeline", 4)):
        run(*start, f"strategy={strategy}", "mode=predict", world_size=world_size, directory=tmp_path / name)
        predictions.append(torch.load(tmp_path / name / "predictions.pt", weights_only=True))
    torch.testing.assert_close(predictions[1], predictions[0], rtol=0, atol=1e-6)


def test_lists_with_a_value_for_each_sample_are_cut_and_predicted(run: Run, weights: Weights) -> None:
    one, staged = run(*OF_KIND, "strategy=single"), run(*OF_KIND, PIPELINE, world_size=2)
    assert_same(weights(staged), weights(one))
    found = []
    for strategy, world_size in (("strategy=single", 1), (PIPELINE, 2)):
        test = ["mode=predict", "data.predict=${data.val}", f"ckpt_path={one['last_checkpoint']}"]
        folder = run(*OF_KIND, strategy, *test, world_size=world_size)["run_directory"]
        found.append(torch.load(Path(folder) / "predictions.pt", weights_only=True))
    assert found[0]["weights"] == found[1]["weights"] == [1.0 + index % 5 for index in range(12)]
    torch.testing.assert_close(found[1]["logits"], found[0]["logits"], rtol=0, atol=1e-6)


def test_a_number_that_follows_from_the_samples_of_a_batch_is_refused(run: Run) -> None:
    with pytest.raises(RequestError, match="A number of a batch is 1 with one sample, 2 with two, and each micro-batc"):
        run(*OF_KIND, PIPELINE, "data.collate_fn.kind=count", world_size=2)


# --- the order of work -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "stages", "processes", "micro_batches"),
    quick_each(4, [("interleaved_1f1b", 4, 2, 4), ("1f1b", 3, 3, 5), ("gpipe", 2, 2, 4), ("1f1b", 2, 2, 4)]),
)
def test_processes_work_in_the_order_of_the_schedule(
    schedule: str, stages: int, processes: int, micro_batches: int, run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    run(
        "model._target_=own_chains.Noted",
        "~model.hidden_features",
        f"+model.folder={folder}",
        f"+model.blocks={stages}",
        PIPELINE,
        f"strategy.schedule={schedule}",
        f"strategy.stages={stages}",
        f"strategy.micro_batches={micro_batches}",
        f"data.batch_size={2 * micro_batches}",
        "trainer.max_steps=1",
        "trainer.num_sanity_val_steps=0",
        world_size=processes,
    )
    planned = order(schedule, stages, processes, micro_batches)
    noted = [[json.loads(line) for line in file.read_text().splitlines()] for file in folder.iterdir()]
    done = sorted(noted, key=lambda works: works[0][1])
    assert done == [[[work.kind, work.stage, work.micro_batch] for work in works] for works in planned]


@pytest.mark.slow
def test_the_schedule_is_drawn(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "drawn"
    run(PIPELINE, "logger=tensorboard", "trainer.max_steps=1", world_size=2, directory=folder)
    png = (folder / "schedule.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    (image,) = events.Images("schedule")
    assert image.encoded_image_string == png
    assert image.width > image.height > 100


def test_a_process_waits_less_the_more_micro_batches_there_are() -> None:
    for processes in (2, 4):
        for micro_batches in (4, 16):
            for schedule in ("gpipe", "1f1b"):
                cells = timeline(order(schedule, processes, processes, micro_batches), processes)
                assert bubble(cells) == pytest.approx((processes - 1) / (micro_batches + processes - 1))
    interleaved = timeline(order("interleaved_1f1b", 4, 2, 4), 4)
    assert bubble(interleaved) < bubble(timeline(order("1f1b", 2, 2, 4), 2))


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stage_without_numbers_ends_the_run_on_all(run: Run, tmp_path: Path) -> None:
    overrides = ["model._target_=own_chains.Exploding", "~model.hidden_features", "+model.after=12", PIPELINE]
    folder = tmp_path / "exploded"
    with pytest.raises(RunFailed, match="the loss is nan"):
        run(*overrides, "trainer.log_every_n_steps=1", world_size=2, directory=folder)


def test_an_error_in_a_stage_shows_the_users_own_line(run: Run) -> None:
    with pytest.raises((RunFailed, RuntimeError), match=r"reduction dim|multiplied"):
        run("model._target_=own_chains.Chain", "~model.hidden_features", "model.in_features=7", PIPELINE, world_size=2)


def test_a_callback_that_takes_all_weights_ends_the_run_by_name(run: Run) -> None:
    with pytest.raises(RunFailed, match=r"a tensor that only another stage has, .* where a callback takes all weights"):
        run(PIPELINE, "+callbacks.own._target_=own_parts.Measures", world_size=2)


@pytest.mark.slow
def test_a_way_through_the_blocks_that_is_drawn_ends_the_run_by_name(run: Run) -> None:
    overrides = [*MODELS["checkpointed"], "+model.shuffled=true", "model.split=[blocks.2]"]
    with pytest.raises((RecipeError, RunFailed), match=r"blocks\.\d.* Use a strategy without stages, as ddp\."):
        run(PIPELINE, *overrides, world_size=2)


REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "too few micro-batches": (
        ["strategy.stages=4", "strategy.micro_batches=2"],
        ["1f1b needs at least as many micro-batches as stages", "strategy.micro_batches=4 or more", "gpipe"],
    ),
    "rounds": (
        [*INTERLEAVED, "strategy.micro_batches=5", "data.batch_size=10"],
        ["strategy.micro_batches=5 is no multiple of 2 rounds", "Use strategy.micro_batches=4"],
    ),
    "a batch that micro-batches do not divide": (
        ["data.batch_size=10"],
        ["data.batch_size=10 cannot be cut into strategy.micro_batches=4", "data.batch_size=12"],
    ),
    "an unknown schedule": (
        ["strategy.schedule=f1b1"],
        ["strategy.schedule=f1b1 is not allowed", "gpipe, 1f1b, interleaved_1f1b", "Did you mean '1f1b'?"],
    ),
    "an unknown key": (["+strategy.micro_batchs=4"], ["strategy.micro_batchs", "Did you mean 'micro_batches'?"]),
    "more names than stages": (
        ["model=mlp", "model.split=[layers.2,layers.4]"],
        ["makes 3 stages and strategy.stages=2", "give 1 name(s), or set strategy.stages=3"],
    ),
    "processes": (
        ["launcher.nproc_per_node=3"],
        ["strategy.stages=2 takes 2 processes for each replica, and 3", "Use 2, 4, 6"],
    ),
    "a model that places itself": (["model=toy_mp"], ["model.num_devices=2 does not go"]),
    "a model over devices": (["model.num_devices=2"], ["model.num_devices=2 does not go with strategy=ddp_pipeline"]),
    "micro-batches of a replica": (["model.micro_batches=2"], ["model.micro_batches=2", "strategy.micro_batches"]),
    "float16": (["trainer.precision=16-mixed"], ["trainer.precision=16-mixed", "bf16-mixed"]),
    "a check": (["check=equivalence"], ["check=equivalence does not go with strategy=ddp_pipeline"]),
    "stages in a process": (["strategy.stages_per_process=2"], ["strategy.schedule=1f1b", "interleaved_1f1b is for"]),
    "no whole number of processes": (
        [*INTERLEAVED, "strategy.stages=5"],
        ["strategy.stages=5 with 2 stages in each process", "a multiple of 2 from 4 on"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_before_anything_starts(case: str) -> None:
    overrides, parts = REFUSED[case]
    job = make_job(["data=random", "data.batch_size=8", "model=toy", PIPELINE, *overrides])
    with pytest.raises(RequestError) as refusal:
        Request.of(job.config).processes(NONE)
    for part in parts:
        assert part in str(refusal.value)


REFUSED_MODELS: dict[str, tuple[list[str], int, list[str]]] = {
    "a name that is not there": (
        ["model=mlp", "model.split=[layers.22]"],
        2,
        ["MLP has no layers.22.", "Did you mean 'layers.2'?"],
    ),
    "more stages than blocks": (
        ["strategy.stages=3"],
        3,
        ["strategy.stages=3, but Toy can be cut into 2 stage(s) at most", "Use strategy.stages=2"],
    ),
    "tied weights": (
        ["model._target_=own_chains.Tied", "~model.hidden_features", "model.split=[second]"],
        2,
        ["first.weight and second.weight are one parameter, in stages 0 and 1", "Let no stage begin between them"],
    ),
    "a skip connection over the cut": (
        ["model._target_=own_chains.UNet", "~model.hidden_features", "model.split=[up]"],
        2,
        ["model.split=[up] cannot be: the forward of the model needs values of a tensor that another stage has"],
    ),
    "what is moved from another stage": (
        ["model._target_=own_chains.Moving", "~model.hidden_features", "model.split=[second]"],
        2,
        ["_to_copy.default in the forward of the model mixes tensors of stage 0 and stage 1"],
    ),
    "a flow that depends on what another stage computes": (
        ["model._target_=own_chains.Deciding", "~model.hidden_features", "model.split=[second]"],
        2,
        ["needs values of a tensor that another stage has (Tensor.item()", "Let no stage begin at second"],
    ),
    "a flow that depends on values where nobody traces it": (
        [*MODELS["rotary"], "+model.asking=true", "model.split=[layers.1]"],
        2,
        ["needs values of a tensor that another stage has (Tensor.item()", "Let no stage begin at layers.1"],
    ),
    "a flow that no cut leaves to one stage": (
        ["model._target_=own_chains.Deciding", "~model.hidden_features"],
        2,
        ["Deciding can be cut into 1 stage(s) at most", "Tensor.item()", "Use a strategy without stages, as ddp."],
    ),
    "a gradient of outputs by inputs within a step": (
        ["task._target_=own_chains.Penalty"],
        2,
        [
            "Toy can be cut into 1 stage(s) at most",
            "The differentiated Tensor",
            "Use a strategy without stages, as ddp.",
        ],
    ),
    "a checkpoint over the cut that leaves out its gradient": (
        [*MODELS["checkpointed"], "+model.reentrant=true", "model.split=[blocks.2]"],
        2,
        ["blocks.2 begins a stage and is called without gradients", "use_reentrant=False it can be"],
    ),
    "a checkpoint that goes on over the cut": (
        [*MODELS["checkpointed"], "+model.segments=2", "model.split=[blocks.1]"],
        2,
        ["blocks.1 would begin a stage in the middle of a torch.utils.checkpoint", "Let no stage begin at blocks.1"],
    ),
    "a hook of a block's gradients": (
        [*MODELS["hooked"], "model.split=['3']"],
        2,
        ["3 has a hook of register_full_backward_hook", "Let no stage begin at 3"],
    ),
    "a hook of a parameter's whole gradient": (
        [*MODELS["hooked"], "+model.late=true"],
        2,
        ["5.weight has a hook of register_post_accumulate_grad_hook", "for each micro-batch", "Take register_hook"],
    ),
    "a model that cannot be copied": (
        [*MODELS["hooked"], "+model.locked=true"],
        2,
        ["Hooked cannot be copied (cannot pickle '_thread.lock' object)", "Let it keep no lock"],
    ),
    "what skips a stage": (
        [*MODELS["skip"], "+model.doubled=true", "model.split=[second,last]", *THREE],
        3,
        ["last is called with a tensor of an earlier stage", "Let no stage begin at second"],
    ),
}


@pytest.mark.parametrize("case", REFUSED_MODELS)
def test_what_cannot_be_cut_is_refused_on_all_ranks(case: str, run: Run, tmp_path: Path) -> None:
    overrides, world_size, parts = REFUSED_MODELS[case]
    folder = tmp_path / "refused"
    with pytest.raises(RequestError) as refusal:
        run(PIPELINE, *overrides, world_size=world_size, directory=folder)
    for part in parts:
        assert part in str(refusal.value)
    assert not folder.exists() or not any(folder.iterdir())
