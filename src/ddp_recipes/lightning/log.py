"""What a module logs by ``self.log``: of a step, and of an epoch."""

import json
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_recipes._compat.lightning import batch_value
from ddp_recipes.devices import sum_dtype
from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.lightning.hooks import OF_EVALUATION, OF_STEP
from ddp_recipes.strategies.base import by_rank
from ddp_recipes.tasks import RunContext
from ddp_recipes.tasks.metrics import is_stateful
from ddp_recipes.training.metrics import agree_on_states

_REDUCTIONS = ("mean", "sum", "min", "max")
_BEFORE = -1, 0  # the number and part of a batch of an earlier start
_NAMES: dict[Any, str] = {
    "avg": "mean",
    **{torch.mean: "mean", torch.sum: "sum", torch.min: "min", torch.max: "max"},
    **{sum: "sum", min: "min", max: "max"},
}


class Key(NamedTuple):
    """The identity of a logged value: a name in a hook; the same name in another hook is another key.

    Attributes:
        of_set: what follows the name where several data sets are evaluated.
        reduction: of the values of an epoch to one.
        is_metric: whether it is an object of torchmetrics, computed at the end of an epoch.
        alone: whether each rank has a value of its own, of which rank 0's is logged (``rank_zero_only``).
    """

    hook: str
    name: str
    of_set: str
    on_step: bool
    on_epoch: bool
    reduction: str
    is_metric: bool = False
    alone: bool = False

    @property
    def plain(self) -> str:
        """The name that was given."""
        return f"{self.name}{self.of_set}"

    @property
    def of_step(self) -> str:
        """The name of a step's value."""
        return f"{self.name}_step{self.of_set}" if self.on_epoch else self.plain

    @property
    def of_epoch(self) -> str:
        """The name of an epoch's value."""
        return f"{self.name}_epoch{self.of_set}" if self.on_step else self.plain


class Values(NamedTuple):
    """Numbers by name: as loggers get them, and as callbacks ask for them."""

    logged: dict[str, float]
    measured: dict[str, float]


class Total:
    """The mean, sum, least or greatest of values, over this rank's steps and over all ranks.

    Attributes:
        batch: the number of the batch that the values are of, where they are of one.
    """

    def __init__(self, reduction: str) -> None:
        self.reduction, self.batch = reduction, 0
        self.value: Tensor | None = None  # of this rank; a mean's is the sum of value times weight
        self.weight = 0.0

    def add(self, value: Tensor, weight: float) -> None:
        """Take one more value."""
        self.merge(value * weight if self.reduction == "mean" else value, weight)

    def result(self) -> float | None:
        """Return what it came to; ``None`` where there was no value."""
        if self.value is None or self.weight == 0:
            return None
        return self.value.item() / (self.weight if self.reduction == "mean" else 1)

    def merge(self, value: Tensor, weight: float) -> None:
        """Take the value of another total; one without weight does not count."""
        if self.value is None or self.weight == 0:
            self.value = value
        elif weight == 0:
            return
        elif self.reduction in ("mean", "sum"):
            self.value = self.value + value
        else:
            self.value = (torch.minimum if self.reduction == "min" else torch.maximum)(self.value, value)
        self.weight += weight


@dataclass
class Entry:
    """The values that were logged by one key.

    Attributes:
        steps: the values of the latest steps, by number and part of the batch, with the samples that each counts for.
        metric: of torchmetrics.
        computed: what that came to, once it was asked for.
        read: whether those of the steps were.
    """

    key: Key
    of_epoch: Total
    steps: dict[tuple[int, int], tuple[Tensor, float]] = field(default_factory=dict)
    metric: Any = None
    computed: float | None = None
    read: bool = False

    def of_step(self, which: Any = None) -> Total:
        """Return the total of the latest steps, or of those with a number."""
        total = Total(self.key.reduction)
        for step, (value, weight) in self.steps.items():
            if which is None or step[0] == which:
                total.add(value, weight)
                total.batch = step[0]
        return total

    def add_step(self, step: tuple[int, int], value: Tensor, weight: float, replaces: bool) -> None:
        """Take the value of a step; where it ``replaces``, as in training, those of the latest batch alone stay."""
        if replaces and self.steps:
            latest = next(iter(self.steps))[0]
            if step[0] < latest:
                return
            if step[0] > latest:
                self.steps = {}
        self.steps[step], self.read = (value, weight), False


