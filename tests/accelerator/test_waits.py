"""In a step that does not log no rank waits for its device, counted on a simulated accelerator.

But for one exchange about every second: whether some rank was told to stop, which all have to know at one step.
"""

import pytest

from helpers.accelerator import HABITS, Accelerator
from helpers.marks import slow_but
from helpers.waits import COUNTING

STRATEGIES = {
    "single": (["strategy=single"], 1),
    "ddp": (["strategy=ddp"], 2),
    "ddp_exact": (["strategy=ddp_exact"], 2),
    "fsdp": (["strategy=fsdp", "strategy.wrap=[net1,net2]"], 2),
    "fsdp with shards": (["strategy=fsdp", "strategy.wrap=[net1,net2]", "strategy.shards=4"], 2),
    "fsdp in two replicas": (["strategy=fsdp", "strategy.wrap=[net1,net2]", "strategy.replicas=2"], 4),
    "ddp_pipeline": (["strategy=ddp_pipeline"], 2),
    "two pipelines": (["strategy=ddp_pipeline"], 4),
    "split over two devices": (["strategy=single", "model.num_devices=2", "model.split=[net2]"], 1),
    "placed on two devices by itself": (["strategy=single", "model=toy_mp"], 1),
}
WAYS = {
    "plain": [],
    "accumulated and clipped": ["trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.1"],
    "bf16-true, clipped by value": [
        *("trainer.precision=bf16-true", "trainer.gradient_clip_val=0.1", "trainer.gradient_clip_algorithm=value"),
    ],
    "64-true, accumulated and clipped": [
        *("trainer.precision=64-true", "trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.1"),
    ],
}
FIRST, LAST = 3, 9  # steps after and until which it is counted


def counted() -> list[str]:
    """Return the overrides by which each rank counts where it waits."""
    return [
        f"+callbacks.counting={{_target_: counting.Counting, first: {FIRST}, last: {LAST}}}",
        *("data.num_samples=4000", "trainer.log_every_n_steps=1000", f"trainer.max_steps={LAST + 1}"),
        *("checkpoint=none", "trainer.num_sanity_val_steps=0"),
    ]


CASES = [(name, way) for name in STRATEGIES for way in WAYS]
DAILY = [(name, "plain") for name in STRATEGIES] + [("ddp", "accumulated and clipped")]


@pytest.mark.parametrize(("name", "way"), slow_but([], CASES, DAILY))
def test_no_step_waits_for_the_device(name: str, way: str, accelerator: Accelerator) -> None:
    (accelerator.folder / "counting.py").write_text(COUNTING)
    overrides, ranks = STRATEGIES[name]
    ended = accelerator.run(*overrides, *WAYS[way], *counted(), ranks=ranks, habits=HABITS["all"])
    assert ended.status == 0, ended.err
    waits = {path.name: path.read_text() for path in accelerator.folder.glob("waits_*")}
    assert waits == {f"waits_{rank}": "" for rank in range(ranks)}


THERE = """
import torch
from torch.utils.data import TensorDataset

from ddp_recipes.datasets import random_regression


def there(num_samples):
    made = random_regression(num_samples=num_samples)
    return TensorDataset(*(each.to(torch.device("openreg")) for each in (made.inputs, made.targets)))
"""


@pytest.mark.slow
def test_no_step_waits_for_data_that_are_on_the_device(accelerator: Accelerator) -> None:
    (accelerator.folder / "counting.py").write_text(COUNTING + THERE)
    own = ["strategy=single", "~data.train", "+data.train={_target_: counting.there, num_samples: 4000}"]
    ended = accelerator.run(*own, *counted())
    assert ended.status == 0, ended.err
    assert (accelerator.folder / "waits_0").read_text() == ""


STREAM = """
import torch
from torch.utils.data import IterableDataset

from ddp_recipes.datasets import random_regression


class Stream(IterableDataset):
    def __init__(self, num_samples):
        made = random_regression(num_samples=num_samples)
        self.samples = list(zip(made.inputs, made.targets))

    def __iter__(self):
        return iter(self.samples)
"""


def test_no_step_of_one_rank_waits_for_a_stream(accelerator: Accelerator) -> None:
    (accelerator.folder / "counting.py").write_text(COUNTING + STREAM)
    own = ["strategy=single", "~data.train", "+data.train={_target_: counting.Stream, num_samples: 400}"]
    ended = accelerator.run(*own, *counted())
    assert ended.status == 0, ended.err
    assert (accelerator.folder / "waits_0").read_text() == ""


LIT = """
from torch import nn

from ddp_recipes.models import Toy


class Lit(Toy):
    def on_train_batch_start(self, batch, batch_idx):
        self.began = batch_idx

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("ended", outputs["loss"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_step_of_a_lightning_module_waits_whose_hooks_look_at_no_metric(
    ranks: int, accelerator: Accelerator
) -> None:
    (accelerator.folder / "counting.py").write_text(COUNTING)
    (accelerator.folder / "lit.py").write_text(LIT)
    own = ["task=lightning", "model._target_=lit.Lit", f"strategy={'ddp' if ranks > 1 else 'single'}"]
    ended = accelerator.run(*own, *counted(), ranks=ranks, habits=HABITS["all"])
    assert ended.status == 0, ended.err
    waits = {path.name: path.read_text() for path in accelerator.folder.glob("waits_*")}
    assert waits == {f"waits_{rank}": "" for rank in range(ranks)}
