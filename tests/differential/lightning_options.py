"""More idioms, of what surrounds a module: its trainer, data, callbacks and checkpoints; and how all are trained."""

import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import lightning_steps
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning_idioms import (
    IDIOMS,
    IN_BETWEEN,
    NOT_MANUAL,
    SEVERAL_TIMES,
    WRONG,
    Base,
    Batch,
    Plan,
    Points,
    Points_,
    idiom,
    listed,
    make,
    plan_of,
)
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset

__all__ = ["IDIOMS", "IN_BETWEEN", "NOT_MANUAL", "SEVERAL_TIMES", "WRONG", "lightning_steps", "make", "plan_of"]

# --- trainers --------------------------------------------------------------------------------------------------------


def _trainer(name: str, alone: str = "", ours: tuple[str, ...] = (), **options: Any) -> None:
    def change(plan: Plan) -> None:
        plan.trainer.update(options)
        plan.alone = plan.alone or alone
        plan.ours += ours

    listed("trainer", name, change)


ROUNDED = "sums of a rank are rounded"
_trainer("clipped_by_value", gradient_clip_val=0.03, gradient_clip_algorithm="value")
_trainer("clipped_by_nothing", gradient_clip_val=0.0)
_trainer("third_epochs", check_val_every_n_epoch=3)
_trainer("thirds_of_epochs", val_check_interval=0.34)
_trainer("quarters_of_epochs", val_check_interval=0.25)
_trainer("by_batches", val_check_interval=1)
_trainer("by_three_batches", val_check_interval=3)
_trainer("across_epochs", val_check_interval=4, check_val_every_n_epoch=None)
_trainer("second_half_epochs", val_check_interval=0.5, check_val_every_n_epoch=2)
_trainer("half_train", limit_train_batches=0.5)
_trainer("one_train", limit_train_batches=1)
_trainer("no_train", limit_train_batches=0)
_trainer("half_val", limit_val_batches=0.5)
_trainer("no_val", limit_val_batches=0)
_trainer("one_sanity", num_sanity_val_steps=1)
_trainer("one_step", max_steps=1)
_trainer("seven_steps", max_steps=7)
_trainer("no_steps", max_steps=0)
_trainer("steps_alone", max_steps=5, max_epochs=-1)
_trainer("no_epoch", max_epochs=0)
_trainer("two_epochs", max_epochs=2)
_trainer("five_epochs", max_epochs=5)
_trainer("overfit_two", overfit_batches=2)
_trainer("overfit_half", overfit_batches=0.5)
_trainer("fast", fast_dev_run=True)
_trainer("fast_by_two", fast_dev_run=2)
_trainer("every_third_logged", log_every_n_steps=3)
_trainer("seldom_logged", log_every_n_steps=50)
_trainer("accumulation_of_four", accumulate_grad_batches=4)
_trainer("in_bfloat16", ROUNDED, precision="bf16-mixed")
_trainer("all_in_bfloat16", ROUNDED, precision="bf16-true")
_trainer("in_float64", precision="64-true")
_trainer("anomalies", detect_anomaly=True)
_trainer("least_epochs", min_epochs=2)
_trainer("least_steps", min_steps=4)
_trainer("reloads", reload_dataloaders_every_n_epochs=1)


@idiom("trainer")
def accumulation_grows(plan: Plan) -> None:
    plan.theirs.append(lambda: GradientAccumulationScheduler({0: 1, 1: 2}))
    plan.ours += ("callbacks=gradient_accumulation", "callbacks.gradient_accumulation.schedule={1:2}")


# --- checkpoints: what is kept, and how good it is -------------------------------------------------------------------


def _checkpoint(name: str, ours: tuple[str, ...] = (), **options: Any) -> None:
    def change(plan: Plan) -> None:
        plan.theirs.append(lambda: ModelCheckpoint(**options))
        plan.checkpoint = (
            "checkpoint=default",
            *(f"checkpoint.{key}={value}" for key, value in options.items()),
        )

        def look(self: Base) -> None:
            found = self.trainer.checkpoint_callback
            self.seen["metrics"].append(["best", {"best": float(found.best_model_score or "nan")}])

        plan.on("on_fit_end", look)

    listed("checkpoint", name, change)


_checkpoint("best_of_validation", monitor="val_loss")
_checkpoint("best_three", monitor="val_loss", save_top_k=3)
_checkpoint("greatest_of_validation", monitor="val_loss", mode="max")
_checkpoint("best_of_training", monitor="train_loss", every_n_epochs=1)

