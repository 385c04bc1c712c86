"""A small transformer on text: windows, learning, writing."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from ddp_recipes.datasets import Windows, text
from ddp_recipes.datasets.windows import decode
from ddp_recipes.errors import RequestError
from ddp_recipes.models import GPT
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.tasks import LanguageModelingTask
from helpers.marks import slow_but
from helpers.ranks import run_recipe

SMALL = [
    "data=text",
    "data.context=16",
    "data.val_fraction=0.2",
    "data.global_batch_size=12",
    "model=gpt",
    "model.layers=2",
    "model.width=16",
    "model.heads=2",
    "optimizer=adamw",
    "trainer.progress=false",
    "trainer.max_steps=6",
    "launcher.device=cpu",
    "logger=none",
]


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A file with some text."""
    path = tmp_path / "words.txt"
    path.write_text("to be or not to be, that is the question; " * 60)
    return path


@pytest.fixture
def learn(tmp_path: Path, words: Path) -> Callable[..., Summary]:
    """Train on it: ``learn(*overrides, world_size=1)``."""
    count = 0

    def started(*overrides: str, world_size: int = 1) -> Summary:
        nonlocal count
        count += 1
        return run_recipe([*SMALL, f"data.path={words}", *overrides], world_size, tmp_path / f"run_{count}")

    return started


def test_windows_follow_each_other_and_stay_in_their_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("0123456789")
    windows = text(str(tmp_path), context=4, split="train", val_fraction=0)
    assert isinstance(windows, Windows)
    shown = [(decode(inputs), decode(targets)) for inputs, targets in (windows[i] for i in range(len(windows)))]
    assert shown == [("abcd", "bcde"), ("efgh", "fghi"), ("0123", "1234"), ("4567", "5678")]
    inputs, targets = windows.fetch(torch.tensor([3, 0]))
    assert (decode(inputs[0]), decode(inputs[1]), decode(targets[1])) == ("4567", "abcd", "bcde")
    assert inputs.dtype == torch.int64


@pytest.mark.parametrize(("name", "content"), [("none.txt", None), ("short.txt", "abc")])
def test_text_that_gives_no_window_is_refused(name: str, content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(RequestError, match=r"data\.path=.*(has no file|no window of data\.context=8)"):
        text(str(tmp_path / name), context=8, split="train")


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(RequestError, match=r"model\.heads=3 do not divide model\.width=16.* 15 or 18"):
        GPT(heads=3, width=16)


def test_a_token_depends_on_those_before_it_alone() -> None:
    model = GPT(vocab_size=20, context=8, layers=2, heads=2, width=16)
    tokens = torch.arange(16).view(2, 8)
    changed = tokens.clone()
    changed[:, 5] = 19
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
    assert (
        sum(p.numel() for p in model.parameters())
        == sum(p.numel() for p in GPT(20, 8, 2, 2, 16, tied=False).parameters()) - 20 * 16
    )


LEARNERS = [
    (["strategy=ddp"], 2),
    (["strategy=ddp_pipeline", "model.tied=false"], 2),
    (["strategy=single", "model.tied=false", "model.num_devices=2"], 1),
]


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    slow_but([], LEARNERS),
)
def test_every_strategy_learns_the_same(
    overrides: list[str], world_size: int, learn: Callable[..., Summary], weights: Callable[[Summary], Any]
) -> None:
    same = ["trainer.val_check_interval=6", *(each for each in overrides if "tied" in each)]
    alone, other = learn("strategy=single", *same), learn(*overrides, *same[:1], world_size=world_size)
    torch.testing.assert_close(weights(other), weights(alone), rtol=0, atol=2e-5)
    metrics = other["metrics"]
    assert metrics["val/perplexity"] == pytest.approx(math.exp(metrics["val/loss"]))
    assert metrics["val/loss"] == pytest.approx(alone["metrics"]["val/loss"], rel=1e-5)


