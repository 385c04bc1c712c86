"""Models that bring their loss, from Hugging Face, timm and peft, without code of the user's."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_recipes.checkpointing.reading import load
from ddp_recipes.datasets import fake_images
from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.seeding import seed_everything
from helpers import hugging_face

Run = Callable[..., Summary]


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Import the packages once here, not in each forked rank."""
    pytest.importorskip("datasets", reason="needs the package datasets, of the extra peers")
    transformers = pytest.importorskip("transformers", reason="needs the package transformers, of the extra peers")
    transformers.BertForSequenceClassification  # noqa: B018  # is imported when it is asked for
    transformers.DataCollatorWithPadding  # noqa: B018


def own(group: str, **values: Any) -> list[str]:
    """Return the overrides that put these values in place of a group's."""
    return [f"~{group}", f"+{group}={written(values)}"]


def written(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {written(each)}" for name, each in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


BERT = {
    "_target_": "transformers.BertForSequenceClassification",
    "config": {"_target_": "transformers.BertConfig", **hugging_face.SMALL, "num_labels": 3},
}
TOKENIZER = "{_target_: helpers.hugging_face.tokenizer}"
TEXTS = (
    "~data.train",
    "~data.val",
    "+data.train={_target_: helpers.hugging_face.rows, size: 44}",
    "+data.val={_target_: helpers.hugging_face.rows, size: 21, seed: 1}",
    "data.collate_fn={_target_: transformers.DataCollatorWithPadding, tokenizer: ${tokenizer}}",
    "+tokenizer={_target_: helpers.hugging_face.tokenizer}",
    "data.global_batch_size=8",
    "data.val_batch_size=6",
    "data.shuffle=false",
    "task=model_loss",
    "+task.metrics.accuracy={_target_: ddp_recipes.tasks.Accuracy}",
    "logger=csv",
    "trainer.log_every_n_steps=1",
)


def losses_of(summary: Summary) -> list[float]:
    with next(Path(summary["run_directory"]).rglob("metrics.csv")).open() as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row.get("train/loss")]