# --- data ------------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    inputs: Tensor
    targets: Tensor


def _collated(into: Callable[[Tensor, Tensor], Any]) -> Any:
    def collate(samples: list[Batch]) -> Any:
        return into(torch.stack([each for each, _ in samples]), torch.stack([each for _, each in samples]))

    return collate


class Stream(IterableDataset[Batch]):
    """Points one after the other."""

    def __init__(self, count: int, seed: int) -> None:
        self.points = Points(count, seed)

    def __iter__(self) -> Iterator[Batch]:
        return islice((self.points[at] for at in range(len(self.points))), None)


def _combined(loaders: Any, mode: Any) -> CombinedLoader:
    with warnings.catch_warnings(
        action="ignore", category=FutureWarning
    ):  # of torch's trees, of which it asks old ways
        return CombinedLoader(loaders, mode)


def _data(name: str, **changed: Any) -> None:
    def change(plan: Plan) -> None:
        for key, value in changed.items():
            setattr(plan, key, value)

    listed("data", name, change)


BY_EIGHT: dict[str, Any] = {"batch_size": 8}
_data("rest_of_one", train=(25, BY_EIGHT))
_data("rest_of_three", train=(19, BY_EIGHT), val=[(11, BY_EIGHT)])
_data("one_training_sample", train=(1, BY_EIGHT))
_data("less_than_a_batch", train=(5, BY_EIGHT), val=[(3, BY_EIGHT)])
_data("named", train=(24, {**BY_EIGHT, "collate_fn": _collated(Pair)}), val=[(16, {**BY_EIGHT, "collate_fn": Pair})])
_data("named", train=(24, {**BY_EIGHT, "collate_fn": _collated(Pair)}))
_data("dicts", train=(24, {**BY_EIGHT, "collate_fn": _collated(lambda one, other: {0: one, 1: other})}))
_data("lists", train=(24, {**BY_EIGHT, "collate_fn": _collated(lambda one, other: [one, other])}))
_data("seven_batches", train=(56, BY_EIGHT))
_data("worker", train=(24, {**BY_EIGHT, "num_workers": 1}))
_data("stays", train=(24, {**BY_EIGHT, "num_workers": 1, "persistent_workers": True}))
_data("streamed", train_set=Stream)
_data("streamed_rest", train_set=Stream, train=(21, BY_EIGHT))
_data("val_streamed", val_set=Stream)
_data("three_sets", val=[(16, BY_EIGHT), (4, BY_EIGHT), (9, {"batch_size": 4})])
_data("sets_by_name", val=[(16, BY_EIGHT), (12, BY_EIGHT)], val_as=lambda every: dict(zip("ab", every, strict=True)))
_data("sets_in_a_tuple", val=[(16, BY_EIGHT), (9, BY_EIGHT)], val_as=tuple)
_data("one_set_in_a_list", val=[(16, BY_EIGHT), (9, BY_EIGHT)], val_as=lambda every: every[:1])
_data("combined_sets", val=[(16, BY_EIGHT), (12, BY_EIGHT)], val_as=lambda every: _combined(every, "sequential"))
_data("subset", train_set=lambda count, seed: Subset(Points(2 * count, seed), range(count)))
_data("in_order", train_as=lambda made: DataLoader(made.dataset, 8, sampler=SequentialSampler(made.dataset)))
_data(
    "batches_in_order",
    train_as=lambda made: DataLoader(
        made.dataset, batch_sampler=BatchSampler(SequentialSampler(made.dataset), 8, drop_last=False)
    ),
)
_data("val_by_four", val=[(16, {"batch_size": 4})])
_data("val_of_five", val=[(13, {"batch_size": 5})], alone="ranks have batches of two samples")


def _joined(batch: Any) -> Any:
    """Return one batch of those that come together."""
    if isinstance(batch, Tensor) or (isinstance(batch, (tuple, list)) and isinstance(batch[0], Tensor)):
        return batch
    every = [*(batch.values() if isinstance(batch, dict) else batch)]
    return tuple(torch.cat(column) for column in zip(*map(_joined, every), strict=True))


def _together(name: str, train_as: Callable[[Any], Any]) -> None:
    def change(plan: Plan) -> None:
        plan.train_as = train_as
        plan.on("on_after_batch_transfer", lambda self, batch, dataloader_idx: _joined(batch))

    listed("data", name, change)


