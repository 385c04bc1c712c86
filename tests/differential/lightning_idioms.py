"""Idioms of Lightning modules, a few lines each, and modules that are put together of them.

An idiom is a function of a class's members: it adds to what hooks do, to how the trainer is set up, or to both. Nothing
in here knows of ddp_recipes. What a module sees is kept by the module itself, and written when it has been trained.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelSummary
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MaxMetric, MeanAbsoluteError, MeanMetric, MeanSquaredError, MetricCollection

Batch = tuple[Tensor, Tensor]
Hook = Callable[..., Any]


class Points(Dataset[Batch]):
    """Four numbers, and two that follow from them."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(count, 4, generator=generator)
        self.targets = self.inputs[:, :2].sin() + 0.1 * torch.randn(count, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        return self.inputs[index], self.targets[index]


@dataclass
class Plan:
    """What a module is put together of.

    Attributes:
        net: makes its layers.
        step: turns the loss of a training step into what the step returns; called in turn.
        hooks: what is called in each hook, in turn; the last result that is not ``None`` counts.
        trainer: arguments of ``lightning.Trainer``, which are keys of ``trainer.*`` as well.
        alone: why only one rank can give these numbers.
        train_set, val_set: make a data set of a number of samples and a seed.
        train_as, val_as: turn loaders into what ``train_dataloader`` and ``val_dataloader`` return.
        unread: metrics that are computed once a hook is over, and not looked at in it.
        data_module: whether a data module has the loaders.
        given: whether the callbacks are given to the trainer.
        theirs: callbacks of Lightning's trainer that are something else in ours.
        ours, checkpoint: overrides that stand for those.
    """

    net: Callable[[], nn.Module]
    hooks: dict[str, list[Hook]] = field(default_factory=dict)
    step: list[Hook] = field(default_factory=list)
    trainer: dict[str, Any] = field(default_factory=dict)
    train: tuple[int, dict[str, Any]] = (24, {"batch_size": 8})
    val: list[tuple[int, dict[str, Any]]] = field(default_factory=lambda: [(16, {"batch_size": 8})])
    manual: Hook | None = None
    callbacks: list[Callable[[], Callback]] = field(default_factory=list)
    alone: str = ""
    train_set: Callable[[int, int], Any] = Points
    val_set: Callable[[int, int], Any] = Points
    train_as: Callable[[Any], Any] = lambda loader: loader
    val_as: Callable[[list[Any]], Any] = lambda loaders: loaders[0] if len(loaders) == 1 else loaders
    unread: set[str] = field(default_factory=set)
    data_module: bool = False
    given: bool = False
    theirs: list[Callable[[], Callback]] = field(default_factory=list)
    ours: tuple[str, ...] = ()
    checkpoint: tuple[str, ...] = ()

    def on(self, name: str, hook: Hook) -> None:
        """Do something in a hook."""
        self.hooks.setdefault(name, []).append(hook)

    def train_loader(self) -> Any:
        """Return what ``train_dataloader`` does."""
        count, options = self.train
        return self.train_as(DataLoader(self.train_set(count, 0), **options))

    def val_loaders(self) -> Any:
        """Return what ``val_dataloader`` does."""
        found = [DataLoader(self.val_set(count, 1 + at), **options) for at, (count, options) in enumerate(self.val)]
        return self.val_as(found) if found else []


IDIOMS: dict[str, dict[str, Callable[[Plan], None]]] = {}


def idiom(kind: str) -> Callable[[Callable[[Plan], None]], Callable[[Plan], None]]:
    """Have a function be an idiom, by its name."""

    def add(function: Callable[[Plan], None]) -> Callable[[Plan], None]:
        IDIOMS.setdefault(kind, {})[function.__name__.strip("_")] = function
        return function

    return add


def listed(kind: str, name: str, function: Callable[[Plan], None]) -> None:
    """Have a function be an idiom of that name."""
    IDIOMS.setdefault(kind, {})[name] = function


# --- the module ------------------------------------------------------------------------------------------------------

SNAPSHOTS = ("on_train_batch_end", "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end", "on_train_end")


class Base(L.LightningModule):
    """Learns points, and keeps what it sees: hooks as they are called, modes, and the trainer's metrics."""

    plan: Plan

    def __init__(self, idioms: str, file: str) -> None:
        super().__init__()
        self.file = file
        self.seen: dict[str, list[Any]] = {"calls": [], "modes": [], "metrics": [], "steps": []}
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.net = self.plan.net()
        for hook in self.plan.hooks.get("__init__", ()):
            hook(self)

    def loss(self, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def note(self, name: str) -> None:
        self.seen["calls"] += [] if name == "on_save_checkpoint" else [name]  # whenever there is a checkpoint
        if name.endswith("_step") or name.endswith("_start"):
            self.seen["modes"].append([name, [each.training for each in self.modules() if each is not self]])
        if name in SNAPSHOTS and not self.trainer.sanity_checking:
            found = {key: float(value) for key, value in self.trainer.callback_metrics.items()}
            found = {key: value for key, value in found.items() if key not in self.plan.unread}
            self.seen["metrics"].append([name, found])
            self.seen["steps"].append([name, self.trainer.global_step, self.trainer.current_epoch])

    def finish(self) -> None:
        """Write what was seen."""
        state = {name: value.detach().clone() for name, value in self.state_dict().items()}
        if self.trainer.is_global_zero:
            torch.save({**self.seen, "state": state}, self.file)


def _hook(name: str, hooks: list[Hook]) -> Hook:
    def call(self: Base, *arguments: Any, **options: Any) -> Any:
        results = [hook(self, *arguments, **options) for hook in hooks]
        self.note(name)
        return next((each for each in reversed(results) if each is not None), None)

    return call


def _training_step(plan: Plan) -> Hook:
    def training_step(self: Base, batch: Batch, batch_idx: int) -> Any:
        self.note("training_step")
        found = plan.manual(self, batch, batch_idx) if plan.manual is not None else self.loss(batch)
        for step in plan.step:
            changed = step(self, found, batch, batch_idx)
            found = found if changed is None else changed
        return found

    return training_step


def _validation_step(plan: Plan) -> Hook:
    def validation_step(self: Base, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.note("validation_step")
        loss = self.loss(batch)
        results = [hook(self, loss, batch, batch_idx) for hook in plan.hooks.get("validation_step", ())]
        return next((each for each in reversed(results) if each is not None), None)

    return validation_step


def plan_of(names: str) -> Plan:
    """Return the plan of idioms, given as ``kind.name+kind.name``."""
    plan = Plan(mlp)
    for each in names.split("+"):
        kind, _, name = each.partition(".")
        IDIOMS[kind][name](plan)
    return plan


def make(idioms: str, file: str) -> Base:
    """Return a module of these idioms, which writes what it saw to a file."""
    plan = plan_of(idioms)
    members: dict[str, Any] = {"plan": plan, "training_step": _training_step(plan)}
    if plan.val:
        members["validation_step"] = _validation_step(plan)
    for name in ("on_train_start", "on_train_epoch_start", "on_train_batch_start", *SNAPSHOTS, "on_validation_start"):
        plan.hooks.setdefault(name, [])
    members |= {
        name: _hook(name, hooks) for name, hooks in plan.hooks.items() if name not in ("__init__", "validation_step")
    }
    plan.hooks.setdefault("configure_optimizers", [sgd])
    members["configure_optimizers"] = lambda self: plan.hooks["configure_optimizers"][-1](self)
    at_end = plan.hooks.get("on_fit_end", [])
    members["on_fit_end"] = lambda self: [hook(self) for hook in [*at_end, Base.finish]] and None
    if not plan.data_module:
        members["train_dataloader"] = lambda self: plan.train_loader()
        members["val_dataloader"] = lambda self: plan.val_loaders()
    if plan.callbacks and not plan.given:
        members["configure_callbacks"] = lambda self: [each() for each in plan.callbacks]
    if plan.manual is not None:
        plan.hooks.setdefault("__init__", []).insert(0, lambda self: setattr(self, "automatic_optimization", False))
    module: Base = type("Case", (Base,), members)(idioms, file)
    return module


# --- layers ----------------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for _ in range(2):
            hidden = self.middle(hidden).tanh()
        return self.last(hidden)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.other.weight = self.one.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.other(self.one(inputs).tanh()))


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(inputs + self.one(inputs).relu())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 2), nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) * self.scale