def plain_loop() -> tuple[list[float], float, float]:
    """Return the losses of a loop in plain torch, and loss and accuracy on the validation set."""
    from transformers import DataCollatorWithPadding

    seed_everything(42)
    model, collate = hugging_face.model(), DataCollatorWithPadding(hugging_face.tokenizer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader: Any = torch.utils.data.DataLoader(hugging_face.rows(44), batch_size=8, collate_fn=collate)
    losses = []
    for _ in range(2):
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        batch = collate(list(hugging_face.rows(21, seed=1)))
        output = model(**batch)
    right = (output.logits.argmax(1) == batch["labels"]).double().mean()
    return losses, float(output.loss), float(right)


@pytest.mark.slow
def test_a_model_that_brings_its_loss_learns_as_in_a_plain_loop(run: Run) -> None:
    losses, val_loss, accuracy = plain_loop()
    assert len(losses) == 12
    one, two = (run(*TEXTS, *own("model", **BERT), world_size=world_size) for world_size in (1, 2))
    for summary in (one, two):
        assert losses_of(summary) == pytest.approx(losses, rel=1e-6)
        assert summary["metrics"]["val/loss"] == pytest.approx(val_loss, rel=1e-6)
        assert summary["metrics"]["val/accuracy"] == pytest.approx(accuracy, rel=1e-9)
    predicted = run(*TEXTS, *own("model", **BERT), "mode=predict", f"ckpt_path={one['last_checkpoint']}")
    assert torch.load(Path(predicted["run_directory"]) / "predictions.pt").shape == (21, 3)


LLAMA = {
    "_target_": "transformers.LlamaForSequenceClassification",
    "config": {
        "_target_": "transformers.LlamaConfig",
        **{name: value for name, value in hugging_face.SMALL.items() if "dropout" not in name},
        "num_labels": 3,
        "pad_token_id": 0,
        "attn_implementation": "eager",
    },
}


@pytest.mark.slow
def test_a_classifier_of_texts_learns_in_a_pipeline_what_it_does_in_one_process(run: Run) -> None:
    """Its collator makes a mapping that is no dict."""
    one = run(*TEXTS, *own("model", **LLAMA))
    two = run(*TEXTS, *own("model", **LLAMA), "strategy=ddp_pipeline", world_size=2)
    assert losses_of(two) == pytest.approx(losses_of(one), rel=1e-4)
    assert two["metrics"]["val/accuracy"] == pytest.approx(one["metrics"]["val/accuracy"], rel=1e-9)


@pytest.mark.slow
def test_what_the_task_cannot_find_is_refused(run: Run) -> None:
    for key, message in {
        "task.outputs=scores": r"task.outputs=scores is no tensor in the output of Bert.*: loss, logits",
        "task.labels=label": r"task.labels=label is no tensor in a batch: .*labels",
    }.items():
        with pytest.raises(RequestError, match=message):
            run(*TEXTS, *own("model", **BERT), key)
    of_two = own("model", _target_="torch.nn.Bilinear", in1_features=10, in2_features=5, out_features=5)
    with pytest.raises(RequestError, match=r"Bilinear returned a tensor of \[\d+, 5\], for a batch of a tuple"):
        run("task=model_loss", *of_two)


@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # of peft, by transformers
@pytest.mark.slow
def test_partly_frozen_models_keep_what_is_frozen(run: Run) -> None:
    lora = {"_target_": "peft.LoraConfig", "r": 2, "target_modules": "[query, value]", "task_type": "SEQ_CLS"}
    model = own("model", _target_="peft.get_peft_model", model=BERT, peft_config=lora)
    weights = [
        load(Path(run(*TEXTS, *model, world_size=n)["run_directory"]) / "checkpoints" / "last.pt") for n in (1, 2)
    ]
    seed_everything(42)
    before = hugging_face.model().state_dict()
    for one, two in zip(*(each["model"].values() for each in weights), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    whole = weights[0]["model"]
    saved = {name.removeprefix("base_model.model.").replace("base_layer.", ""): whole[name] for name in whole}
    kept = [name for name in before if name in saved and torch.equal(before[name], saved[name])]
    assert len(kept) >= len(before) - 2, "all but the classifier's, which is trained as well"
    assert any("lora_B" in name and weight.any() for name, weight in whole.items())


@pytest.mark.slow
def test_timm_models_learn_by_timms_optimizers(run: Run) -> None:
    import timm.optim

    model = {"model_name": "test_vit", "img_size": 32, "in_chans": 1, "num_classes": 4}
    optimizer = {"opt": "lamb", "lr": 0.01, "weight_decay": 0.1, "layer_decay": 0.5}
    images = ("data=fake_images", "data.image_size=32", "data.in_channels=1", "data.out_features=4")
    overrides = [
        *(*images, "data.num_samples=24", "data.global_batch_size=8", "data.shuffle=false", "task=classification"),
        *own("model", _target_="timm.create_model", **model),
        *own("optimizer", _target_="timm.optim.create_optimizer_v2", _partial_=True, **optimizer),
        *("logger=csv", "trainer.log_every_n_steps=1"),
    ]
    seed_everything(42)
    vit = timm.create_model(**model)
    lamb = timm.optim.create_optimizer_v2(vit, **optimizer)
    assert len(lamb.param_groups) > 4
    inputs, targets = fake_images(24, 32, 1, 4).fetch(torch.arange(24))
    losses = []
    for rows in torch.arange(24).split(8) * 2:
        loss = torch.nn.functional.cross_entropy(vit(inputs[rows]), targets[rows])
        loss.backward()
        lamb.step()
        lamb.zero_grad()
        losses.append(float(loss.detach()))
    for world_size in (1, 2):
        assert losses_of(run(*overrides, world_size=world_size)) == pytest.approx(losses, rel=1e-5)


def hearing(layerdrop: float) -> list[str]:
    data = [f"+data.{split}={{_target_: helpers.hugging_face.Waves, size: 24}}" for split in ("train", "val")]
    model = own("model", _target_="helpers.hugging_face.hearing", layerdrop=layerdrop)
    return [*TEXTS[:2], *data, *model, "task=model_loss", "data.global_batch_size=8", "trainer.max_epochs=2"]


@pytest.mark.slow
def test_layers_that_a_model_drops_are_dropped_with_fsdp_or_it_is_refused(run: Run) -> None:
    fsdp = ["strategy=fsdp", "strategy.shards=4"]
    exact = run(*hearing(0.0), "strategy=ddp_exact", "strategy.shards=4")["weights_sha256"]
    assert run(*hearing(0.0), *fsdp)["weights_sha256"] == exact
    with pytest.raises(Exception, match=r"layers\.\d\..* With strategy=fsdp all have to use the same parameters"):
        run(*hearing(0.5), *fsdp)  # Hugging Face's drop none where FSDP manages their modules