def _other(loader: Any, count: int, share: int = 1) -> Any:
    return DataLoader(Points(count, 7), loader.batch_size // share)


_together("two_to_train", lambda loader: {"one": loader, "other": _other(loader, 24)})
_together("longer_and_shorter", lambda loader: [loader, _other(loader, 8, 2), _other(loader, 40)])
_together("one_in_a_list", lambda loader: [loader])
_together("ends_with_the_shortest", lambda loader: _combined([loader, _other(loader, 8, 4)], "min_size"))
_together("goes_on_without_others", lambda loader: _combined([loader, _other(loader, 24)], "max_size"))
_together(
    "repeats_the_shortest", lambda loader: _combined({"one": loader, "other": _other(loader, 8)}, "max_size_cycle")
)
_together("nested", lambda loader: {"one": (loader,), "others": [_other(loader, 16), _other(loader, 6, 4)]})


class Data(L.LightningDataModule):
    """Loaders of a plan, with hooks of all kinds; counts how often it was set up."""

    def __init__(self, idioms: str) -> None:
        super().__init__()
        self.plan, self.set_up, self.taken = plan_of(idioms), 0, 0

    def prepare_data(self) -> None:
        assert self.trainer is not None

    def setup(self, stage: str) -> None:
        assert stage == "fit"
        self.set_up += 1

    def train_dataloader(self) -> Any:
        return self.plan.train_loader()

    def val_dataloader(self) -> Any:
        return self.plan.val_loaders() or None

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch = _joined(batch)
        if self.trainer.training:
            self.taken += 1
            return (batch[0] * (1 + 0.1 * self.taken), batch[1])
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


@idiom("module")
def data_module(plan: Plan) -> None:
    plan.data_module = True


@idiom("module")
def data_are_moved_by_hand(plan: Plan) -> None:
    def move(self: Base, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch if isinstance(batch, Tensor) else (batch[0].to(device) - 0.2, batch[1].to(device))

    def change(self: Base, batch: Any, dataloader_idx: int) -> Any:  # the example of a summary is a tensor alone
        return batch if isinstance(batch, Tensor) else (batch[0] + 0.1 * dataloader_idx, batch[1])

    plan.on("on_before_batch_transfer", change)
    plan.on("transfer_batch_to_device", move)


# --- what modules do -------------------------------------------------------------------------------------------------


@idiom("module")
def averaged_weights(plan: Plan) -> None:
    """Keep a moving average of the weights, and validate with it."""

    def begin(self: Base) -> None:
        self.register_buffer("average", nn.utils.parameters_to_vector(self.net.parameters()).detach().clone())

    def swap(self: Base) -> None:
        now = nn.utils.parameters_to_vector(self.net.parameters()).detach().clone()
        nn.utils.vector_to_parameters(self.average.clone(), self.net.parameters())
        self.average.copy_(now)

    def follow(self: Base, *_: Any) -> None:
        with torch.no_grad():
            self.average.lerp_(nn.utils.parameters_to_vector(self.net.parameters()).to(self.average.dtype), 0.3)

    plan.on("__init__", begin)
    plan.on("on_train_batch_end", follow)
    plan.on("on_validation_start", swap)
    plan.on("on_validation_end", swap)


@idiom("module")
def counts_in_checkpoints(plan: Plan) -> None:
    """Count batches in something that only its own hooks save, and have the loss depend on it."""
    plan.on("__init__", lambda self: setattr(self, "count", 0))
    plan.on("on_save_checkpoint", lambda self, checkpoint: checkpoint.update(count=self.count))
    plan.on("on_load_checkpoint", lambda self, checkpoint: setattr(self, "count", checkpoint["count"]))

    def weigh(self: Base, loss: Any, batch: Batch, batch_idx: int) -> Any:
        self.count += 1
        return loss * (1 + 0.1 * self.count) if isinstance(loss, Tensor) and loss.requires_grad else None

    plan.step.append(weigh)


@idiom("module")
def reads_the_trainer(plan: Plan) -> None:
    def read(self: Base, *_: Any) -> None:
        trainer = self.trainer
        optimizer = trainer.optimizers[0]
        stage = trainer.state.stage
        self.seen["steps"].append(
            [
                "read",
                trainer.global_step,
                trainer.current_epoch,
                trainer.is_last_batch,
                [trainer.training, trainer.validating, trainer.sanity_checking, trainer.evaluating],
                getattr(stage, "value", stage),
                trainer.num_training_batches,
                trainer.fit_loop.total_batch_idx,
                trainer.fit_loop.epoch_loop.batch_idx,
                float(trainer.estimated_stepping_batches),
                [round(float(group["lr"]), 7) for group in optimizer.param_groups],
                trainer.max_epochs,
                trainer.max_steps,
                trainer.should_stop,
            ]
        )

    for hook in ("on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end"):
        plan.on(hook, read)


@idiom("module")
def stops_before_training(plan: Plan) -> None:
    plan.on("on_fit_start", lambda self: setattr(self.trainer, "should_stop", True))


@idiom("module")
def has_hooks_of_callbacks(plan: Plan) -> None:
    """Have methods of which Lightning calls those of callbacks alone."""
    plan.on("on_sanity_check_start", lambda self: None)
    plan.on("on_sanity_check_end", lambda self: setattr(self.trainer, "should_stop", True))


@idiom("module")
def set_up_late(plan: Plan) -> None:
    """Make a layer in ``configure_model``."""

    def configure(self: Base) -> None:
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.ones(2))

    plan.on("configure_model", configure)
    plan.on("setup", lambda self, stage: self.seen["calls"].append(stage == "fit"))
    plan.on("teardown", lambda self, stage: None)
    plan.step.append(
        lambda self, loss, batch, _: (
            loss + (self.late - 0.5).square().sum() if isinstance(loss, Tensor) and loss.requires_grad else None
        )
    )


# --- callbacks -------------------------------------------------------------------------------------------------------


class Unfreezes(BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(next(iter(pl_module.net.children()), pl_module.net))

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            first = next(iter(pl_module.net.children()), pl_module.net)
            self.unfreeze_and_add_param_group(first, optimizer, lr=0.01)


class Weighs(Callback):
    """Scales gradients by how many batches it has seen, which it keeps in a state of its own."""

    def __init__(self) -> None:
        self.count = 0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 + 0.1 * self.count)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def _traced(name: str) -> Any:
    def hook(self: Any, trainer: Any, pl_module: Any, *arguments: Any, **options: Any) -> None:
        numbers = [each for each in arguments if isinstance(each, int)]
        pl_module.seen["calls"].append(f"callback.{name} {trainer.global_step} {trainer.current_epoch} {numbers}")

    return hook


_EVENTS = (
    *(f"on_{stage}_{event}" for stage in ("train", "validation") for event in ("batch_start", "batch_end", "start")),
    *(f"on_{stage}_{event}" for stage in ("train", "validation") for event in ("epoch_start", "epoch_end", "end")),
    *("on_fit_start", "on_sanity_check_start", "on_sanity_check_end", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_before_zero_grad"),
)
Traces = type("Traces", (Callback,), {name: _traced(name) for name in _EVENTS})


class StopsByMetric(Callback):
    """Stops as the training loss is small."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.callback_metrics["train_loss"] < 0.3:
            trainer.should_stop = True


def _lambda() -> Callback:
    return LambdaCallback(
        on_train_batch_start=lambda trainer, module, batch, batch_idx: module.seen["calls"].append(f"{batch_idx}"),
        on_validation_end=lambda trainer, module: module.seen["calls"].append("lambda"),
    )


def _callback(name: str, *make_callbacks: Callable[[], Callback], alone: str = "") -> None:
    def change(plan: Plan) -> None:
        plan.callbacks += make_callbacks
        plan.alone = plan.alone or alone

    listed("callback", name, change)


_callback("unfreezes", Unfreezes)
_callback("weighs", Weighs)
_callback("traces", Traces)
_callback("stops_by_metric", StopsByMetric)
_callback("by_lambda", _lambda)
_callback("rates", LearningRateMonitor)
_callback("rates_by_step", lambda: LearningRateMonitor("step", log_momentum=True))
_callback("rates_by_epoch", lambda: LearningRateMonitor("epoch", log_weight_decay=True))
_callback("averages", lambda: StochasticWeightAveraging(0.05))
_callback("early_at_once", lambda: EarlyStopping("val_loss", patience=0))
_callback("early_at_epochs", lambda: EarlyStopping("val_loss", patience=0, check_on_train_epoch_end=True))
_callback("early_by_threshold", lambda: EarlyStopping("val_loss", stopping_threshold=0.6))
_callback("early_by_divergence", lambda: EarlyStopping("train_loss", divergence_threshold=0.4))
_callback("early_by_growth", lambda: EarlyStopping("val_loss", mode="max", patience=0))
_callback("early_twice", lambda: EarlyStopping("val_loss", patience=0), lambda: EarlyStopping("train_loss", patience=0))


@idiom("given")
def to_the_trainer(plan: Plan) -> None:
    """Give callbacks to the trainer, instead of having the module bring them."""
    plan.given = True


def callback(idioms: str, number: int) -> Callback:
    """Return one of a module's callbacks."""
    return plan_of(idioms).callbacks[number]()


# What is left out beside something else, by how both begin.
SETS = tuple(f"data.{name}" for name in ("two_sets", "three_sets", "sets_", "combined_sets", "no_validation"))
OF_VALIDATION = tuple(
    f"callback.early_{name}" for name in ("by_validation", "by_threshold", "at_", "by_growth", "twice")
)
OF_VALIDATION += "checkpoint.best_three", "checkpoint.best_of_validation", "checkpoint.greatest"
OF_VALIDATION += "scheduler.plateau", "scheduler.monitor_beside", "scheduler.said", "hook_log.follows_metrics"
APART: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(OF_VALIDATION, (*SETS, "trainer.no_val")),  # there is no val_loss
    "trainer.no_val": ("trainer.overfit",),  # which is on its own samples
    "trainer.clipped": ("stepping.clips_by_itself",),
    "trainer.second": ("trainer.fast",),  # of which Lightning has no validation then
    "trainer.third_epochs": ("trainer.fast", "scheduler.plateau", "scheduler.said", "scheduler.monitor_beside"),
    "checkpoint": ("trainer.fast", "manual.manual_steps_by", "manual.manual_accumulation"),  # of steps, not of batches
    "checkpoint.best": ("trainer.by_",),  # of several in an epoch Lightning may name another one than the best
    "checkpoint.best_of_training": ("trainer.second_",),  # Lightning saves where there is a validation, if not in all
    "module.reads": ("optimizer.without_any",),  # Lightning's stands for none and has no rate
    "callback.rates": ("optimizer.without_any",),
    "trainer.overfit": ("trainer.fast",),
    "trainer.in_bfloat16": ("mode.teacher", "returns.penalty", "net.shared"),  # whose gradients are summed in 16 bits
    "trainer.accumulation_grows": ("scheduler.for_all", "module.reads"),  # Lightning counts no steps of it
    "scheduler.for_all_batches": ("trainer.steps_alone",),  # Lightning has not looked at the data by then
    "hook_log.on_train_start": ("callback.rates",),  # it reads all metrics as an epoch starts, and so keeps this one
    "callback.unfreezes": ("net.linear", "mode.frozen", "optimizer.without_any"),  # no layer is left that trains
}
# What Lightning does not take, or we do not.
WRONG |= {"plateau_of_nothing", "combined_train", "least_epochs", "least_steps", "reloads", "averages"}
WRONG |= {"no_train", "no_steps", "no_epoch", "across_epochs", "schedulers_in_tuples", "stops_before_training"}
NOT_MANUAL |= {"accumulation_of_four", "clipped_by_value", "accumulation_grows", "for_all_steps"}
SEVERAL_TIMES |= {"manual.adversarial", "manual.schedulers_configured", "manual.once_for_both", "manual.manual_lbfgs"}
NUMBER = sum(map(len, IDIOMS.values()))


# --- as Lightning trains them ----------------------------------------------------------------------------------------


def by_lightning(idioms: str, file: Path) -> list[tuple[int, dict[str, float]]]:
    """Train a module with ``lightning.Trainer``; return the points that it logged."""
    module = make(idioms, str(file))
    plan, logger = module.plan, Points_()
    options = {"max_epochs": 3, "log_every_n_steps": 1, **plan.trainer}
    given = [*plan.theirs, *(plan.callbacks if plan.given else ())]
    trainer = L.Trainer(
        accelerator="cpu",
        logger=logger,
        enable_checkpointing=plan.checkpoint != (),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[each() for each in given],
        default_root_dir=file.parent / f"{file.stem}_root",
        **options,
    )
    trainer.fit(module, datamodule=Data(idioms) if plan.data_module else None)
    return logger.points


def overrides_of(idioms: str) -> list[str]:
    """Return what we are given instead of arguments of ``lightning.Trainer``."""
    plan = plan_of(idioms)
    data = ("lightning_options.Data", f"data.datamodule.idioms='{idioms}'")
    of_data = [f"data.datamodule._target_={data[0]}", f"+{data[1]}"] if plan.data_module else []
    of_callbacks = [
        override
        for number in range(len(plan.callbacks) if plan.given else 0)
        for override in (
            f"+callbacks.own_{number}._target_=lightning_options.callback",
            f"+callbacks.own_{number}.idioms='{idioms}'",
            f"+callbacks.own_{number}.number={number}",
        )
    ]
    return [*plan.ours, *of_data, *of_callbacks]