class Counting(nn.Module):
    """Counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return self.layer(inputs)


class Doubling(nn.Module):
    """Does something else in eval mode, as dropout does, but nothing at random."""

    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * inputs if self.training else inputs


def _net(make_net: Callable[[], nn.Module], alone: str = "") -> Callable[[Plan], None]:
    def change(plan: Plan) -> None:
        plan.net = make_net
        plan.alone = plan.alone or alone

    return change


LOCAL = "batch norm sees the samples of a rank"
NETS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "linear": (lambda: nn.Linear(4, 2), ""),
    "mlp": (mlp, ""),
    "deep": (lambda: nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 2)), ""),
    "layer_norm": (lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2)), ""),
    "group_norm": (lambda: nn.Sequential(nn.Linear(4, 8), nn.GroupNorm(2, 8), nn.Linear(8, 2)), ""),
    "batch_norm": (lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)), LOCAL),
    "batch_norm_first": (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), LOCAL),
    "doubling": (lambda: nn.Sequential(nn.Linear(4, 8), Doubling(), nn.Linear(8, 2)), ""),
    "shared": (Shared, ""),
    "tied": (Tied, ""),
    "skip": (Skip, ""),
    "scaled": (Scaled, ""),
    "counting": (Counting, ""),
    "weight_norm": (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2)), ""),
    "no_bias": (lambda: nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False)), ""),
    "conv": (lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(4, 2)), ""),
}
for _name, (_make, _alone) in NETS.items():
    listed("net", _name, _net(_make, _alone))


# --- optimizers and schedulers ---------------------------------------------------------------------------------------


def sgd(self: Base) -> Any:
    return torch.optim.SGD(self.parameters(), lr=0.1)


def _optimizer(make_optimizer: Callable[[Any], Any], alone: str = "") -> Callable[[Plan], None]:
    def change(plan: Plan) -> None:
        plan.on("configure_optimizers", lambda self: make_optimizer(self))
        plan.alone = plan.alone or alone

    return change


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": sgd,
    "momentum": lambda self: torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9),
    "nesterov": lambda self: torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda self: torch.optim.Adam(self.parameters(), lr=0.02),
    "adamw": lambda self: torch.optim.AdamW(self.parameters(), lr=0.02),
    "rmsprop": lambda self: torch.optim.RMSprop(self.parameters(), lr=0.005),
    "adagrad": lambda self: torch.optim.Adagrad(self.parameters(), lr=0.05),
    "lbfgs": lambda self: torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3),
    "groups": lambda self: torch.optim.SGD([{"params": [each]} for each in self.net.parameters()], lr=0.1),
    "two_rates": lambda self: torch.optim.SGD(
        [{"params": [each], "lr": 0.1 / (1 + at)} for at, each in enumerate(self.net.parameters())], lr=0.1
    ),
    "in_a_list": lambda self: [torch.optim.SGD(self.parameters(), lr=0.1)],
    "in_a_dict": lambda self: {"optimizer": torch.optim.SGD(self.parameters(), lr=0.1)},
    "decay": lambda self: torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.1),
    "those_that_train": lambda self: torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=0.02),
}
for _name, _make_optimizer in OPTIMIZERS.items():
    listed("optimizer", _name, _optimizer(_make_optimizer, "it makes rounding large" if _name == "lbfgs" else ""))


def _scheduler(make_scheduler: Callable[[Any], Any], **options: Any) -> Callable[[Plan], None]:
    def change(plan: Plan) -> None:
        def configure(self: Base) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make_scheduler(optimizer), **options}}

        plan.on("configure_optimizers", configure)

    return change


SCHEDULERS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "step": (lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5), {}),
    "by_step": (lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9), {"interval": "step"}),
    "every_second": (
        lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.8),
        {"interval": "step", "frequency": 2},
    ),
    "every_second_epoch": (lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5), {"frequency": 2}),
    "cosine": (lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5), {"interval": "step"}),
    "warm": (
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4)),
        {"interval": "step", "name": "warm"},
    ),
    "one_cycle": (lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=50), {"interval": "step"}),
    "plateau": (
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2),
        {"monitor": "val_loss"},
    ),
    "plateau_of_training": (
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2),
        {"monitor": "train_loss"},
    ),
    "plateau_by_step": (
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0, threshold=0.1),
        {"monitor": "train_loss", "interval": "step"},
    ),
    "lenient_plateau": (
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
        {"monitor": "nowhere", "strict": False},
    ),
}
for _name, (_make_scheduler, _options) in SCHEDULERS.items():
    listed("scheduler", _name, _scheduler(_make_scheduler, **_options))


@idiom("scheduler")
def own_scheduler_step(plan: Plan) -> None:
    SCHEDULED = SCHEDULERS["by_step"]
    _scheduler(SCHEDULED[0], **SCHEDULED[1])(plan)
    plan.on("lr_scheduler_step", lambda self, scheduler, metric: scheduler.step())


@idiom("scheduler")
def follows_the_steps(plan: Plan) -> None:
    def advance(self: Base, scheduler: Any, metric: Any) -> None:
        scheduler.optimizer.param_groups[0]["lr"] = 0.2 * 0.9**self.global_step

    SCHEDULED = SCHEDULERS["by_step"]
    _scheduler(SCHEDULED[0], **SCHEDULED[1])(plan)
    plan.on("lr_scheduler_step", advance)


@idiom("scheduler")
def monitor_beside(plan: Plan) -> None:
    def configure(self: Base) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        plateau = SCHEDULERS["plateau"][0](optimizer)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}

    plan.on("configure_optimizers", configure)


# --- steps of the optimizer ------------------------------------------------------------------------------------------


@idiom("stepping")
def plain(plan: Plan) -> None:
    """Leave it to the trainer."""


@idiom("stepping")
def own_step(plan: Plan) -> None:
    plan.on("optimizer_step", lambda self, epoch, batch_idx, optimizer, closure: optimizer.step(closure=closure))


@idiom("stepping")
def closure_first(plan: Plan) -> None:
    def step(self: Base, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        optimizer.step()

    plan.on("optimizer_step", step)


@idiom("stepping")
def warm_up(plan: Plan) -> None:
    def step(self: Base, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 3)
        optimizer.step(closure=closure)

    plan.on("optimizer_step", step)


def _ascend(parameters: list[Any], sign: float, kept: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.add_(gradient, alpha=0.05 * sign)


@idiom("stepping")
def sharpness_aware(plan: Plan) -> None:
    def step(self: Base, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        trained = [each for each in self.parameters() if each.grad is not None]
        kept = [each.grad.clone() for each in trained]
        _ascend(trained, 1, kept)
        closure()
        _ascend(trained, -1, kept)
        optimizer.step()

    plan.on("optimizer_step", step)


@idiom("stepping")
def zeros_in_place(plan: Plan) -> None:
    def clear(self: Base, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    plan.on("optimizer_zero_grad", clear)


@idiom("stepping")
def own_backward(plan: Plan) -> None:
    plan.on("backward", lambda self, loss, *_: loss.backward())


@idiom("stepping")
def clips_by_itself(plan: Plan) -> None:
    def clip(self: Base, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    plan.on("configure_gradient_clipping", clip)


@idiom("stepping")
def clips_as_configured(plan: Plan) -> None:
    def clip(self: Base, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    plan.on("configure_gradient_clipping", clip)
    plan.trainer["gradient_clip_val"] = 0.1


@idiom("stepping")
def halves_gradients(plan: Plan) -> None:
    def halve(self: Base) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    plan.on("on_before_optimizer_step", lambda self, optimizer: halve(self))


@idiom("stepping")
def looks_after_backward(plan: Plan) -> None:
    plan.on("on_after_backward", lambda self: None)
    plan.on("on_before_zero_grad", lambda self, optimizer: None)
    plan.on("on_before_backward", lambda self, loss: None)


@idiom("stepping")
def clipped_by_norm(plan: Plan) -> None:
    plan.trainer["gradient_clip_val"] = 0.1


@idiom("stepping")
def clipped_by_value(plan: Plan) -> None:
    plan.trainer |= {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}


@idiom("stepping")
def forgets_the_closure(plan: Plan) -> None:
    plan.on("optimizer_step", lambda self, epoch, batch_idx, optimizer, closure: None)


# --- manual optimization ---------------------------------------------------------------------------------------------


def _manual(step: Hook) -> None:
    def change(plan: Plan) -> None:
        plan.manual = step

    listed("manual", step.__name__, change)


@_manual
def manual_plain(self: Base, batch: Batch, batch_idx: int) -> Tensor:
    optimizer = self.optimizers()
    optimizer.zero_grad()
    loss = self.loss(batch)
    self.manual_backward(loss)
    optimizer.step()
    return loss.detach()


@_manual
def manual_clipping(self: Base, batch: Batch, batch_idx: int) -> None:
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(self.loss(batch))
    self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
    optimizer.step()


@_manual
def manual_clipping_by_value(self: Base, batch: Batch, batch_idx: int) -> None:
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(self.loss(batch))
    self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")
    optimizer.step()


@_manual
def manual_clipping_of_torch(self: Base, batch: Batch, batch_idx: int) -> None:
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(self.loss(batch))
    norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
    self.log("norm", norm)
    optimizer.step()


@_manual
def manual_sharpness_aware(self: Base, batch: Batch, batch_idx: int) -> None:
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(self.loss(batch))
    trained = [each for each in self.parameters() if each.grad is not None]
    kept = [each.grad.clone() for each in trained]
    _ascend(trained, 1, kept)
    optimizer.zero_grad()
    self.manual_backward(self.loss(batch))
    _ascend(trained, -1, kept)
    optimizer.step()


@_manual
def manual_accumulation(self: Base, batch: Batch, batch_idx: int) -> None:
    optimizer = self.optimizers()
    self.manual_backward(self.loss(batch) / 2)
    if batch_idx % 2 or self.trainer.is_last_batch:
        optimizer.step()
        optimizer.zero_grad()


@_manual
def manual_twice_backward(self: Base, batch: Batch, batch_idx: int) -> None:
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(self.loss(batch))
    self.manual_backward(sum(each.square().sum() for each in self.parameters()) * 0.01)
    optimizer.step()


@_manual
def manual_closure(self: Base, batch: Batch, batch_idx: int) -> None:
    optimizer = self.optimizers()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        return loss

    optimizer.step(closure=closure)


@_manual
def manual_steps_by_batches(self: Base, batch: Batch, batch_idx: int) -> None:
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(self.loss(batch))
    if batch_idx % 2 == 0:
        optimizer.step()


@_manual
def manual_norm_is_logged(self: Base, batch: Batch, batch_idx: int) -> None:
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(self.loss(batch))
    self.log("norm", sum(each.grad.norm() for each in self.parameters()), on_epoch=True)
    optimizer.step()


@_manual
def manual_scheduler(self: Base, batch: Batch, batch_idx: int) -> None:
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(self.loss(batch))
    optimizer.step()
    schedulers = self.lr_schedulers() if self.trainer.is_last_batch else None
    if schedulers is not None and not isinstance(schedulers, lr_scheduler.ReduceLROnPlateau):
        schedulers.step()


@idiom("manual")
def two_optimizers(plan: Plan) -> None:
    def configure(self: Base) -> Any:
        weights = [each for each in self.parameters() if each.dim() > 1]
        others = [each for each in self.parameters() if each.dim() < 2]
        return [torch.optim.Adam(weights, lr=0.02), torch.optim.SGD(others or weights[:1], lr=0.1)]

    def step(self: Base, batch: Batch, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    plan.on("configure_optimizers", configure)
    plan.manual = step


@idiom("manual")
def toggled_by_the_optimizer(plan: Plan) -> None:
    two_optimizers(plan)

    def step(self: Base, batch: Batch, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            with optimizer.toggle_model():
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

    plan.manual = step


# --- what a training step returns ------------------------------------------------------------------------------------


def _returns(name: str, change: Hook) -> None:
    listed("returns", name, lambda plan: plan.step.append(change))


_returns("a_dict", lambda self, loss, batch, batch_idx: {"loss": loss})
_returns("more", lambda self, loss, batch, batch_idx: {"loss": loss, "twice": 2 * loss.detach()})
_returns("one_element", lambda self, loss, batch, batch_idx: loss.reshape(1))
_returns("one_element_in_a_dict", lambda self, loss, batch, batch_idx: {"loss": loss[None]})
_returns("float64", lambda self, loss, batch, batch_idx: loss.double())
_returns("scaled", lambda self, loss, batch, batch_idx: 0.5 * loss)
_returns("penalty", lambda self, loss, batch, batch_idx: loss + 0.01 * self.net(batch[0]).square().mean())
_returns("a_vector", lambda self, loss, batch, batch_idx: loss.expand(2))


# --- logging ---------------------------------------------------------------------------------------------------------


@idiom("train_log")
def in_some_batches(plan: Plan) -> None:
    def log(self: Base, loss: Any, batch: Batch, batch_idx: int) -> None:
        if batch_idx % 2 == 0:
            self.log("in_some_batches", _scalar(loss))

    plan.step.append(log)


def _logs(name: str, log: Hook, alone: str = "", stages: tuple[str, ...] = ("train", "val")) -> None:
    """Have a way to log be an idiom of training steps and of validation steps."""

    def training(plan: Plan) -> None:
        plan.step.append(lambda self, loss, batch, batch_idx: log(self, f"train_{name}", _scalar(loss), batch))
        plan.alone = plan.alone or alone

    def validation(plan: Plan) -> None:
        plan.on("validation_step", lambda self, loss, batch, batch_idx: log(self, f"val_{name}", loss, batch))
        plan.alone = plan.alone or alone

    if "train" in stages:
        listed("train_log", name, training)
    if "val" in stages:
        listed("val_log", name, validation)


def _scalar(loss: Any) -> Tensor:
    loss = loss["loss"] if isinstance(loss, dict) else loss
    return torch.zeros(()) if loss is None else loss.detach().float().mean()


def _in_place(self: Base, name: str, loss: Tensor, batch: Batch) -> None:
    value = loss.detach().clone()
    self.log(name, value, on_epoch=True)
    value.add_(100)


def _twice(self: Base, name: str, loss: Tensor, batch: Batch) -> None:
    self.log(name, loss, on_epoch=True)
    self.log(name, loss + 1, on_epoch=True)


def _differently(self: Base, name: str, loss: Tensor, batch: Batch) -> None:
    self.log(name, loss, on_epoch=True)
    self.log(name, loss, on_epoch=True, reduce_fx="max")


def _on_rank_0(self: Base, name: str, loss: Tensor, batch: Batch) -> None:
    if self.global_rank == 0:
        self.log(name, 1.0, rank_zero_only=True)


def _sometimes(self: Base, name: str, loss: Tensor, batch: Batch) -> None:
    if len(self.seen["calls"]) % 2:
        self.log(name, 3.0, on_epoch=True)


SUMMED = "a sum or an extreme is of each rank's batches"
_logs("loss", lambda self, name, loss, batch: self.log(name, loss))
_logs("nowhere_else", lambda self, name, loss, batch: self.log(name, loss, on_step=False, on_epoch=True))
_logs("both", lambda self, name, loss, batch: self.log(name, loss, on_step=True, on_epoch=True))
_logs("on_step", lambda self, name, loss, batch: self.log(name, loss, on_step=True))
_logs("on_step_alone", lambda self, name, loss, batch: self.log(name, loss, on_step=True, on_epoch=False))
_logs("nothing", lambda self, name, loss, batch: self.log(name, loss, on_step=False, on_epoch=False))
_logs("bar", lambda self, name, loss, batch: self.log(name, loss, prog_bar=True))
_logs("synced", lambda self, name, loss, batch: self.log(name, loss, on_epoch=True, sync_dist=True))
_logs("several", lambda self, name, loss, batch: self.log_dict({name: loss, f"{name}_twice": 2 * loss}))
_logs("several_by_epoch", lambda self, name, loss, batch: self.log_dict({name: loss}, on_step=False, on_epoch=True))
_logs("greatest", lambda self, name, loss, batch: self.log(name, loss, on_epoch=True, reduce_fx="max"), SUMMED)
_logs("least", lambda self, name, loss, batch: self.log(name, loss, on_epoch=True, reduce_fx=torch.min), SUMMED)
_logs("sum", lambda self, name, loss, batch: self.log(name, loss, on_epoch=True, reduce_fx="sum"), SUMMED)
_logs("average", lambda self, name, loss, batch: self.log(name, loss, on_epoch=True, reduce_fx="avg"))
_logs("own_reduction", lambda self, name, loss, batch: self.log(name, loss, on_epoch=True, reduce_fx=torch.median))
_logs("number", lambda self, name, loss, batch: self.log(name, float(loss), on_epoch=True))
_logs("whole_number", lambda self, name, loss, batch: self.log(name, 3, on_epoch=True))
_logs("truth", lambda self, name, loss, batch: self.log(name, True, on_epoch=True))
_logs("integer", lambda self, name, loss, batch: self.log(name, torch.tensor(4), on_epoch=True))
_logs("float64", lambda self, name, loss, batch: self.log(name, loss.double(), on_epoch=True))
_logs("one_element", lambda self, name, loss, batch: self.log(name, loss.reshape(1), on_epoch=True))
_logs("vector", lambda self, name, loss, batch: self.log(name, loss.expand(2), on_epoch=True))
_logs("text", lambda self, name, loss, batch: self.log(name, "much", on_epoch=True))
_logs("weighted", lambda self, name, loss, batch: self.log(name, loss, on_epoch=True, batch_size=len(batch[0])))
_logs("weighted_alike", lambda self, name, loss, batch: self.log(name, loss, on_epoch=True, batch_size=1), "batches")
_logs("unlogged", lambda self, name, loss, batch: self.log(name, loss, on_epoch=True, logger=False))
_logs("changed_in_place", _in_place)
_logs("twice", _twice)
_logs("twice_differently", _differently)
_logs("on_rank_0", _on_rank_0)
# In training Lightning logs the value of an earlier step again, at each step without one.
_logs("sometimes", _sometimes, "which batches count differs", stages=("val",))
_logs("graph", lambda self, name, loss, batch: self.log(name, loss, enable_graph=True, on_epoch=True))
_logs("step_number", lambda self, name, loss, batch: self.log(name, float(self.global_step)))
_logs("epoch_number", lambda self, name, loss, batch: self.log(name, float(self.current_epoch)))


def _metric(name: str, make_metric: Callable[[], Any], log: Hook, alone: str = "") -> None:
    for stage in ("train", "val"):

        def change(plan: Plan, stage: str = stage) -> None:
            attribute = f"{stage}_metric_{name}"
            plan.on("__init__", lambda self: setattr(self, attribute, make_metric()))

            def use(self: Base, loss: Any, batch: Batch, batch_idx: int) -> None:
                with torch.no_grad():
                    outputs = (
                        self.net(batch[0]) if not self.net.training or not plan.alone else batch[0][:, :2].contiguous()
                    )
                log(self, f"{stage}_{name}", getattr(self, attribute), outputs, batch, _scalar(loss))

            if stage == "train":
                plan.step.append(use)
            else:
                plan.on("validation_step", use)
            plan.alone = plan.alone or alone

        listed(f"{stage}_log", f"metric_{name}", change)


def _updated(self: Base, name: str, metric: Any, outputs: Tensor, batch: Batch, loss: Tensor) -> None:
    metric.update(outputs, batch[1])
    self.log(name, metric, on_step=False, on_epoch=True)


def _called(self: Base, name: str, metric: Any, outputs: Tensor, batch: Batch, loss: Tensor) -> None:
    metric(outputs, batch[1])
    self.log(name, metric, on_step=False, on_epoch=True)


def _called_by_step(self: Base, name: str, metric: Any, outputs: Tensor, batch: Batch, loss: Tensor) -> None:
    metric(outputs, batch[1])
    self.log(name, metric, on_step=True, on_epoch=True)


def _value(self: Base, name: str, metric: Any, outputs: Tensor, batch: Batch, loss: Tensor) -> None:
    self.log(name, metric(outputs, batch[1]), on_epoch=True)


def _of_loss(self: Base, name: str, metric: Any, outputs: Tensor, batch: Batch, loss: Tensor) -> None:
    metric(loss, weight=len(batch[0]))
    self.log(name, metric, on_step=False, on_epoch=True)


def _collected(self: Base, name: str, metrics: Any, outputs: Tensor, batch: Batch, loss: Tensor) -> None:
    metrics.update(outputs, batch[1])
    self.log_dict({f"{name}_{key}": metric for key, metric in metrics.items()}, on_step=False, on_epoch=True)


def _collection() -> MetricCollection:
    """Return three metrics, of which two have the same state."""
    squares = {"squared": MeanSquaredError(), "root": MeanSquaredError(squared=False)}
    return MetricCollection({"absolute": MeanAbsoluteError(), **squares})


_metric("updated", MeanAbsoluteError, _updated)
_metric("collected", _collection, _collected)
_metric("called", MeanAbsoluteError, _called)
_metric("by_step", MeanAbsoluteError, _called_by_step, "a step's value is of a rank's samples")
_metric("value", MeanAbsoluteError, _value)
_metric("of_loss", MeanMetric, _of_loss)


def _logged_in(hook: str, value: Hook, **options: Any) -> None:
    def log(self: Base, *_: Any) -> None:
        self.log(f"in_{hook}", value(self), **options)

    listed("hook_log", f"{hook}{'_'.join(['', *options])}", lambda plan: plan.on(hook, log))


def _norm(self: Base) -> Tensor:
    return torch.stack([each.detach().norm() for each in self.net.parameters()]).sum()


def _of_gradients(self: Base) -> Tensor:
    return torch.stack([each.grad.norm() for each in self.net.parameters() if each.grad is not None]).sum()


for _name in ("on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start"):
    _logged_in(_name, _norm)
for _name in ("on_train_batch_end", "on_before_zero_grad", "on_validation_epoch_end", "on_validation_start"):
    _logged_in(_name, _norm)
for _name in ("on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"):
    _logged_in(_name, _norm)
_logged_in("on_before_optimizer_step", _of_gradients)
_logged_in("on_before_optimizer_step", _of_gradients, on_step=False, on_epoch=True)
_logged_in("on_train_batch_end", _norm, on_epoch=True)
_logged_in("on_train_epoch_end", _norm, prog_bar=True)
_logged_in("on_train_epoch_end", _norm, on_step=True)
_logged_in("on_validation_end", _norm)
_logged_in("on_train_end", _norm)
_logged_in("on_fit_start", _norm)
_logged_in("on_validation_batch_end", _norm, on_step=True)


@idiom("hook_log")
def the_end(plan: Plan) -> None:
    plan.on("on_train_end", lambda self: self.logger.log_metrics({"end": float(_norm(self))}))


@idiom("hook_log")
def one_name_in_two_hooks(plan: Plan) -> None:
    plan.step.append(lambda self, loss, *_: self.log("shared", _scalar(loss), on_step=False, on_epoch=True))
    plan.on("on_train_epoch_end", lambda self: self.log("shared", 7.0))


@idiom("hook_log")
def computed_by_hand(plan: Plan) -> None:
    plan.on("__init__", lambda self: setattr(self, "by_hand", MeanMetric()))
    plan.on("validation_step", lambda self, loss, batch, batch_idx: self.by_hand.update(loss, len(batch[0])))

    def log(self: Base) -> None:
        self.log("by_hand", self.by_hand.compute())
        self.by_hand.reset()

    plan.on("on_validation_epoch_end", log)


@idiom("hook_log")
def own_log(plan: Plan) -> None:
    def log(self: Base, name: str, *arguments: Any, **options: Any) -> None:
        super(Base, self).log(f"own/{name}" if name == "of_batch" else name, *arguments, **options)

    plan.on("log", log)
    plan.step.append(lambda self, loss, batch, batch_idx: self.log("of_batch", float(batch_idx)))


@idiom("hook_log")
def best_so_far(plan: Plan) -> None:
    plan.on("__init__", lambda self: setattr(self, "best", MaxMetric()))

    def log(self: Base) -> None:
        self.best(self.net(torch.ones(1, 4, device=self.device)).sum())
        self.log("best", self.best.compute())

    plan.on("on_validation_epoch_end", log)


@idiom("hook_log")
def follows_metrics(plan: Plan) -> None:
    plan.on("validation_step", lambda self, loss, *_: self.log("val_followed", loss))
    plan.on(
        "on_validation_epoch_end",
        lambda self: self.log("doubled", 2 * self.trainer.callback_metrics["val_followed"]),
    )


@idiom("hook_log")
def outputs_kept(plan: Plan) -> None:
    plan.on("__init__", lambda self: setattr(self, "kept", []))
    plan.on("validation_step", lambda self, loss, *_: self.kept.append(loss))
    plan.alone = plan.alone or "outputs are a rank's"

    def log(self: Base) -> None:
        self.log("of_kept", torch.stack(self.kept).mean())
        self.kept.clear()

    plan.on("on_validation_epoch_end", log)


# --- modes -----------------------------------------------------------------------------------------------------------


def _modes(name: str, hook: str, change: Hook) -> None:
    def call(self: Base, *_: Any) -> None:
        change(self)

    listed("mode", name, lambda plan: plan.on(hook, call))


def _norms_frozen(self: Base, *_: Any) -> None:
    for each in self.modules():
        if isinstance(each, (nn.BatchNorm1d, nn.LayerNorm, nn.Tanh, Doubling)):
            each.eval()


def _teacher(self: Base) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        self.teacher = nn.Sequential(nn.Linear(4, 2), Doubling()).eval()
    self.teacher.requires_grad_(False)


for _name in ("__init__", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"):
    _modes(f"norms_in_{_name.strip('_')}", _name, _norms_frozen)
_modes("layer_in_init", "__init__", lambda self: next(iter(self.net.children()), self.net).eval())
_modes("net_in_init", "__init__", lambda self: self.net.eval())
_modes("net_in_train_start", "on_train_start", lambda self: self.net.eval())
_modes("all_in_train_start", "on_train_start", lambda self: self.eval())
_modes(
    "all_by_epoch", "on_train_epoch_start", lambda self: self.train(self.trainer.current_epoch % 2 == 0) is None or None
)
_modes("after_validation", "on_validation_end", _norms_frozen)
_modes("in_validation", "on_validation_start", lambda self: self.net.train())
_modes("own_eval", "on_validation_model_eval", lambda self: self.net.eval())
_modes("own_train", "on_validation_model_train", lambda self: self.train())
_modes("neither_eval", "on_validation_model_eval", lambda self: None)


@idiom("mode")
def teacher(plan: Plan) -> None:
    plan.on("__init__", _teacher)
    plan.step.append(
        lambda self, loss, batch, _: (
            loss + (self.teacher(batch[0]) - self.net(batch[0])).square().mean()
            if isinstance(loss, Tensor) and loss.requires_grad
            else None
        )
    )


@idiom("mode")
def eval_within_a_step(plan: Plan) -> None:
    def look(self: Base, loss: Any, batch: Batch, batch_idx: int) -> None:
        self.net.eval()
        with torch.no_grad():
            self.log("train_in_eval", nn.functional.mse_loss(self.net(batch[0]), batch[1]))
        self.net.train()

    plan.step.append(look)


def _first_trains(self: Base, trains: bool) -> None:
    next(iter(self.net.parameters())).requires_grad_(trains)


@idiom("mode")
def frozen_parameters(plan: Plan) -> None:
    plan.on("__init__", lambda self: _first_trains(self, False))


@idiom("mode")
def unfrozen_later(plan: Plan) -> None:
    plan.on("__init__", lambda self: _first_trains(self, False))
    plan.on("on_train_epoch_start", lambda self: _first_trains(self, self.trainer.current_epoch > 0))


@idiom("mode")
def inputs_changed(plan: Plan) -> None:
    plan.on(
        "on_after_batch_transfer",
        lambda self, batch, dataloader_idx: (batch[0] * 2, batch[1]) if self.trainer.training else batch,
    )


# --- data and trainer ------------------------------------------------------------------------------------------------


def _data(name: str, **changed: Any) -> None:
    def change(plan: Plan) -> None:
        for key, value in changed.items():
            setattr(plan, key, value)

    listed("data", name, change)


def _as_lists(samples: list[Batch]) -> Batch:
    return torch.stack([each for each, _ in samples]) + 0.5, torch.stack([each for _, each in samples])


_data("usual")
_data("rest", train=(28, {"batch_size": 8}))
_data("rest_dropped", train=(28, {"batch_size": 8, "drop_last": True}))
_data("one_batch", train=(8, {"batch_size": 8}))
_data("five_batches", train=(40, {"batch_size": 8}))
_data("val_rest", val=[(20, {"batch_size": 8})])
_data("val_rest_of_one", val=[(17, {"batch_size": 8})])
_data("val_rest_dropped", val=[(20, {"batch_size": 8, "drop_last": True})])
_data("two_sets", val=[(16, {"batch_size": 8}), (12, {"batch_size": 8})])
_data("two_sets_alike", val=[(8, {"batch_size": 8}), (8, {"batch_size": 4})])
_data("own_collate", train=(24, {"batch_size": 8, "collate_fn": _as_lists}))
_data("no_validation", val=[])
_data("one_sample", val=[(1, {"batch_size": 8})])


def _trainer(name: str, **options: Any) -> None:
    listed("trainer", name, lambda plan: plan.trainer.update(options))


_trainer("usual_")
_trainer("every_second_logged", log_every_n_steps=2)
_trainer("every_fourth_logged", log_every_n_steps=4)
_trainer("accumulation", accumulate_grad_batches=2)
_trainer("accumulation_of_three", accumulate_grad_batches=3)
_trainer("half_epochs", val_check_interval=0.5)
_trainer("by_two_batches", val_check_interval=2)
_trainer("second_epochs", check_val_every_n_epoch=2)
_trainer("few_train", limit_train_batches=2)
_trainer("few_val", limit_val_batches=1)
_trainer("no_sanity", num_sanity_val_steps=0)
_trainer("all_sanity", num_sanity_val_steps=-1)
_trainer("four_steps", max_steps=4)
_trainer("overfit", overfit_batches=1)
_trainer("one_epoch", max_epochs=1)
_trainer("clipped", gradient_clip_val=0.2)


# --- callbacks -------------------------------------------------------------------------------------------------------


def _callback(name: str, make_callback: Callable[[], Callback], alone: str = "") -> None:
    def change(plan: Plan) -> None:
        plan.callbacks.append(make_callback)
        plan.alone = plan.alone or alone

    listed("callback", name, change)


class Logs(Callback):
    """Logs by the module."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("of_callback", float(trainer.global_step))

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("val_of_callback", 2.0)


