"""What leaves a simulated accelerator: a model in parts is put together on the host, tensor by tensor."""

import json

import pytest

from helpers.accelerator import HABITS, Accelerator

PEAK = """
import json
import os
from pathlib import Path

import torch

from ddp_recipes import Callback


class Peak(Callback):
    def on_save_start(self, step):
        torch.accelerator.reset_peak_memory_stats()
        self.before = torch.accelerator.memory_allocated()

    def on_save(self, step):
        more = torch.accelerator.max_memory_allocated() - self.before
        largest = max(each.nbytes for each in self.run.task.parameters())
        held = sum(each.nbytes for each in self.run.task.parameters() if not each.is_meta)
        own = Path(__file__).with_name(f"peak_{os.environ.get('RANK', 0)}")
        own.write_text(json.dumps({"more": more, "largest": largest, "held": held}))
"""
# Seven linear layers of 256 KiB each, and two small ones.
MODEL = ["model=mlp", "model.hidden_features=[256,256,256,256,256,256,256,256]", "optimizer=adam"]


@pytest.mark.slow
def test_a_pipeline_is_put_together_outside_of_the_device(accelerator: Accelerator) -> None:
    (accelerator.folder / "peak.py").write_text(PEAK)
    own = ["strategy=ddp_pipeline", *MODEL, "+callbacks.peak._target_=peak.Peak", "trainer.max_steps=2"]
    ended = accelerator.run(*own, "checkpoint.every_n_steps=2", ranks=2, habits=HABITS["all"])
    assert ended.status == 0, ended.err
    first = json.loads((accelerator.folder / "peak_0").read_text())
    assert first["held"] > 2 * first["largest"]  # so that what the other rank sends at once would be seen
    assert first["more"] < 3 * first["largest"]  # one at a time, beside the message with all small ones
