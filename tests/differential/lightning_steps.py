"""More idioms, of what steps do: optimizers, schedulers, manual optimization and logs."""

from collections.abc import Callable
from typing import Any

import torch
from lightning_idioms import (
    IDIOMS,
    SUMMED,
    Base,
    Batch,
    Hook,
    Plan,
    _logged_in,
    _logs,
    _metric,
    _norm,
    _scalar,
    idiom,
    listed,
    sgd,
)
from torch import Tensor
from torch.optim import lr_scheduler
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection, MinMetric, SumMetric

# --- optimizers and schedulers ---------------------------------------------------------------------------------------


class OwnDescent(torch.optim.Optimizer):
    """Steps by signs, and counts."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for each in group["params"]:
                    if each.grad is not None:
                        self.state[each]["count"] = self.state[each].get("count", 0) + 1
                        each.add_(each.grad.tanh(), alpha=-group["lr"] / self.state[each]["count"] ** 0.5)
        return loss


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "radam": lambda self: torch.optim.RAdam(self.parameters(), lr=0.02),
    "nadam": lambda self: torch.optim.NAdam(self.parameters(), lr=0.02),
    "adamax": lambda self: torch.optim.Adamax(self.parameters(), lr=0.02),
    "adadelta": lambda self: torch.optim.Adadelta(self.parameters(), lr=0.5),
    "asgd": lambda self: torch.optim.ASGD(self.parameters(), lr=0.05),
    "amsgrad": lambda self: torch.optim.Adam(self.parameters(), lr=0.02, amsgrad=True),
    "foreach": lambda self: torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, foreach=True),
    "fused": lambda self: torch.optim.AdamW(self.parameters(), lr=0.02, fused=True),
    "maximized": lambda self: torch.optim.SGD(self.parameters(), lr=0.001, maximize=True),
    "own_optimizer": lambda self: OwnDescent(self.parameters()),
    "without_any": lambda self: None,
    "some_parameters": lambda self: torch.optim.SGD([*self.net.parameters()][:1], lr=0.1),
    "rate_as_tensor": lambda self: torch.optim.Adam(self.parameters(), lr=torch.tensor(0.02), foreach=False),
    "rate_as_tensor_scheduled": lambda self: _with(
        self, lambda o: [{"scheduler": lr_scheduler.ExponentialLR(o, 0.9), "interval": "step"}], torch.tensor(0.2)
    ),
    "pairs": lambda self: ([torch.optim.SGD(self.parameters(), lr=0.1)], []),
    "two_schedulers": lambda self: _with(
        self,
        lambda o: [
            {"scheduler": lr_scheduler.ExponentialLR(o, 0.9), "interval": "step"},
            {"scheduler": lr_scheduler.StepLR(o, 1, 0.5), "interval": "epoch"},
        ],
    ),
    "schedulers_in_tuples": lambda self: _with(self, lambda o: (lr_scheduler.ExponentialLR(o, 0.7),)),
    "list_of_a_dict": lambda self: [
        {"optimizer": (made := sgd(self)), "lr_scheduler": lr_scheduler.ExponentialLR(made, 0.7)}
    ],
}
for _name, _make_optimizer in OPTIMIZERS.items():
    listed("optimizer", _name, lambda plan, made=_make_optimizer: plan.on("configure_optimizers", made))


def _with(self: Base, make_schedulers: Callable[[Any], Any], lr: Any = 0.2) -> Any:
    optimizer = torch.optim.SGD(self.parameters(), lr=lr, foreach=False)
    return [optimizer], make_schedulers(optimizer)


def _scheduler(make_scheduler: Callable[[Any, Any], Any], **options: Any) -> Callable[[Plan], None]:
    def change(plan: Plan) -> None:
        def configure(self: Base) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.5)
            made = make_scheduler(optimizer, self)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, **options}}

        plan.on("configure_optimizers", configure)

    return change


def _plateau(optimizer: Any, _: Any) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)


MORE: dict[str, tuple[Callable[[Any, Any], Any], dict[str, Any]]] = {
    "sequential": (
        lambda o, _: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
        ),
        {"interval": "step"},
    ),
    "chained": (
        lambda o, _: lr_scheduler.ChainedScheduler(
            [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)]
        ),
        {"interval": "step"},
    ),
    "cyclic": (lambda o, _: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=3), {"interval": "step"}),
    "restarts": (lambda o, _: lr_scheduler.CosineAnnealingWarmRestarts(o, 4), {"interval": "step"}),
    "polynomial": (lambda o, _: lr_scheduler.PolynomialLR(o, 6), {"interval": "step", "frequency": 3}),
    "third_epochs": (lambda o, _: lr_scheduler.ExponentialLR(o, 0.5), {"frequency": 3}),
    "for_all_steps": (
        lambda o, self: lr_scheduler.OneCycleLR(o, 0.2, total_steps=int(self.trainer.estimated_stepping_batches)),
        {"interval": "step"},
    ),
    "for_all_batches": (
        # Lightning knows the batches once it was asked for all.
        lambda o, self: lr_scheduler.CosineAnnealingLR(
            o, self.trainer.estimated_stepping_batches and self.trainer.num_training_batches * 3
        ),
        {"interval": "step"},
    ),
    "plateau_of_greatest": (
        lambda o, _: lr_scheduler.ReduceLROnPlateau(o, "max", factor=0.5, patience=0),
        {"monitor": "val_loss"},
    ),
    "plateau_every_second": (_plateau, {"monitor": "train_loss", "interval": "step", "frequency": 2}),
    "plateau_every_second_epoch": (_plateau, {"monitor": "val_loss", "frequency": 2}),
    "plateau_of_validation_by_step": (_plateau, {"monitor": "val_loss", "interval": "step", "frequency": 3}),
    "plateau_of_nothing": (_plateau, {"monitor": "nowhere"}),
    "said_to_follow": (_plateau, {"monitor": "val_loss", "reduce_on_plateau": True}),
}
for _name, (_make, _options) in MORE.items():
    listed("scheduler", _name, _scheduler(_make, **_options))


# --- manual optimization ---------------------------------------------------------------------------------------------


def _halves(self: Base) -> tuple[list[Any], list[Any]]:
    every = [each for each in self.parameters() if each.requires_grad]
    return every[: (len(every) + 1) // 2], every[(len(every) + 1) // 2 :] or every[:1]


def _of_two(name: str, step: Hook, with_schedulers: Callable[[Any], Any] | None = None, **hooks: Hook) -> None:
    """Have a manual step of two optimizers be an idiom."""

    def configure(self: Base) -> Any:
        one, other = _halves(self)
        made = [torch.optim.Adam(one, lr=0.02), torch.optim.SGD(other, lr=0.1, momentum=0.5)]
        return made if with_schedulers is None else (made, [with_schedulers(each) for each in made])

    def change(plan: Plan) -> None:
        plan.on("configure_optimizers", configure)
        plan.manual = step
        for hook, function in hooks.items():
            plan.on(hook, function)

    listed("manual", name, change)


def _alternately(self: Base, batch: Batch, batch_idx: int) -> None:
    """Train a critic on each batch and a generator on every second one."""
    generator, critic = self.optimizers()
    self.toggle_optimizer(critic)
    loss = self.loss(batch)
    self.log("critic", loss, prog_bar=True)
    self.manual_backward(loss)
    critic.step()
    critic.zero_grad()
    self.untoggle_optimizer(critic)
    if batch_idx % 2 == 0:
        self.toggle_optimizer(generator)
        loss = -0.1 * self.loss(batch)
        self.log("generator", loss, on_step=False, on_epoch=True)
        self.manual_backward(loss)
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)


def _once_for_both(self: Base, batch: Batch, batch_idx: int) -> Any:
    first, second = self.optimizers(use_pl_optimizer=True)
    first.zero_grad()
    second.zero_grad()
    loss = self.loss(batch)
    self.manual_backward(loss, retain_graph=True)
    self.manual_backward(0.5 * loss)
    first.step()
    second.step()
    return {"loss": loss.detach(), "of_both": 2 * loss.detach()}


def _steps_of_schedulers(self: Base, *_: Any) -> None:
    for each in self.lr_schedulers():
        each.step()


def _steps_by_metric(self: Base, *_: Any) -> None:
    for each in self.lr_schedulers():
        each.step(self.trainer.callback_metrics["train_loss"])


def _exponential(optimizer: Any) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, 0.7)


def _steps_each_batch(self: Base, batch: Batch, batch_idx: int) -> None:
    _once_for_both(self, batch, batch_idx)
    _steps_of_schedulers(self)


_of_two("adversarial", _alternately)
_of_two("once_for_both", _once_for_both)
_of_two("schedulers_by_batch", _steps_each_batch, _exponential)
_of_two("schedulers_by_epoch", _once_for_both, _exponential, on_train_epoch_end=_steps_of_schedulers)
_of_two("schedulers_configured", _alternately, lambda o: {"scheduler": _exponential(o), "interval": "step"})
_of_two("plateaus_by_epoch", _once_for_both, lambda o: _plateau(o, None), on_train_epoch_end=_steps_by_metric)


@idiom("manual")
def manual_lbfgs(plan: Plan) -> None:
    plan.on("configure_optimizers", lambda self: torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3))
    IDIOMS["manual"]["manual_closure"](plan)
    plan.alone = plan.alone or "it makes rounding large"


@idiom("manual")
def manual_accumulation_in_a_window(plan: Plan) -> None:
    def step(self: Base, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if (batch_idx + 1) % 2 == 0:
            self.clip_gradients(optimizer, 0.2, "norm")
            optimizer.step()
            optimizer.zero_grad()

    plan.manual = step


# --- logging ---------------------------------------------------------------------------------------------------------


@idiom("val_log")
def one_name_for_all_sets(plan: Plan) -> None:
    def log(self: Base, loss: Tensor, batch: Batch, batch_idx: int) -> None:
        self.log("val_unnumbered", loss, add_dataloader_idx=len(plan.val) > 1 and False)

    plan.on("validation_step", log)


def _by_log_dict(stage: str) -> None:
    def change(plan: Plan) -> None:
        name = f"{stage}_collected_at_once"
        made = {"one": MeanSquaredError(), "other": MeanSquaredError(squared=False)}
        plan.on("__init__", lambda self: setattr(self, name, MetricCollection(made, prefix=f"{stage}/")))

        def log(self: Base, loss: Any, batch: Batch, batch_idx: int) -> None:
            with torch.no_grad():
                getattr(self, name).update(batch[0][:, :2].contiguous(), batch[1])
            self.log_dict(getattr(self, name), on_step=False, on_epoch=True)

        plan.on("validation_step", log) if stage == "val" else plan.step.append(log)

    listed(f"{stage}_log", "collected_at_once", change)


def _at_the_end(stage: str, metric: Callable[[], Any], resets: bool) -> None:
    def change(plan: Plan) -> None:
        name = f"{stage}_at_the_end_{resets}"
        plan.on("__init__", lambda self: setattr(self, name, metric()))

        def update(self: Base, loss: Any, batch: Batch, batch_idx: int) -> None:
            getattr(self, name).update(_scalar(loss))

        def log(self: Base) -> None:
            found = getattr(self, name)
            self.log(name, found.compute() if resets else found)
            if resets:
                found.reset()

        plan.on("validation_step", update) if stage == "val" else plan.step.append(update)
        plan.on("on_validation_epoch_end" if stage == "val" else "on_train_epoch_end", log)
        plan.alone = plan.alone or "it counts batches"
        plan.unread.add(name)

    listed(f"{stage}_log", f"metric_at_the_end{'_by_hand' if resets else ''}", change)


for _stage in ("train", "val"):
    _by_log_dict(_stage)
    _at_the_end(_stage, MeanMetric, resets=False)
    _at_the_end(_stage, SumMetric, resets=True)


def _of_step(self: Base, name: str, metric: Any, outputs: Tensor, batch: Batch, loss: Tensor) -> None:
    metric(loss)
    self.log(name, metric, on_step=True, on_epoch=True)


def _bar(self: Base, name: str, loss: Tensor, batch: Batch) -> None:
    self.log(name, loss, prog_bar=True, on_epoch=True, logger=False)


def _sum(self: Base, name: str, loss: Tensor, batch: Batch) -> None:
    self.log(name, loss, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)


def _heavy(self: Base, name: str, loss: Tensor, batch: Batch) -> None:
    self.log(name, loss, on_epoch=True, batch_size=3 if len(batch[0]) > 4 else 1)


_metric("least", MinMetric, _of_step, "batches")
_logs("bar_by_epoch", _bar)
_logs("sum_synced", _sum, SUMMED)
_logs("heavy", _heavy, "batches")
for _name in ("on_after_backward", "on_before_backward"):
    _logged_in(_name, _norm)
_logged_in("on_train_batch_start", _norm, on_epoch=True)
_logged_in("on_validation_batch_start", _norm, on_step=True, on_epoch=True)


@idiom("hook_log")
def by_the_logger(plan: Plan) -> None:
    plan.on(
        "on_train_epoch_end",
        lambda self: self.logger.log_metrics({"by_the_logger": float(self.current_epoch)}, self.global_step),
    )
    plan.on("on_fit_start", lambda self: self.logger.log_metrics({"at_first": 1.0}, step=0))
    plan.on(
        "on_validation_end",
        lambda self: self.logger.log_metrics({"by_the_logger_too": 2.0}, step=self.global_step),
    )
