"""On a type of device without numbers of 64 bits, as Apple's, sums over samples are kept in 32."""

import pytest

from helpers.accelerator import HABITS, Accelerator
from helpers.marks import slow_but

WITHOUT = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_recipes import Callback, devices


class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(found):
            if isinstance(each, torch.Tensor) and each.device.type == "openreg" and each.dtype == torch.float64:
                raise TypeError(f"the device has no float64, and {func} made it")
        return found


class Without(Callback):
    def __init__(self, says):
        if says:
            devices._WITHOUT_FLOAT64 = ("openreg",)

    def on_start(self, directory, task):
        Refusing().__enter__()


class Classes(torch.utils.data.Dataset):
    def __init__(self, num_samples, in_features, out_features, **_):
        self.inputs = torch.randn(num_samples, in_features)
        self.targets = torch.arange(num_samples) % out_features

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]
"""
CLASSES = [f"data.{part}._target_=without.Classes" for part in ("train", "val")]
CASES = {
    "ddp": (["strategy=ddp", "trainer.accumulate_grad_batches=2"], 2),
    "fsdp": (["strategy=fsdp", "strategy.wrap=[net1,net2]"], 2),
    "ddp_pipeline": (["strategy=ddp_pipeline"], 2),
    "targets": (["strategy=ddp", "task=classification", "task.mean_over=targets", *CLASSES], 2),
}


@pytest.mark.parametrize("name", slow_but([], CASES, ["ddp", "fsdp", "targets"]))
def test_all_that_is_summed_has_32_bits(name: str, accelerator: Accelerator) -> None:
    own, ranks = CASES[name]
    (accelerator.folder / "without.py").write_text(WITHOUT)
    common = ["trainer.gradient_clip_val=0.1", "trainer.log_every_n_steps=1", "trainer.num_sanity_val_steps=0", *own]
    summaries = {}
    for says in (True, False):
        callback = f"+callbacks.without={{_target_: without.Without, says: {says}}}"
        ended = accelerator.run(*common, callback, ranks=ranks, habits=HABITS["all"], name=f"says_{says}")
        if not says:  # it is found where it is not said
            assert ended.status == 1
            assert "the device has no float64" in ended.err
            ended = accelerator.run(*common, ranks=ranks, habits=HABITS["all"], name="whole")
        assert ended.status == 0, ended.err
        summaries[says] = ended.summary["metrics"]
    for metric in ("train/loss", "train/grad_norm", "val/loss"):
        assert summaries[True][metric] == pytest.approx(summaries[False][metric], rel=1e-5)
