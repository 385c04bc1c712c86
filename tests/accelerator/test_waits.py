"""In a step that does not log no rank waits for its device, counted on a simulated accelerator.

But for one exchange about every second: whether some rank was told to stop, which all have to know at one step.
"""

import pytest

from helpers.accelerator import HABITS, Accelerator

COUNTING = """
import os
import traceback
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddp_recipes import Callback

READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "_assert_async")


def on_device(values):
    return any(isinstance(each, torch.Tensor) and each.device.type == "openreg" for each in tree_leaves(values))


class Waits(TorchDispatchMode):
    def __init__(self):
        self.places = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if on_device(args) and (name in READS or (isinstance(result, torch.Tensor) and result.is_cpu)):
            frames = [frame for frame in traceback.extract_stack() if "_dispatch" not in frame.filename]
            if not any(frame.filename.endswith("openreg_device.py") for frame in frames):  # the group's own copies
                if any(frame.name == "reason" and frame.filename.endswith("stopping.py") for frame in frames):
                    return result
                own = [frame for frame in frames if "ddp_recipes" in frame.filename] or frames
                self.places[f"{name} at {own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}"] += 1
        return result


class Counting(Callback):
    def __init__(self, first, last):
        self.first, self.last, self.waits = first, last, Waits()

    def on_step(self, step):
        if step == self.first:
            self.waits.__enter__()
        if step == self.last:
            self.waits.__exit__(None, None, None)
            own = Path(__file__).with_name(f"waits_{os.environ.get('RANK', 0)}")  # two prints at once mix
            with own.open("w") as file:
                for place, count in self.waits.places.items():
                    print(count, place, file=file)
"""
STRATEGIES = {
    "single": (["strategy=single"], 1),
    "ddp": (["strategy=ddp"], 2),
    "ddp_exact": (["strategy=ddp_exact"], 2),
    "fsdp": (["strategy=fsdp", "strategy.wrap=[net1,net2]"], 2),
    "fsdp with shards": (["strategy=fsdp", "strategy.wrap=[net1,net2]", "strategy.shards=4"], 2),
    "ddp_pipeline": (["strategy=ddp_pipeline"], 2),
}
WAYS = {
    "plain": [],
    "accumulated and clipped": ["trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.1"],
}
FIRST, LAST = 3, 9  # steps after and until which it is counted


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_no_step_waits_for_the_device(name: str, way: str, accelerator: Accelerator) -> None:
    (accelerator.folder / "counting.py").write_text(COUNTING)
    overrides, ranks = STRATEGIES[name]
    own = [
        f"+callbacks.counting={{_target_: counting.Counting, first: {FIRST}, last: {LAST}}}",
        *("data.num_samples=4000", "trainer.log_every_n_steps=1000", f"trainer.max_steps={LAST + 1}"),
        *("checkpoint=none", "trainer.num_sanity_val_steps=0"),
    ]
    ended = accelerator.run(*overrides, *WAYS[way], *own, ranks=ranks, habits=HABITS["all"])
    assert ended.status == 0, ended.err
    waits = {path.name: path.read_text() for path in accelerator.folder.glob("waits_*")}
    assert waits == {f"waits_{rank}": "" for rank in range(ranks)}