def reduced(totals: Iterable[Total], context: RunContext) -> list[Total]:
    """Return them over all ranks, which have the same totals in the same order. A collective; it waits once.

    A rank without a value does not count, nor does one whose value is of an earlier batch.
    """
    totals = list(totals)
    if not totals:
        return []
    device = context.devices[-1]
    zero = torch.zeros((), dtype=sum_dtype(device), device=device)
    mine = [
        torch.stack([zero if each.value is None else each.value.to(device), zero + each.weight, zero + each.batch])
        for each in totals
    ]
    every = by_rank(torch.stack(mine), context.world, context.sum)
    found = []
    for each, rows in zip(totals, every.transpose(0, 1).cpu(), strict=True):
        total = Total(each.reduction)
        latest = max((batch for _, weight, batch in rows if weight > 0), default=None)
        for value, weight, batch in rows:
            if weight > 0 and batch == latest:
                total.merge(value, weight.item())
        found.append(total)
    return found


def everywhere(mine: Sequence[Any], context: RunContext) -> list[Any]:
    """Return what any rank has, in one order: plain data, as JSON gives it back. A collective, or two of them.

    A module may log on some ranks alone: ``if self.global_rank == 0: self.log(…)``.
    """
    if context.world.world_size == 1:
        return list(mine)
    text = json.dumps(list(mine)).encode()
    device = context.devices[0]
    told = by_rank(torch.tensor([len(text), zlib.crc32(text)], device=device), context.world, context.sum).cpu()
    if bool((told == told[0]).all()):
        return list(mine)
    letters = torch.zeros(int(told[:, 0].max()), dtype=torch.int64, device=device)
    letters[: len(text)] = torch.tensor(list(text), device=device)
    texts = by_rank(letters, context.world, context.sum).tolist()
    sizes = told[:, 0].tolist()  # 0 of those that a dry run has not
    found = [json.loads(bytes(row[:size])) for row, size in zip(texts, sizes, strict=True) if size]
    each = {json.dumps(one): one for rows in found for one in rows}
    return list(each.values())


