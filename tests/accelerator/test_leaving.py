"""What leaves a simulated accelerator: checkpoints, of which no device holds more than it has to, and no step waits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_recipes import checkpointing
from ddp_recipes.checkpointing.files import step_files
from ddp_recipes.checkpointing.reading import load
from ddp_recipes.runtime.tensors import digest, put_together
from helpers.accelerator import HABITS, Accelerator
from helpers.marks import slow_but
from helpers.waits import COUNTING

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


SAVING = [
    *("checkpoint.every_n_steps=1", "checkpoint.save_top_k=-1", "checkpoint.async_save=true"),
    *("optimizer=adam", "trainer.max_steps=6"),
]
WRITING = Path(checkpointing.__path__[0])
STRATEGIES = {"ddp": ["strategy=ddp"], "fsdp": ["strategy=fsdp", "strategy.wrap=[net1,net2]"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_checkpoints_written_while_training_goes_on_are_those_of_the_cpu(
    name: str, accelerator: Accelerator, run: Callable[..., Any], tmp_path: Path
) -> None:
    overrides = [*STRATEGIES[name], *SAVING]
    ended = accelerator.run(*overrides, ranks=2, habits=HABITS["all"])
    assert ended.status == 0, ended.err
    run(*overrides, world_size=2, directory=tmp_path / "cpu")
    for step in range(1, 7):
        theirs, ours = (load(step_files(each / "checkpoints")[step]) for each in (tmp_path / "cpu", ended.directory))
        for part in ("model", "optimizer"):
            assert digest(put_together(ours[part])) == digest(put_together(theirs[part]))


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_no_step_waits_for_what_a_checkpoint_copies(name: str, accelerator: Accelerator) -> None:
    (accelerator.folder / "counting.py").write_text(COUNTING)
    own = ["+callbacks.counting={_target_: counting.Counting, first: 1, last: 5}", "trainer.log_every_n_steps=1000"]
    ended = accelerator.run(*STRATEGIES[name], *SAVING, *own, ranks=2, habits=HABITS["all"])
    assert ended.status == 0, ended.err
    places = [line.split()[-1] for path in accelerator.folder.glob("waits_*") for line in path.read_text().splitlines()]
    assert places  # what ranks agree on before they save: a few numbers
    assert not {place.partition(":")[0] for place in places} & {path.name for path in WRITING.iterdir()}


SAVED = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_recipes import Callback


class Arriving(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.bytes = {True: 0, False: 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("copy_", "_to_copy"):
            given = args[1] if func.overloadpacket.__name__ == "copy_" else args[0]
            if given.device.type == "openreg" and result.is_cpu and given.nbytes >= 512:
                self.bytes[result.is_pinned()] += given.nbytes
        return result


class Saved(Callback):
    def on_save_start(self, step):
        self.arriving = Arriving()
        self.arriving.__enter__()

    def on_save(self, step):
        self.arriving.__exit__(None, None, None)
        print("SAVED", self.arriving.bytes)
"""


@pytest.mark.slow
def test_a_file_that_a_step_waits_for_gets_its_tensors_through_page_locked_memory(accelerator: Accelerator) -> None:
    (accelerator.folder / "saved.py").write_text(SAVED)
    own = ["strategy=single", "optimizer=adam", "trainer.max_steps=2", "+callbacks.saved._target_=saved.Saved"]
    ended = accelerator.run(*own, "model=mlp", "model.hidden_features=[64]", "trainer.max_epochs=1")
    assert ended.status == 0, ended.err
    (line,) = {line for line in ended.out.splitlines() if "SAVED" in line}
    assert "False: 0" in line
    assert "True: 0" not in line


PIECES = """
import io

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_recipes.checkpointing.parts import BLOCK, stream
from saved import Arriving

long = torch.arange(3 * BLOCK // 4 + 5)
values = {"a": long, "b": torch.arange(9.0).view(3, 3).t(), "c": torch.ones(())}
files = []
with Arriving() as arriving:
    for device in ("cpu", "openreg"):
        tensors = {name: each.to(device) for name, each in values.items()}
        files.append(io.BytesIO(b"".join(bytes(piece) for piece in stream(tensors))).getvalue())
print(files[0] == files[1], arriving.bytes[False], arriving.bytes[True] > 0)
"""


@pytest.mark.slow
def test_pieces_of_a_sharded_file_leave_through_two_blocks(accelerator: Accelerator) -> None:
    (accelerator.folder / "saved.py").write_text(SAVED)
    (accelerator.folder / "pieces.py").write_text(PIECES)
    ended = accelerator.run(command=["pieces.py"])
    assert ended.out.split() == ["True", "0", "True"], ended.err


MEASURED = """
import os
from pathlib import Path

import torch

from ddp_recipes import models


def measured(kind):
    class Measured(kind):
        def state_dict(self, *args, **kwargs):  # which is asked for once predictions are written, too
            held, most = torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated()
            Path(__file__).with_name(f"memory_{os.environ.get('RANK', 0)}").write_text(f"{most - held} {most}")
            return super().state_dict(*args, **kwargs)

    return Measured


MLP = measured(models.MLP)
"""
PREDICTING = ["data.predict=${data.val}", "data.val_samples=512", "data.val_batch_size=32"]
PREDICTIONS = 512 * 512 * 4  # bytes, 64 KiB of a batch
DEALT = {
    "ddp_pipeline": ["strategy=ddp_pipeline", *MODEL[:2], "model.split=[layers.10]"],
    "fsdp": ["strategy=fsdp", *MODEL[:2]],
}


@pytest.mark.parametrize("name", slow_but([], DEALT, ["ddp_pipeline"]))
def test_predictions_and_exported_weights_are_those_of_the_cpu_and_leave_one_at_a_time(
    name: str, accelerator: Accelerator, run: Callable[..., Any]
) -> None:
    (accelerator.folder / "measured.py").write_text(MEASURED)
    own = [*DEALT[name], "data.out_features=512"]
    most_beside = {"ddp_pipeline": PREDICTIONS // 2, "fsdp": 3 * 256 * 512 * 4}  # where a block is gathered, too
    last = run(*own, "trainer.max_steps=1", "data.val=null", world_size=2)["last_checkpoint"]
    for number, (file, *mode) in enumerate(
        (
            ("predictions.pt", "mode=predict", f"ckpt_path={last}", *PREDICTING),
            ("model.safetensors", "mode=export", f"ckpt_path={last}"),
            ("model.safetensors", "mode=export", f"weights_from={last}"),
        )
    ):
        target = "model._target_=measured.MLP"
        ended = accelerator.run(*own, *mode, target, ranks=2, habits=HABITS["all"], name=f"{number}")
        assert ended.status == 0, ended.err
        cpu = Path(run(*own, *mode, world_size=2)["run_directory"])
        assert (ended.directory / file).read_bytes() == (cpu / file).read_bytes()
        for rank in range(2):
            beside, most = map(int, (accelerator.folder / f"memory_{rank}").read_text().split())
            assert beside < most_beside[name]
            assert most == 0 or (name, *mode)[:2] != ("ddp_pipeline", "mode=export")  # which runs no stage