class Reads(Callback):
    """Keeps metrics as it sees them."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.keep(trainer, pl_module, "batch")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.keep(trainer, pl_module, "validation")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.keep(trainer, pl_module, "epoch")

    def keep(self, trainer: Any, pl_module: Any, name: str) -> None:
        found = {key: float(value) for key, value in trainer.callback_metrics.items()}
        pl_module.seen["metrics"].append([f"callback of {name}", found])


class Outputs(Callback):
    """Keeps the outputs of steps."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if isinstance(outputs, dict):
            found = {key: float(value) for key, value in outputs.items()}
            pl_module.seen["metrics"].append(["outputs", found])


class Stops(Callback):
    """Stops in the first epoch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = trainer.global_step >= 2


class Freezes(Callback):
    """Freezes a layer's mode when training starts."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        next(iter(pl_module.net.children()), pl_module.net).eval()


class Measures(Callback):
    """Measures something that only callbacks know."""

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.callback_metrics["measured"] = torch.tensor(float(trainer.current_epoch))


@idiom("callback")
def summary(plan: Plan) -> None:
    plan.on("__init__", lambda self: setattr(self, "example_input_array", torch.zeros(2, 4)))
    plan.on("forward", lambda self, inputs: self.net(inputs))
    plan.callbacks.append(ModelSummary)