@pytest.mark.parametrize("temperature", slow_but([], [0, 0.8], [0.8]))
def test_it_goes_on_from_a_prompt(temperature: float, learn: Callable[..., Summary], tmp_path: Path) -> None:
    trained = learn("strategy=single", "optimizer.lr=0.01", "trainer.max_steps=120", "trainer.max_epochs=null")
    predicts = ["mode=predict", f"ckpt_path={trained['run_directory']}", "data.prompt='to be'"]
    predicts.append(f"task.temperature={temperature}")
    written = [learn(*predicts, "task.new_tokens=20", world_size=size) for size in (1, 2)]
    for directory in (Path(each["run_directory"]) for each in written):
        predictions: Tensor = torch.load(directory / "predictions.pt")
        assert predictions.shape == (4, 25)
        assert decode(predictions[0]).startswith("to be")
        assert (directory / "predictions.txt").read_text().count("to be") >= 4
    one, two = (torch.load(Path(each["run_directory"]) / "predictions.pt") for each in written)
    assert torch.equal(one, two)
    assert (len(one.unique(dim=0)) > 1) == (temperature > 0)  # of one prompt, four times


@pytest.mark.parametrize("strategy", slow_but([], ["ddp", "fsdp"], ["fsdp"]))
def test_text_is_shown_after_a_validation_and_training_is_not_changed(
    strategy: str, learn: Callable[..., Summary], weights: Callable[[Summary], Any]
) -> None:
    shows = ["callbacks=sample_text", "callbacks.sample_text.new_tokens=9", "logger=tensorboard"]
    dropout = ["model.dropout=0.1", "trainer.val_check_interval=2", f"strategy={strategy}"]
    quiet, shown = learn(*dropout, world_size=2), learn(*dropout, *shows, world_size=2)
    for name, value in weights(quiet).items():
        assert torch.equal(value, weights(shown)[name])
    events = EventAccumulator(str(Path(shown["run_directory"]) / "tensorboard")).Reload()
    tags = [tag for tag in events.Tags()["tensors"] if tag.startswith("samples/")]
    assert len(tags) == 3
    assert b"The " in events.Tensors(tags[0])[0].tensor_proto.string_val[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data=digits", "model=mlp"], "lets a language model write, and the task is a Task"),
        (["strategy=ddp_pipeline", "model.tied=false"], "no process has all of it"),
    ],
)
def test_text_where_there_is_none_is_refused(
    overrides: list[str], message: str, learn: Callable[..., Summary], tmp_path: Path
) -> None:
    pipelined = any("pipeline" in each for each in overrides)
    given = SMALL if pipelined else ["trainer.progress=false", "logger=none", "launcher.device=cpu"]
    with pytest.raises(RequestError, match=message):
        run_recipe([*given, *overrides, "callbacks=sample_text"], 2 if pipelined else 1, tmp_path / "refused")


def test_generating_looks_no_further_back_than_the_context() -> None:
    task = LanguageModelingTask(GPT(vocab_size=20, context=4, layers=1, heads=2, width=16), temperature=0)
    task.eval()
    tokens = torch.arange(6)[None]
    assert torch.equal(task.generate(tokens, 5)[:, 2:], task.generate(tokens[:, 2:], 5))


@pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), ("fsdp", 2)])
def test_weights_from_takes_a_tied_weight_by_either_name(
    strategy: str, world_size: int, learn: Callable[..., Summary], tmp_path: Path
) -> None:
    state = GPT(context=16, layers=2, width=16, heads=2).state_dict()
    found = set()
    for left_out in ("", "head.weight", "embedding.token.weight"):
        torch.save({name: value for name, value in state.items() if name != left_out}, tmp_path / "file.pt")
        standing = ["optimizer.lr=0", f"weights_from={tmp_path / 'file.pt'}", f"strategy={strategy}"]
        summary = learn("model.context=16", *standing, world_size=world_size)
        assert "weights_from=" not in (Path(summary["run_directory"]) / "train.log").read_text()  # nothing is missing
        found.add(summary["weights_sha256"])
    assert len(found) == 1
