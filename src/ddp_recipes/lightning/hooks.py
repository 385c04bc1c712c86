"""The hooks of Lightning's modules, data modules and callbacks: which there are, and who calls them here."""

import inspect
import os
import sys
from collections.abc import Collection, Sequence
from functools import cache
from types import ModuleType
from typing import Any

from ddp_recipes.errors import RequestError

# Where the base classes are, whose hooks do nothing, or what is done here anyhow.
_BASES = ("lightning.pytorch.core.", "lightning.fabric.", "pytorch_lightning.core.", "lightning_fabric.", "torch.")
_OTHERS = (
    "lightning.",
    "pytorch_lightning.",
    "lightning_fabric.",
    "torch.",
    "ddp_recipes.",
    "builtins.",
    "abc.",
    "typing.",
)

LIGHTNING_MODULE = "LightningModule"

STEPS = {"training_step", "validation_step", "test_step", "predict_step", "forward", "configure_optimizers"}

# Around an optimizer step: what is logged in them counts for the step, as in Lightning.
OF_STEP = {
    "backward",
    "configure_gradient_clipping",
    "on_after_backward",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_batch_start",
    "optimizer_step",
    "optimizer_zero_grad",
    "training_step",
}

CALLED = (
    STEPS
    | OF_STEP
    | {
        "configure_callbacks",
        "configure_model",
        "lr_scheduler_step",
        "on_after_batch_transfer",
        "on_before_batch_transfer",
        "on_exception",
        "on_fit_end",
        "on_fit_start",
        "on_load_checkpoint",
        "on_save_checkpoint",
        "on_train_end",
        "on_train_epoch_end",
        "on_train_epoch_start",
        "on_train_start",
        "on_validation_model_zero_grad",
        "prepare_data",
        "setup",
        "teardown",
        "transfer_batch_to_device",
    }
    | {
        f"on_{stage}_{event}"
        for stage in ("validation", "test", "predict")
        for event in (
            "batch_end",
            "batch_start",
            "end",
            "epoch_end",
            "epoch_start",
            "model_eval",
            "model_train",
            "start",
        )
    }
    | {f"{split}_dataloader" for split in ("train", "val", "test", "predict")}
) - {"on_predict_model_train"}

# What is followed by a hook of Lightning 1.x that Lightning 2 refuses, in the modes in which it does.
REMOVED = {
    "training_epoch_end": ("on_train_epoch_end", ("fit",)),
    "validation_epoch_end": ("on_validation_epoch_end", ("fit", "validate")),
    "test_epoch_end": ("on_test_epoch_end", ("test",)),
}

# What to do instead of a hook that is not called.
REFUSED = {
    "configure_sharded_model": "use configure_model, as Lightning advises",
}

# For each batch of an evaluation.
OF_EVALUATION = {
    f"{prefix}{stage}_{event}"
    for stage in ("validation", "test")
    for prefix, event in (("", "step"), ("on_", "batch_start"), ("on_", "batch_end"))
}

# Hooks that may log, as in Lightning.
LOGGING = (
    OF_STEP
    | OF_EVALUATION
    | {f"on_{stage}_{event}" for stage in ("train", "validation", "test") for event in ("start", "epoch_start")}
    | {f"on_{stage}_epoch_end" for stage in ("train", "validation", "test")}
)


def defined(module: object) -> set[str]:
    """Return the hooks that an object or its class defines itself: not those that it has from Lightning or torch.

    One that ``LightningDataModule.from_datasets`` makes has loaders as attributes. One that is ``None`` is not there.
    """
    found = set()
    for name in CALLED | REFUSED.keys():
        owner = next((each for each in type(module).__mro__ if name in vars(each)), None)
        if name in vars(module):
            given = name in CALLED and callable(vars(module)[name])
        else:
            given = owner is not None and not owner.__module__.startswith(_BASES) and vars(owner)[name] is not None
        if given:
            found.add(name)
    return found


def overridden(module: object, names: Collection[str]) -> set[str]:
    """Return those methods of a ``LightningModule`` that a class derived from it makes its own."""
    classes = type(module).__mro__
    if all(each.__name__ != LIGHTNING_MODULE for each in classes):
        return set()
    owners = {name: next(each for each in classes if name in vars(each)) for name in names}
    return {name for name, owner in owners.items() if not owner.__module__.startswith(_BASES)}