_callback("logs", Logs)
_callback("measures", Measures)
_callback("reads", Reads)
_callback("outputs", Outputs, "a step's outputs are a rank's")
_callback("stops", Stops)
_callback("freezes", Freezes)
_callback("early_by_validation", lambda: EarlyStopping("val_loss", patience=1, min_delta=0.05))
_callback("early_by_training", lambda: EarlyStopping("train_loss", patience=1, min_delta=0.05))
_callback("early_by_epoch", lambda: EarlyStopping("train_both_epoch", patience=1, min_delta=0.05))
_callback("early_without", lambda: EarlyStopping("nothing", strict=False))

# What Lightning itself does not take, and so seldom belongs into a module.
WRONG = {
    *("nothing", "own_reduction", "vector", "text", "twice_differently", "forgets_the_closure", "a_vector"),
    *("on_train_epoch_end_on_step", "on_validation_end", "on_train_end", "on_fit_start"),
}
# What Lightning does not take beside manual optimization.
NOT_MANUAL = {"accumulation", "accumulation_of_three", "clipped", "lbfgs"}
# A hook that logs between two calls of `log` in one batch, within a manual step or between two calls of a closure, has
# Lightning forget, in the first batch of an epoch, what the step has logged before it. And where some batches have no
# step of an optimizer, it logs the hook's value of an earlier batch again.
IN_BETWEEN = tuple(
    f"hook_log.{hook}"
    for hook in ("on_before_optimizer_step", "on_before_zero_grad", "on_before_backward", "on_after_backward")
)
SEVERAL_TIMES = {"manual.manual_norm_is_logged", "manual.manual_steps_by_batches", "manual.manual_clipping_of_torch"}
SEVERAL_TIMES |= {"stepping.sharpness_aware", "optimizer.lbfgs"}
# --- as Lightning trains them ----------------------------------------------------------------------------------------


class Points_(L.pytorch.loggers.logger.DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.points.append((step or 0, {name: float(value) for name, value in metrics.items()}))
