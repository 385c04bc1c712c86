"""Data sets of a user's own: what they ask for is done, or refused by name."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy

from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.testing import make_job, run_recipe
from helpers.marks import quick_each, slow_but
from helpers.recipes import QUICK

Run = Callable[..., Summary]

SET = "{_target_: ddp_recipes.datasets.random_regression, in_features: 10, out_features: 5"
CLEAN, NOISY = f"{SET}, num_samples: 21, split: val}}", f"{SET}, num_samples: 13, split: test, seed: 7}}"
SEVERAL = ("~data.val", f"+data.val={{clean: {CLEAN}, noisy: {NOISY}}}")


def val_metrics(summary: Summary) -> dict[str, float]:
    return {name: value for name, value in summary["metrics"].items() if name.startswith("val/")}


@pytest.mark.slow
def test_several_validation_sets_are_measured_by_name(run: Run) -> None:
    one = run(*SEVERAL)
    assert set(val_metrics(one)) == {"val/clean/loss", "val/clean/mae", "val/noisy/loss", "val/noisy/mae"}
    assert one["monitor"] == "val/clean/loss"
    assert one["objective"] == one["metrics"]["val/clean/loss"] != one["metrics"]["val/noisy/loss"]
    log = (Path(one["run_directory"]) / "train.log").read_text()
    assert "checkpoint.monitor=auto is val/clean/loss, of the first of val/clean, val/noisy." in log
    assert json.loads((Path(one["run_directory"]) / "summary.json").read_text())["best_checkpoint"]

    weights = f"ckpt_path={one['last_checkpoint']}"
    for name, node in (("clean", CLEAN), ("noisy", NOISY)):
        alone = run("mode=validate", weights, "~data.val", f"+data.val={node}")["metrics"]
        assert alone == {f"val/{key}": pytest.approx(one["metrics"][f"val/{name}/{key}"]) for key in ("loss", "mae")}
    several = run("mode=validate", weights, *SEVERAL, world_size=2)
    assert several["metrics"] == pytest.approx(val_metrics(one))


@pytest.mark.slow
def test_a_task_is_told_which_set_comes(run: Run, tmp_path: Path) -> None:
    task = ("task._target_=data_parts.Announced", f"+task.folder={tmp_path}")
    run(*task, *SEVERAL, "trainer.max_epochs=1", "trainer.num_sanity_val_steps=0")
    assert (tmp_path / "announced").read_text() == "val 0, val 1, "


def test_wrong_sets_are_refused(run: Run) -> None:
    with pytest.raises(RequestError, match=r"mode=predict writes .* val has several: val/clean, val/noisy"):
        run("mode=predict", *SEVERAL)
    with pytest.raises(RequestError, match=r"checkpoint.monitor=val/loss is not measured.*val/clean/loss"):
        run(*SEVERAL, "checkpoint.monitor=val/loss")
    with pytest.raises(RequestError, match=r"data.train has no _target_, but a, b: one set is trained on"):
        run("~data.train", f"+data.train={{a: {CLEAN}, b: {CLEAN}}}")
    with pytest.raises(RequestError, match=r"data.val.clean has no _target_"):
        run("~data.val", "+data.val={clean: {a: 1}}")
    with pytest.raises(RequestError, match=r"data.val=7 is no data set"):
        run("data.val=7")


PADDED = "{_target_: data_parts.padded, _partial_: true, length: 10}"
RAGGED = (
    "~data.train",
    "~data.val",
    "+data.train={_target_: data_parts.Ragged}",
    "+data.val={_target_: data_parts.Ragged, size: 12}",
    "task=classification",
    "data.global_batch_size=8",
)


@pytest.mark.slow
def test_ragged_samples_drawn_by_weight_are_the_same_at_any_world_size(run: Run, tmp_path: Path) -> None:
    overrides = [*RAGGED, f"data.collate_fn={PADDED}"]
    weighted = [*overrides, "data.weights=rare"]
    one, workers = run(*weighted), run(*weighted, "data.num_workers=1", "data.prefetch_factor=3")
    assert one["weights_sha256"] == workers["weights_sha256"] != run(*overrides)["weights_sha256"]
    spawned = [*QUICK, *weighted, "data.num_workers=1", "data.multiprocessing_context=spawn", "data.timeout=100"]
    assert run_recipe(spawned, 1, tmp_path / "spawned")["weights_sha256"] == one["weights_sha256"]
    two = run(*weighted, world_size=2)
    assert two["metrics"]["val/loss"] == pytest.approx(one["metrics"]["val/loss"], rel=1e-6)
    alone = run(*overrides, "data.weights={_target_: data_parts.as_much_as, _partial_: true, target: 3}")
    assert alone["metrics"]["train/loss"] < 1 < 2 < alone["metrics"]["val/loss"], "it has seen nothing else"


def test_a_data_set_brings_its_own_order_and_length_of_an_epoch(run: Run, tmp_path: Path) -> None:
    own = ("~data.train", f"+data.train={{_target_: data_parts.Halves, folder: {tmp_path}}}", "~data.val")
    for world_size, shuffle in ((1, "true"), (1, "false"), (2, "true")):
        summary = run(*own, f"data.shuffle={shuffle}", "data.global_batch_size=4", world_size=world_size)
        assert (summary["epoch"], summary["global_step"], summary["samples_seen"]) == (2, 4, 12)
        seen = [[*map(int, path.read_text().split())] for path in sorted(tmp_path.glob("pid_*"))]
        if world_size == 1:
            expected = [*range(12)] if shuffle == "true" else [*range(11, -1, -1)]
            assert [each[-12:] for each in seen] == [expected]  # the first one is looked at before
        else:
            assert sorted(each[-6:] for each in seen) == [[0, 1, 4, 6, 7, 10], [2, 3, 5, 8, 9, 11]]
        for path in tmp_path.glob("pid_*"):
            path.unlink()


def test_keys_that_would_do_nothing_are_refused(run: Run) -> None:
    overrides = [*RAGGED, "data.collate_fn=data_parts.padded"]
    for key, message in {
        "data.prefetch_factor=2": r"data.prefetch_factor=2 is for worker processes, but data.num_workers=0",
        "data.persistent_workers=true": r"data.persistent_workers=true is for worker processes",
        "data.multiprocessing_context=spawn": r"data.multiprocessing_context=spawn is for worker processes",
        "data.timeout=3": r"data.timeout=3 is for worker processes",
        "data.weights=[1,2]": r"data.weights=\[1, 2\] gives weights of the shape \[2\].*: one for each of 40 samples",
        "data.weights=weight": r"data.weights=weight, but data.train, a Ragged, has no attribute weight",
        "data.weights=data_parts.weight": r"data.weights._target_=data_parts.weight cannot be found",
        "data.collate_fn=data_parts.Ragged.size": r"cannot be found",
    }.items():
        with pytest.raises(RequestError, match=message):
            run(*overrides, key)
    with pytest.raises(RequestError, match=r"data.weights draws samples at random, data.shuffle=false"):
        run(*overrides, "data.weights=rare", "data.shuffle=false")
    with pytest.raises(RequestError, match=r"data.weights draws samples, trainer.overfit_batches repeats"):
        run(*overrides, "data.weights=rare", "trainer.overfit_batches=1")
    with pytest.raises(RequestError, match=r"data.collate_fn makes .* data.train, a InMemory, gives whole batches"):
        run("data.collate_fn=data_parts.padded")


@pytest.mark.parametrize(
    ("overrides", "advice"),
    {
        "labels": (["data.out_features=4"], "The data have the label 4, for which the model has no output"),
        "features": (
            ["data.collate_fn.length=11"],
            "A linear layer takes 10 features and gets 11. Set",
        ),
        "types": (["+data.collate_fn.dtype=float64"], "Inputs and the model's weights are of different types."),
        "one sample": (
            ["model._target_=own_parts.Norm", "data.global_batch_size=13"],
            "A batch norm got a single sample in training, whose variance is none",
        ),
        "a sample": (["+data.val.broken=7"], "KeyError of sample 7 of data.val, a Ragged of 12: 'no such file'"),
    }.values(),
    ids=str,
)
def test_data_that_do_not_fit_end_with_what_to_change(overrides: list[str], advice: str, run: Run) -> None:
    with pytest.raises((RunFailed, RuntimeError)) as raised:
        run(*RAGGED, f"data.collate_fn={PADDED}", *overrides)
    assert "Traceback" in str(raised.value)
    assert str(raised.value).strip().splitlines()[-1].startswith(advice)


def test_a_dict_for_a_task_of_pairs_is_refused(run: Run) -> None:
    with pytest.raises(RequestError, match=r"A batch is a dict with the keys values, label, and this task takes \(inp"):
        run(*RAGGED, "data.collate_fn={_target_: data_parts.padded, _partial_: true, as_dict: true}")


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("batchsize: 4", "batch_size"),
        ("samplers: {_target_: torch.utils.data.RandomSampler}", "sampler"),
        ("generator: 3", ""),
        ("validation: {_target_: ddp_recipes.datasets.digits}", "val"),
    ],
)
def test_unknown_keys_of_an_own_yaml_are_refused(line: str, near: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "mine.yaml").write_text(f"defaults: [random, _self_]\nvocabulary: 7\n{line}\n")
    key = line.partition(":")[0]
    with pytest.raises(RequestError, match=rf"^data\.{key}: data\.{key} is no key of data, and nothing refers.*{near}"):
        make_job(["data=mine"], config_dir=str(tmp_path))
    (folder / "mine.yaml").write_text(f"defaults: [random, _self_]\nvocabulary: 7\n{line}\nnum_samples: ${{.{key}}}\n")
    make_job(["data=mine"], config_dir=str(tmp_path))


def broken(folder: Path, content: bytes) -> Path:
    """Put a file that is no image among images of two classes."""
    for kind in ("ant", "bee"):
        for number in range(4):
            path = folder / kind / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (number, 0, 0)).save(path)
    path.write_bytes(content or path.read_bytes()[:-30])
    return path


@pytest.mark.parametrize("content", [b"", b"no image"], ids=["cut short", "no image"])
@pytest.mark.parametrize("own", [True, False], ids=["ours", "torchvision's"])
def test_an_image_that_cannot_be_read_is_named_with_its_file(
    own: bool, content: bytes, run: Run, tmp_path: Path
) -> None:
    path = broken(tmp_path / "train", content)
    target = "ddp_recipes.datasets.image_folder" if own else "torchvision.datasets.ImageFolder"
    root = tmp_path if own else tmp_path / "train"
    transform = "" if own else ", transform: {_target_: torchvision.transforms.ToTensor}"
    with pytest.raises((RunFailed, RuntimeError)) as raised:
        run(
            "data.val=null",
            "~data.train",
            f"+data.train={{_target_: {target}, root: {root}{transform}}}",
            "task=classification",
        )
    last = str(raised.value).strip().splitlines()[-1]
    assert f" of sample 7 of data.train, a ImageFolder of 8, the file {path}: " in last


def test_predictions_of_batches_that_are_padded_by_themselves_are_a_list_of_rows(run: Run) -> None:
    identity = ["~model", "+model._target_=torch.nn.Identity", "mode=predict", "data.predict=${data.val}"]
    longest = "data.collate_fn={_target_: data_parts.padded, _partial_: true, length: null}"
    found = []
    for ranks in (1, 2):
        summary = run(*RAGGED, *identity, longest, f"data.val_batch_size={4 // ranks}", world_size=ranks)
        found.append(torch.load(Path(summary["run_directory"]) / "predictions.pt", weights_only=True))
    assert [len(row) for row in found[0]] == [4] * 4 + [7] * 4 + [5] * 4
    lengths = [1 + index % 7 for index in range(12)]
    for one, two, length in zip(*found, lengths, strict=True):
        assert torch.equal(one[:length], two[:length])
        assert not one[length:].any()


@pytest.mark.parametrize("strategy", ["ddp", "ddp_pipeline"])
def test_a_loss_of_one_number_is_a_scalar(strategy: str, run: Run) -> None:
    own = [f"strategy={strategy}", "data.global_batch_size=8", "trainer.max_steps=2"]
    found, expected = (run(*own, *task, world_size=2) for task in (["task._target_=data_parts.Unsqueezed"], []))
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert found["metrics"]["train/loss"] == expected["metrics"]["train/loss"]
    with pytest.raises((RequestError, RunFailed), match=r"Unsqueezed.training_step returns NoneType. Return ddp_re"):
        run(*own, "task._target_=data_parts.Unsqueezed", "+task.nothing=true", world_size=2)


OUTPUTS = [("out", "null"), ("dict", "out"), ("tuple", "0"), ("list", "1"), ("named", "logits")]


@pytest.mark.parametrize(("kind", "output"), slow_but(OUTPUTS[:1], OUTPUTS))
def test_of_several_outputs_one_is_chosen(kind: str, output: str, run: Run) -> None:
    own = ["model._target_=own_parts.Several", f"+model.kind={kind}", f"task.output={output}"]
    expected = run(world_size=2)
    found = run(*own, world_size=2)
    assert found["metrics"]["val/loss"] == expected["metrics"]["val/loss"]
    test = ["mode=predict", "data.predict=${data.val}", f"ckpt_path={found['last_checkpoint']}"]
    folder = Path(run(*own, *test, world_size=2)["run_directory"])
    assert torch.load(folder / "predictions.pt").shape == (21, 5)


@pytest.mark.parametrize(
    "strategy",
    quick_each(
        3,
        [
            ["strategy=fsdp", "strategy.wrap=[net.net1,net.net2]"],
            ["strategy=ddp_exact", "strategy.shards=4"],
            ["strategy=ddp_pipeline", "strategy.micro_batches=2"],
            ["strategy=dp"],
        ],
    ),
    ids=lambda value: value[0],
)
def test_one_of_several_outputs_is_chosen_with_any_strategy(strategy: list[str], run: Run) -> None:
    own = ["model._target_=own_parts.Several", "+model.kind=dict", "task.output=out", "data.global_batch_size=16"]
    found = run(*own, *strategy, world_size=1 if strategy == ["strategy=dp"] else 2)
    expected = run("data.global_batch_size=16")
    assert found["metrics"]["val/loss"] == pytest.approx(expected["metrics"]["val/loss"], rel=1e-5)


def test_what_is_a_tensor_in_evaluations_only_is_taken_as_it_is(run: Run) -> None:
    own = ["model._target_=own_parts.Several", "+model.kind=training", "task.output=logits"]
    assert run(*own)["metrics"]["val/loss"] == run()["metrics"]["val/loss"]


@pytest.mark.parametrize(
    ("kind", "output", "message"),
    [
        (
            "dict",
            "null",
            "task.output=null, but Several returns a dict of aux, out: this task computes the loss from o",
        ),
        ("dict", "logits", "task.output=logits, but Several returns a dict of aux, out"),
        ("tuple", "null", "task.output=null, but Several returns a tuple of 0, 1"),
        ("tuple", "2", "task.output=2, but Several returns a tuple of 0, 1"),
        ("named", "null", "task.output=null, but Several returns a Outputs of logits, aux_logits"),
        ("none", "null", "task.output=null, but Several returns a NoneType: this task"),
        ("out", "[1]", r"task.output=\[1\] is not allowed. Allowed: text, or a whole number, or null"),
    ],
)
def test_outputs_that_nobody_chose_are_refused_before_the_run(
    kind: str, output: str, message: str, run: Run, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=message):
        run(
            "model._target_=own_parts.Several",
            f"+model.kind={kind}",
            f"task.output={output}",
            world_size=2,
            directory=tmp_path / "run",
        )
    assert not [*(tmp_path / "run").glob("*")]


SEGMENTATION = "torchvision.models.segmentation.lraspp_mobilenet_v3_large"
SIZED = ["~model.in_features", "~model.hidden_features", "~model.out_features", "+model.num_classes=2"]
MASKS = [f"+data.{name}={{_target_: data_parts.Masks, size: {size}}}" for name, size in (("train", 4), ("val", 5))]


@pytest.mark.slow
def test_a_model_of_torchvision_gives_each_pixel_a_class(run: Run) -> None:
    own = [f"model._target_={SEGMENTATION}", *SIZED, "+model.weights_backbone=null", "task.output=out"]
    own += ["~data.train", "~data.val", *MASKS, "task=classification", "task.mean_over=targets"]
    found = run(*own, "data.global_batch_size=4", "data.val_batch_size=2", "trainer.max_epochs=1")
    test = ["mode=predict", "data.predict=${data.val}", f"ckpt_path={found['last_checkpoint']}"]
    predictions = torch.load(Path(run(*own, *test)["run_directory"]) / "predictions.pt")
    masks = import_module("data_parts").Masks(5).masks
    assert found["metrics"]["val/loss"] == pytest.approx(cross_entropy(predictions, masks).item(), rel=1e-5)