def names_in_source(made: object, name: str) -> bool:
    """Whether a name is in the files of an object's classes, or in loaded ones of the same packages and folders.

    Lightning's own, torch's and ours are left out.
    """
    classes = {each.__module__ for each in type(made).__mro__}
    return any(_is_around(each, name) for each in classes if not f"{each}.".startswith(_OTHERS))


@cache
def _is_around(file: str, name: str) -> bool:
    def place(module: Any) -> tuple[str, str]:
        return module.__name__.partition(".")[0], os.path.dirname(getattr(module, "__file__", None) or "")

    if file not in sys.modules:
        return True  # it may
    package, folder = place(sys.modules[file])
    loaded = [each for each in [*sys.modules.values()] if isinstance(each, ModuleType)]
    around = [each for each in loaded if place(each)[0] == package or (folder and place(each)[1] == folder)]
    return any(_has(each, name) for each in around)


@cache
def _has(file: ModuleType, name: str) -> bool:
    try:
        return name in inspect.getsource(file)
    except (OSError, TypeError):  # an empty file, or no Python
        return False


def refuse_hooks(module: object) -> None:
    """Refuse a module that defines what is not called here.

    Raises:
        RequestError: names each of them, and what to do instead.
    """
    refused = sorted(defined(module) & REFUSED.keys())
    if refused:
        instead = "".join(f" Instead of {name}: {REFUSED[name]}." for name in refused)
        raise RequestError(
            f"{type(module).__name__} defines {', '.join(refused)}, which task=lightning does not call.{instead}"
        )


def refuse_data_hooks(datamodule: object) -> None:
    """Refuse a data module that is none.

    Raises:
        RequestError: it has no loaders.
    """
    if not any(name.endswith("_dataloader") for name in defined(datamodule)):
        raise RequestError(
            f"data.datamodule makes a {type(datamodule).__name__}, which defines none of train_dataloader, "
            f"val_dataloader, test_dataloader and predict_dataloader. Give a LightningDataModule."
        )


def _does(callback: object, name: str) -> bool:
    """Whether a callback has a hook that is not Lightning's empty one."""
    owner = next((each for each in type(callback).__mro__ if name in vars(each)), None)
    return owner is not None and not (owner.__name__ == "Callback" and "lightning" in owner.__module__)


class Hooks:
    """Calls a hook of all that listen: Lightning's callbacks first, then the module, as Lightning does.

    Args:
        callbacks: of Lightning, to which a module may add.

    Attributes:
        current: the hook that is being called: what ``self.log`` takes its defaults from.
    """

    def __init__(self, module: Any, trainer: Any, callbacks: Sequence[Any] = ()) -> None:
        self.module, self.trainer, self.callbacks = module, trainer, callbacks
        self.own = defined(module)
        self.current = ""

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call a hook of callbacks and of the module; return what the module's returns, ``None`` where it has none."""
        outer, self.current = self.current, name
        try:
            for callback in self.callbacks:
                if name != "on_train_epoch_end" or not hasattr(callback, "monitor"):
                    self._of_callback(callback, name, arguments)
            return self.of_module(name, *arguments)
        finally:
            self.current = outer

    def of_followers(self, name: str) -> None:
        """Call the hook of the callbacks that follow a metric, which the module may just have logged."""
        outer, self.current = self.current, name
        try:
            for callback in self.callbacks:
                if hasattr(callback, "monitor"):
                    self._of_callback(callback, name, ())
        finally:
            self.current = outer

    def listens(self, *names: str) -> bool:
        """Whether the module or a callback does something in one of these hooks."""
        return any(name in self.own or any(_does(callback, name) for callback in self.callbacks) for name in names)

    def of_module(self, name: str, *arguments: Any) -> Any:
        """Call a hook of the module alone."""
        if name not in self.own:
            return None
        outer, self.current = self.current, name
        try:
            return getattr(self.module, name)(*arguments)
        finally:
            self.current = outer

    def _of_callback(self, callback: Any, name: str, arguments: tuple[Any, ...]) -> None:
        if (hook := getattr(callback, name, None)) is not None:
            hook(self.trainer, self.module, *arguments)
