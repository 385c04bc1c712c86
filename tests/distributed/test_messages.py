"""What a failed or refused run says at its end: what to change here, in one line."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_recipes.errors import RequestError
from ddp_recipes.failure import add_advice
from ddp_recipes.reporting.run_directory import Summary
from helpers.marks import quick_each
from helpers.ranks import run_recipe

HUNGRY = """
from pathlib import Path

import torch


class Raising(torch.nn.Linear):
    def __init__(self, says, **sizes):
        super().__init__(**sizes)
        self.says = says

    def forward(self, inputs):
        raise RuntimeError(Path(self.says).read_text())


class Net(torch.nn.Linear):
    def __init__(self, when, **sizes):
        super().__init__(**sizes)
        self.when = when
        if when == "made":
            torch.empty(1 << 50)

    def forward(self, inputs):
        if self.when == ("fit" if self.training else "validate"):
            torch.empty(1 << 50)
        return super().forward(inputs)


class Other(torch.nn.Linear):
    passes = 0

    def forward(self, inputs):
        self.passes += 1
        for _ in range(1 + self.passes % 2):
            inputs = super().forward(inputs).relu()
        return inputs


class Cached(torch.nn.Sequential):
    def __init__(self, in_features, out_features):
        super().__init__(Other(in_features, in_features), torch.nn.Linear(in_features, out_features))


class Graph(torch.nn.Linear):
    def __init__(self, in_features, out_features, kept=True):
        super().__init__(in_features, out_features)
        self.register_buffer("edges", torch.eye(in_features).to_sparse(), persistent=kept)

    def forward(self, inputs):
        return super().forward((self.edges @ inputs.T).T)


class Synced(torch.nn.Sequential):
    def __init__(self, in_features, out_features):
        super().__init__(torch.nn.SyncBatchNorm(in_features), torch.nn.Linear(in_features, out_features))