class Log:
    """Logged values, by the names that Lightning gives them.

    Args:
        owner: the module's class, for messages.
        of_training: whether a step's value stays until there is another one or the epoch ends, as Lightning logs it
            again; else that of each step stays until it is read.
    """

    def __init__(self, owner: str, of_training: bool) -> None:
        self.owner, self.of_training = owner, of_training
        self.entries: dict[Key, Entry] = {}
        self.computed: list[Any] = []  # metrics of the epoch that are to be reset
        self.names: set[str] = set()  # all that ever came up
        self.of_steps: set[str] = set()  # those of them that have a value of each step
        self.unlogged: set[str] = set()  # those that loggers do not get
        self._asked: dict[tuple[str, str], tuple[Any, ...]] = {}  # by hook and name: how it was logged

    def key(self, hook: str, name: str, value: Any, of_set: str, reduce_fx: Any, logger: bool, **options: Any) -> Key:
        """Return the key of what is logged.

        Raises:
            RequestError: it cannot be reduced in that way, or was logged in another way before.
        """
        reduction = _NAMES.get(reduce_fx, reduce_fx)
        if reduction not in _REDUCTIONS:
            raise RequestError(
                f"{self.owner} logs {name} with reduce_fx={reduce_fx}, which cannot be done over ranks. Allowed: "
                f"{', '.join(_REDUCTIONS)}."
            )
        if not options["on_step"] and not options["on_epoch"]:
            raise RequestError(
                f"{self.owner} logs {name} in {hook} with on_step=False and on_epoch=False, so it would be logged "
                f"nowhere. Set one of them."
            )
        key = Key(hook, name, of_set, reduction=reduction, is_metric=is_stateful(value), **options)
        asked = key[3:6], logger
        if self._asked.setdefault((hook, key.plain), asked) != asked:
            raise RequestError(
                f"{self.owner} logs {name} twice in {hook}, with different arguments (on_step, on_epoch, reduce_fx, "
                f"logger). Give both the same ones, or one of them another name."
            )
        self._know(key, logger)
        return key

    def number(self, name: str, value: Any) -> Tensor:
        """Return a logged value as it is now: a module may change it later.

        Raises:
            RequestError: it is no single number.
        """
        allowed = "Allowed: a single number, or a metric of torchmetrics."
        try:
            found = torch.as_tensor(value).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise RequestError(
                f"{self.owner} logs {name}={value!r:.60}, a {type(value).__name__}. {allowed}"
            ) from error
        found = found.to(sum_dtype(found.device), copy=True)
        if found.numel() != 1:
            raise RequestError(f"{self.owner} logs {name} of shape {list(found.shape)}. {allowed}")
        return found.reshape(())

    def add(self, key: Key, value: Any, size: float, step: Any) -> None:
        """Take a value that counts for ``size`` samples; in a ``step`` the last one of a name is that step's."""
        entry = self.entries.setdefault(key, Entry(key, Total(key.reduction)))
        if key.is_metric:
            entry.metric, entry.computed = value, None
            now = batch_value(value) if key.on_step else None
            number = None if now is None else self.number(key.name, now)
        else:
            number = self.number(key.name, value)
        if number is None:
            return
        if key.on_step:
            entry.add_step(step, number, size, replaces=self.of_training)
        if key.on_epoch and not key.is_metric:
            entry.of_epoch.add(number, size)

    def latest(self, of_step: bool) -> dict[str, float]:
        """Return what was not read yet of this rank's values: of the latest step, or of the epoch so far.

        A metric that a hook has logged once its steps were over is computed, over all ranks: a collective, as in
        Lightning.
        """
        found: dict[str, float] = {}
        for key, entry in self.entries.items():
            total, name = (entry.of_step(), key.of_step) if of_step else (entry.of_epoch, key.of_epoch)
            value = None if of_step and entry.read else total.result()
            if key.is_metric and not of_step and key.hook not in OF_STEP | OF_EVALUATION:
                if entry.computed is None:
                    agree_on_states([entry.metric])
                    entry.computed = self._computed(key, entry.metric)
                value = entry.computed
            if value is not None:
                found |= {key.plain: value, name: value}
        return found

    def steps(self, context: RunContext) -> Values:
        """Return the values of the latest steps. A collective."""
        entries = self._chosen(lambda key: key.on_step, context)
        found = self._values([(key, key.of_step, entry.of_step()) for key, entry in entries], context)
        for entry in self.entries.values():
            entry.read = True
        return found

    def points(self, context: RunContext) -> list[tuple[str, int, float]]:
        """Return and forget the same for each step by itself: name, number of the step and value. A collective."""
        mine = [
            [*key, number]
            for key, entry in self.entries.items()
            for number in dict.fromkeys(step[0] for step in entry.steps)
        ]
        rows = [(Key(*row[:-1]), row[-1]) for row in everywhere(mine, context)]
        totals = [self._entry(key).of_step(number) for key, number in rows]
        for entry in self.entries.values():
            entry.steps = {}
        found = zip(rows, reduced(totals, context), strict=True)
        return [(key.of_step, number, value) for (key, number), total in found if (value := total.result()) is not None]

    def epoch(self, context: RunContext) -> Values:
        """Return the values of the epoch that were not read yet. A collective."""
        entries = self._chosen(lambda key: key.on_epoch, context)
        found = self._values([(k, k.of_epoch, e.of_epoch) for k, e in entries if not k.is_metric], context)
        metrics = [(key, e.computed, self._on_all_ranks(key, e.metric)) for key, e in entries if key.is_metric]
        agree_on_states(metric for _, _, metric in metrics)
        for key, computed, metric in metrics:
            value = self._computed(key, metric) if computed is None else computed
            found.logged[key.of_epoch] = value
            found.measured.update({key.plain: value, key.of_epoch: value})
            self.computed.append(metric)
        for key, _ in entries:
            self.entries.pop(key, None)
        return found

    def close(self) -> None:
        """End the epoch: forget it, and reset its metrics."""
        for entry in self.entries.values():
            self.computed += [] if entry.metric is None else [entry.metric]
        for metric in self.computed:
            metric.reset()
        self.entries, self.computed = {}, []

    def state(self, context: RunContext, of_step: bool = False) -> list[Any]:
        """Return what the epoch came to so far, or the values of the latest steps, over all ranks. A collective."""

        def wanted(key: Key) -> bool:
            return not key.alone and (key.on_step if of_step else key.on_epoch and not key.is_metric)

        entries = self._chosen(wanted, context)
        totals = reduced([entry.of_step() if of_step else entry.of_epoch for _, entry in entries], context)
        return [
            [*key, key.plain not in self.unlogged, total.value, total.weight]
            for (key, _), total in zip(entries, totals, strict=True)
        ]

    def load_state(self, state: Any, first: bool, of_step: bool = False) -> None:
        """Restore it: the values on the ``first`` rank alone, for they will be added up again."""
        if isinstance(state, Mapping):  # until 0.2 there were names alone
            state = [["training_step", name, "", on, True, *rest] for name, (on, *rest) in state.items()]
            state = [[*row[:6], False, False, *row[6:]] for row in state]
        for row in state:
            key, (logger, value, weight) = Key(*row[:-3]), row[-3:]
            self._know(key, logger)
            entry = self.entries.setdefault(key, Entry(key, Total(key.reduction)))
            if of_step:
                mean = key.reduction == "mean"
                entry.steps = {_BEFORE: (value / weight if mean else value, weight)} if first and weight else {}
                entry.read = True
            elif first and value is not None:
                entry.of_epoch.merge(value, weight)

    def metrics(self, names: Mapping[int, str]) -> list[list[Any]]:
        """Return which metrics were logged in the epoch so far, given the names of all by ``id``."""
        return [
            [*key, key.plain not in self.unlogged, names[id(entry.metric)]]
            for key, entry in self.entries.items()
            if key.on_epoch and id(entry.metric) in names
        ]

    def load_metrics(self, rows: Sequence[Sequence[Any]], metrics: Mapping[str, Any]) -> None:
        """Restore that: a run that goes on at the end of an epoch has no more step that logs them."""
        for row in rows:
            key, (logger, name) = Key(*row[:-2]), row[-2:]
            if name in metrics:
                self._know(key, logger)
                self.entries.setdefault(key, Entry(key, Total(key.reduction))).metric = metrics[name]

    def _know(self, key: Key, logger: bool) -> None:
        names = {key.plain, key.of_step, key.of_epoch}
        self.names |= names
        self.of_steps |= {key.plain, key.of_step} if key.on_step else set()
        self.unlogged |= set() if logger else names

    def _entry(self, key: Key) -> Entry:
        return self.entries.get(key) or Entry(key, Total(key.reduction))

    def _chosen(self, wanted: Any, context: RunContext) -> list[tuple[Key, Entry]]:
        """Return the entries of that kind that any rank has, in one order. A collective."""
        keys = everywhere([key for key in self.entries if wanted(key)], context)
        return [(key, self._entry(key)) for key in (Key(*each) for each in keys)]

    def _values(self, rows: Sequence[tuple[Key, str, Total]], context: RunContext) -> Values:
        over_ranks = iter(reduced([total for key, _, total in rows if not key.alone], context))
        found = Values({}, {})
        for key, name, mine in rows:
            value = (mine if key.alone else next(over_ranks)).result()
            if value is not None:
                found.logged[name] = value
                found.measured.update({key.plain: value, name: value})
        return found

    def _on_all_ranks(self, key: Key, metric: Any) -> Any:
        """Return a metric that was logged on all ranks, and refuse one that was not."""
        if metric is None:
            raise RunFailed(
                f"{self.owner} logs the metric {key.name} in {key.hook} on some ranks alone, and to compute it takes "
                f"all of them. Log it on each rank."
            )
        return metric

    def _computed(self, key: Key, metric: Any) -> float:
        """Return what a metric comes to over all ranks. A collective."""
        with warnings.catch_warnings():  # of a metric without an update: a rank without a sample is no mistake
            warnings.filterwarnings("ignore", "The ``compute`` method", UserWarning)
            value = metric.compute()
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise RunFailed(
                f"{self.owner} logs {key.name}, which computes to {shape}. Allowed: a single number. Ask the metric "
                f"for one, e.g. by average='macro', or log the parts of a MetricCollection by self.log_dict."
            )
        return float(value)