"""
NET = [
    "model._target_=hungry.Net",
    "~model.hidden_features",
]


@pytest.fixture(autouse=True)
def hungry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "hungry.py").write_text(HUNGRY)
    monkeypatch.syspath_prepend(tmp_path / "modules")


@pytest.mark.parametrize(
    ("mode", "when", "advice"),
    [
        ("fit", "fit", "Make data.batch_size (now 8), with trainer.accumulate_grad_batches (now 1) as much larger"),
        ("fit", "validate", "or data.val_batch_size (now 256) if it was in validation"),
        ("fit", "made", "or more devices a replica (model.num_devices)"),
        ("validate", "validate", "Out of memory. Make data.val_batch_size (now 256) smaller"),
    ],
)
def test_out_of_memory_ends_with_what_to_change(
    mode: str, when: str, advice: str, run: Callable[..., object], tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
        run(*NET, f"+model.when={when}", f"mode={mode}", "trainer.num_sanity_val_steps=0", directory=tmp_path / "run")
    last = str(raised.value).strip().splitlines()[-1]
    assert last.startswith("Out of memory. ")
    assert advice in last
    if when == mode:
        assert "Out of memory" in json.loads((tmp_path / "run" / "summary.json").read_text())["error"]


@pytest.mark.parametrize(
    ("overrides", "error", "advice"),
    [
        (
            ["data=digits", "data.out_features=7", "model=linear"],
            r"Target \d is out of bounds",
            "for which the model has no output: labels are 0 to outputs - 1.",
        ),
        (
            ["data=digits", "model=linear", "model.in_features=9"],
            "shapes cannot be",
            "takes 9 features and gets 64. Set the model's to 64 (data.in_features",
        ),
        (
            ["data=fake_images", "model=resnet18", "data.image_size=32", "model.in_channels=1"],
            "channels",
            "takes 1 channels and gets 3. Set the model's to 3 (data.in_channels",
        ),
        (["data=digits", "model=gpt"], "'indices' to have one of", "Choose data that give such (data=text)"),
    ],
)
def test_sizes_that_do_not_fit_end_with_what_to_change(
    overrides: list[str], error: str, advice: str, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=error) as raised:
        run_recipe([*overrides, "data.batch_size=8", "logger=none", "launcher.device=cpu"], directory=tmp_path / "run")
    assert advice in str(raised.value).strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("model", "more", "ranks", "advice"),
    [
        ("Cached", ["model.activation_checkpointing=[0]"], 1, "use_cache=False), or leave model.activation_"),
        ("Synced", [], 2, "Give the model nn.BatchNorm: on the CPU each rank has"),
        ("Graph", [], 1, "have it dense, or register it as a buffer with persistent=False."),
        (
            "Graph",
            ["strategy=ddp_exact", "+model.kept=false"],
            1,
            "of dense tensors. Have its indices and its values as",
        ),
        ("Graph", ["+model.kept=false"], 2, "edges of the model has the layout torch.sparse_coo. Checkpoints, and"),
    ],
)
def test_modules_that_do_not_go_with_a_run_end_with_what_to_change(
    model: str, more: list[str], ranks: int, advice: str, run: Callable[..., object], tmp_path: Path
) -> None:
    own = [f"model._target_=hungry.{model}", "~model.hidden_features", "trainer.num_sanity_val_steps=0"]
    with pytest.raises(Exception, match=re.escape(advice)):  # torch's own
        run(*own, *more, world_size=ranks, directory=tmp_path / "run")


def test_one_process_takes_a_sparse_buffer_that_no_checkpoint_has(run: Callable[..., Summary]) -> None:
    own = ["model._target_=hungry.Graph", "~model.hidden_features", "+model.kept=false"]
    assert run(*own, "strategy=single")["status"] == "finished"


OF_GPUS = [
    ("CUDA error: device-side assert triggered", "CUDA_LAUNCH_BLOCKING=1"),
    ("CUDA error: invalid device ordinal", "CUDA_VISIBLE_DEVICES, from 0 on"),
    ("CUDA error: no kernel image is available for execution on the device", "torch.cuda.get_arch_list()"),
    (
        "unable to allocate shared memory(shm) for file </torch_1_2>: Resource temporarily unavailable (11)",
        "--shm",
    ),
    ("unable to write to file </torch_1_2>: No space left on device (28)", "--shm-size=8g, or --ipc=host"),
    (
        "unhandled cuda error, NCCL version 2.27.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast "
        "error:\nCuda failure 217 'peer access is not supported between these two devices'",
        "NCCL_P2P_DISABLE=1",
    ),
    (
        "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nLast error:\nError "
        "while creating shared memory segment /dev/shm/nccl-NzwJ7O (size 9637888)",
        "--shm-size=8g",
    ),
    (
        "NCCL all_reduce failed: unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "NCCL_SOCKET_IFNAME",
    ),
    (
        "ncclInternalError: Internal check failed.\nLast error:\nBootstrap : no socket interface found",
        "NCCL_DEBUG=INFO",
    ),
    (
        "ncclInvalidUsage: \nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b0",
        "Two ranks",
    ),
    ("ncclRemoteError: A call failed possibly due to a network error", "has ended, or the network"),
    ("ncclUnhandledCudaError: Call to CUDA function failed.", "older than this torch's CUDA"),
]


@pytest.mark.parametrize(
    ("error", "advice"),
    quick_each(
        3,
        OF_GPUS,
    ),
)
def test_an_error_of_a_gpu_ends_with_what_to_change(
    error: str, advice: str, run: Callable[..., object], tmp_path: Path
) -> None:
    says = tmp_path / "says"
    says.write_text(error)
    with pytest.raises(RuntimeError) as raised:
        run(
            *("model._target_=hungry.Raising", "~model.hidden_features", f"+model.says={says}", "checkpoint=none"),
            *("trainer.num_sanity_val_steps=0",),
            directory=tmp_path / "run",
        )
    assert error in str(raised.value)
    assert advice in str(raised.value).strip().splitlines()[-1]


MISTAKEN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddp_recipes import Callback, StepOutput, Task

ROWS = TensorDataset(torch.ones(16, 10), torch.ones(16, 5))


class Alone(Task):
    def training_step(self, batch):
        return self.loss(self.model(batch[0]), batch[1])


class Nothing(Task):
    def training_step(self, batch):
        self.loss(self.model(batch[0]), batch[1])


class Named(Task):
    def validation_step(self, batch):
        return {"loss": super().validation_step(batch).loss}


class Number(Task):
    def training_step(self, batch):
        return StepOutput(self.loss(self.model(batch[0]), batch[1]).item(), {}, len(batch[0]))


class Detached(Task):
    def training_step(self, batch):
        with torch.no_grad():
            return super().training_step(batch)


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(10, 5)]

    def forward(self, inputs):
        return self.layers[0](inputs)


class Short(Callback):
    def on_step(self):
        pass


class Steps:
    def __init__(self, optimizer):
        pass

    def step(self, epoch, metric=None):
        pass


class Misnamed(Callback):
    def on_train_epoch_end(self):
        raise AssertionError


def texts(**_):
    return [(torch.ones(10), "cat") for _ in range(16)]


def loader(**_):
    return DataLoader(ROWS, batch_size=4)
"""


@pytest.mark.parametrize(
    ("overrides", "advice"),
    {
        "a loss alone": (["task._target_=mistaken.Alone"], "Alone.training_step returns Tensor. Return ddp_recipes.St"),
        "no loss": (["task._target_=mistaken.Nothing"], "Nothing.training_step returns NoneType. Return ddp_recipes."),
        "a dict": (["task._target_=mistaken.Named"], "Named.validation_step returns dict. Return ddp_recipes.StepOut"),
        "a number": (["task._target_=mistaken.Number"], "Number.training_step returns the loss as a float. Return"),
        "no gradient": (["task._target_=mistaken.Detached"], "No parameter that is trained led to the loss: "),
        "no mean": (["+task.loss.reduction=none", "data.val=null"], "A loss is a single number, the mean over its ba"),
        "a list": (["~model", "+model._target_=mistaken.Hidden"], "Hidden has no parameters, so there is nothing to"),
        "texts": (["data.train={_target_: mistaken.texts}", "data.val=null"], "The targets of a batch are a list, and"),
        "an event": (
            ["+callbacks.own._target_=mistaken.Short"],
            "callbacks.own: Short.on_step takes (), and is given (",
        ),
        "another's scheduler": (
            ["~scheduler", "+scheduler._target_=mistaken.Steps"],
            "has no step() without arg",
        ),
        "a loader": (["data.train={_target_: mistaken.loader}"], "data.train is a DataLoader, whose batches are made"),
    }.values(),
    ids=str,
)
def test_mistakes_in_ones_first_code_end_with_what_to_change(
    overrides: list[str], advice: str, run: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mistaken.py").write_text(MISTAKEN)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Exception, match=re.escape(advice)):
        run(*overrides, directory=tmp_path / "run")


@pytest.mark.parametrize(
    ("call", "advised"), [("linear(): argument 'input'", True), ("sub_(): argument 'other'", False)]
)
def test_what_is_no_tensor_is_blamed_on_the_data_where_a_model_takes_its_inputs(call: str, advised: bool) -> None:
    error = TypeError(f"{call} (position 1) must be Tensor, not NoneType")
    add_advice(error, {"data": {}, "trainer": {}})
    assert any("came from the data set" in note for note in getattr(error, "__notes__", ())) == advised


def test_a_recipe_of_a_test_leaves_keys_out_as_a_command_line_does(run: Callable[..., Summary]) -> None:
    """Also of those that are null, which Hydra takes for absent."""
    assert run("~optimizer.fused", "trainer.max_steps=1")["status"] == "finished"


def test_methods_that_are_called_like_events_are_named(
    run: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mistaken.py").write_text(MISTAKEN)
    monkeypatch.syspath_prepend(tmp_path)
    run("+callbacks.own._target_=mistaken.Misnamed", "trainer.max_steps=1", directory=tmp_path / "run")
    said = (tmp_path / "run" / "train.log").read_text()
    assert "callbacks.own: Misnamed.on_train_epoch_end is no event, so nothing calls it. Events: on_start, " in said
    assert "Did you mean 'on_epoch_end'?" in said


def test_weights_that_cannot_be_downloaded_are_not_said_to_be_wrong_values(
    run: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody is there
    own = ["~model", "+model._target_=torchvision.models.resnet18", "+model.weights=IMAGENET1K_V1"]
    with pytest.raises(RequestError, match=r"^model cannot be made by torchvision.* cannot be reached: <urlopen error"):
        run("data=fake_images", *own, directory=tmp_path / "run")


def test_an_environment_variable_that_is_not_set_is_named(run: Callable[..., object]) -> None:
    with pytest.raises(RequestError, match=r"^optimizer(.lr)?: .*Environment variable 'NOT_SET_ANYWHERE' not found"):
        run("optimizer.lr=${oc.env:NOT_SET_ANYWHERE}")


@pytest.mark.slow
def test_class_weights_are_a_list_in_a_yaml(run: Callable[..., Summary]) -> None:
    images = ["data=fake_images", "data.image_size=8", "model=mlp", "trainer.max_epochs=1", "data.out_features=3"]
    equal, others = (run(*images, f"+task.loss.weight=[{weights}]") for weights in ("1,1,1", "1,2,5"))
    assert equal["metrics"]["val/loss"] == pytest.approx(run(*images)["metrics"]["val/loss"])
    assert others["metrics"]["val/loss"] != pytest.approx(equal["metrics"]["val/loss"])
