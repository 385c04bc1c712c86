"""An optimizer step of a module written for Lightning, its hooks called in Lightning's order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ddp_recipes.data.loader import Batch
from ddp_recipes.errors import RunFailed
from ddp_recipes.runtime.phases import ALL_REDUCE, CALLS, phase
from ddp_recipes.runtime.seeding import seed_torch, step_key
from ddp_recipes.training.guards import Losses, of_rows
from ddp_recipes.training.metrics import mean_loss
from ddp_recipes.training.state import Run, Update
from ddp_recipes.training.update import MicroBatch, clip_unscaled, micro_batches, needs_closure, of_step, rate

if TYPE_CHECKING:
    from ddp_recipes.lightning.adapter import LightningTask


def automatic(task: LightningTask, run: Run, batches: Iterator[Batch], measured: bool) -> Update:
    """Take an optimizer step as the loop does; the module may have a say in each part of it."""
    plan = run.train.plan
    numbers, samples = of_step(run)
    total = sum(
        run.strategy.takes_empty or plan.size(number, shard) > 0 for number in numbers for shard in run.train.shards
    )
    lr = rate(run)
    if not total:  # no backward pass will clear those of the step before
        CALLS.zero_grad(run.optimizer)
    passes = micro_batches(run, batches, numbers, samples)
    closure = Closure(task, run, passes, numbers, samples)
    optimizer = SteppedOptimizer(task, run, run.optimizer, measured)
    if task.in_shards:
        _begin_shards(task, run, numbers)
    for number, each in enumerate(passes, start=1):
        each = task.begin_batch(each)
        if run.trainer.accumulate_grad_batches > 1:  # each batch counts alike in Lightning, also in a rest
            weight = each.batch.num_samples * run.strategy.divisor / plan.size(each.batch.number)
            each = each._replace(weight=weight / run.trainer.accumulate_grad_batches)
            closure.batches.clear()  # no batch is computed anew
        closure.batches.append(each)
        if number < total:
            closure.forward_backward(each)
            if not task.in_shards:
                if run.strategy.takes_empty:  # else some ranks may be here less often
                    task.events.follow()
                task.end_batch()
        else:
            _step(task, run, optimizer, closure)
    if not total:  # no sample of this step is on this rank, but its parameters change all the same
        task.pass_over(numbers[-1])
        _step(task, run, optimizer, closure)
    for number in numbers if task.in_shards else ():
        task.enter_shards(number)
        if number != numbers[-1]:  # which ends with the step
            task.end_batch()
    return Update(closure.losses, samples, optimizer.norm, lr)


def _begin_shards(task: LightningTask, run: Run, numbers: range) -> None:
    """Say that a step's batches begin, which are computed in shards: once each, as often on any number of ranks."""
    run.generators.end(run.cursor.step)  # what hooks draw is the same on all ranks
    for number in numbers:
        task.begin_shards(number)


def _step(task: LightningTask, run: Run, optimizer: SteppedOptimizer, closure: Closure) -> None:
    """Step the optimizer, which calls the closure first; the module may do it by itself.

    Raises:
        RunFailed: it does not call the closure.
    """
    if "optimizer_step" in task.hooks.own:
        task.hooks.of_module("optimizer_step", task.trainer.epoch, task.batch_idx, optimizer, closure)
    else:
        optimizer.step(closure)
    if not closure.calls:
        raise RunFailed(
            f"{type(task.model).__name__}.optimizer_step calls neither optimizer_closure() nor "
            f"optimizer.step(closure=optimizer_closure), so nothing is computed. Lightning asks for one of them."
        )


class Closure:
    """What Lightning calls the closure: computes the gradients of a step, for the weights as they are then.

    The first call ends what has begun with the batches before. Another one computes all of it anew.

    Attributes:
        batches: those of this rank that the step has taken so far.
        losses: of each shard, by the first call.
    """

    def __init__(
        self, task: LightningTask, run: Run, passes: Iterator[MicroBatch], numbers: range, samples: int
    ) -> None:
        self.task, self.run, self.passes, self.numbers, self.samples = task, run, passes, numbers, samples
        self.batches: list[MicroBatch] = []
        self.losses: list[Losses] = [[] for _ in run.train.shards]
        self.calls = 0
        self._precision = _Backward(task, run)

    def __call__(self, *_: Any, **__: Any) -> Tensor | None:
        """Compute gradients; return the loss, over all ranks if the optimizer looks at it."""
        self.calls += 1
        with torch.enable_grad():
            if self.calls == 1:
                losses = self.losses
                if self.batches:
                    self.forward_backward(self.batches[-1])
                next(self.passes, None)  # there is none: the context of the last shard ends
            else:
                losses = self._again()
        with phase(ALL_REDUCE):
            self.run.strategy.reduce()
        if needs_closure(self.run.optimizer):  # and goes on by the loss: the same one on all ranks
            return mean_loss(self.run, losses, self.samples)
        return losses[-1][-1][0] if losses[-1] else None

    def forward_backward(self, each: MicroBatch, losses: list[Losses] | None = None) -> None:
        """Add the gradients of a batch."""
        run = self.run
        with of_rows(run.strategy, run.train, "train", each.batch):
            loss = run.strategy.training_step(run.module, each.batch.data, each.weight, each.last, self._precision)
        (self.losses if losses is None else losses)[each.shard].append((loss, each.batch.num_samples))

    def _again(self) -> list[Losses]:
        run, task = self.run, self.task
        if run.trainer.accumulate_grad_batches > 1:
            raise RunFailed(
                f"{type(task.model).__name__} calls its closure more than once in a step, and with "
                f"trainer.accumulate_grad_batches={run.trainer.accumulate_grad_batches} a second call would compute "
                f"the last batch alone. Set trainer.accumulate_grad_batches=1."
            )
        self._precision.first = True
        losses: list[Losses] = [[] for _ in run.train.shards]
        by_place = {each.shard: each for each in self.batches}
        for place, shard in enumerate(run.train.shards):
            seed_torch(step_key(run.seed, run.cursor.step, shard), run.devices)
            size = sum(run.train.plan.size(number, shard) for number in self.numbers)
            with run.strategy.batch_shard(size / self.samples):
                if place in by_place:
                    task.batch = by_place[place].batch.data
                    self.forward_backward(by_place[place], losses)
        return losses


class _Backward:
    """The run's precision, with the hooks around a backward pass."""

    def __init__(self, task: LightningTask, run: Run) -> None:
        self.task, self.run = task, run
        self.first = True  # of the step: gradients of the one before are still there

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return self.run.precision.forward()

    def backward(self, loss: Tensor) -> None:
        """Clear the gradients of the step before, then run backward."""
        hooks, optimizer = self.task.hooks, self.run.optimizer
        if self.first:
            self.first = False
            hooks("on_before_zero_grad", optimizer)
            if "optimizer_zero_grad" in hooks.own:
                hooks.of_module("optimizer_zero_grad", self.task.trainer.epoch, self.task.batch_idx, optimizer)
            else:
                CALLS.zero_grad(optimizer)
        hooks("on_before_backward", loss)
        if "backward" in hooks.own:
            hooks.of_module("backward", loss)
        else:
            self.run.precision.backward(loss)
        hooks("on_after_backward")


def manual(task: LightningTask, run: Run, batches: Iterator[Batch], measured: bool) -> Update:
    """Let the module run backward, for the gradients of all ranks, and step its optimizers."""
    lr = rate(run)
    losses: list[Losses] = [[]]
    numbers, samples = of_step(run)
    for each in micro_batches(run, batches, numbers, samples):
        each = task.begin_batch(each)
        run.strategy.send_buffers(task)
        task.weight = each.weight / run.strategy.divisor
        # Optimizers step in between, so what autocast has cast for one forward pass is old in the next.
        with run.precision.forward(cached=False), of_rows(run.strategy, run.train, "train", each.batch):
            loss = task.training_step(each.batch.data).loss
        if loss.dim() == 0:
            losses[0].append((loss.detach(), each.batch.num_samples))
    return Update(losses if losses[0] else [], samples, None, lr)


def backward(task: LightningTask, loss: Tensor, *arguments: Any, **options: Any) -> None:
    """Run backward in manual optimization, and add to the gradients those of all ranks. A collective."""
    run = task.trainer.run
    assert run is not None
    several = run.world.world_size > 1
    trained = [parameter for parameter in task.parameters() if parameter.requires_grad] if several else []
    before = [parameter.grad for parameter in trained]
    for parameter in trained:
        parameter.grad = None
    task.summed.inside = True
    try:
        if "backward" in task.hooks.own:
            task.hooks.of_module("backward", loss, *arguments, **options)
        else:
            loss.backward(*arguments, **options)  # type: ignore[no-untyped-call]
    finally:
        task.summed.inside = False
    if several:
        with phase(ALL_REDUCE):
            _sum_gradients(run, trained)
        for parameter, former in zip(trained, before, strict=True):
            if former is not None:
                parameter.grad = former if parameter.grad is None else former.add_(parameter.grad)


def _sum_gradients(run: Run, parameters: Sequence[nn.Parameter]) -> None:
    """Leave each gradient's sum over ranks, also on a rank that does not use the parameter. Collectives."""
    mine = [[each.grad is not None, each.grad is not None and each.grad.is_sparse] for each in parameters]
    anywhere = run.strategy.sum(torch.tensor([mine], dtype=torch.int64, device=run.devices[0])).tolist()
    kinds: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
    for parameter, (ranks, sparse) in zip(parameters, anywhere, strict=True):
        if ranks:
            kinds.setdefault((parameter.dtype, sparse == ranks), []).append(parameter)
    for (_, sparse), alike in kinds.items():
        rows = [_with_places(each) if sparse else _dense(each) for each in alike]
        summed = run.strategy.sum(torch.cat([each.flatten() for each in rows])[None])
        for parameter, flat, row in zip(alike, torch.split(summed, [each.numel() for each in rows]), rows, strict=True):
            total = flat.view_as(row)
            parameter.grad = _sparse(total, parameter) if sparse else total


def _dense(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().to_dense()


def _with_places(parameter: nn.Parameter) -> Tensor:
    """Return a gradient of some rows with a column that says which, [rows, columns + 1]."""
    given = parameter.new_zeros(len(parameter), 1)
    if parameter.grad is not None:
        given[parameter.grad.coalesce().indices()[0]] = 1
    return torch.cat([_dense(parameter).view(len(parameter), -1), given], dim=1)


def _sparse(total: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return the rows that any rank has given, as the sparse gradient that optimizers such as ``SparseAdam`` need."""
    rows = total[:, -1].nonzero()[:, 0]
    values = total[rows, :-1].view(-1, *parameter.shape[1:])
    unchecked = False  # said, or torch warns
    return torch.sparse_coo_tensor(rows[None], values, parameter.shape, is_coalesced=True, check_invariants=unchecked)


class Summed:
    """Whether the gradients of manual optimization are those of all ranks: not of ``loss.backward()`` by itself.

    Attributes:
        inside: whether the backward pass under way is one of ``self.manual_backward``.
        pending: parameters with gradients that their optimizer has not stepped with yet.
    """

    def __init__(self) -> None:
        self.inside = False
        self.pending: set[nn.Parameter] = set()
        self._complete = True
        self._hooked: set[nn.Parameter] = set()

    def watch(self, module: nn.Module) -> None:
        """Notice backward passes over these parameters."""
        for parameter in module.parameters():
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked.add(parameter)
                parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    def _note(self, parameter: nn.Parameter) -> None:
        self._complete &= self.inside
        self.pending.add(parameter)

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the gradients with which an optimizer has stepped from those that are pending."""
        for group in optimizer.param_groups:
            self.pending.difference_update(group["params"])

    def check(self, owner: str, ranks: int) -> None:
        """Refuse a step with gradients of one rank, of several.

        Raises:
            RunFailed: a backward pass was run by itself.
        """
        if ranks > 1 and not self._complete:
            raise RunFailed(
                f"{owner} calls loss.backward() by itself, so ranks would step with gradients of their own. Call "
                f"self.manual_backward(loss), as Lightning asks for."
            )


class SteppedOptimizer:
    """An optimizer as a module steps it: by Lightning's hooks, with the gradients of all ranks."""

    def __init__(self, task: LightningTask, run: Run, optimizer: torch.optim.Optimizer, measured: bool = False) -> None:
        self._task, self._run, self.optimizer, self._measured = task, run, optimizer, measured
        self.norm: Tensor | None = None  # of the gradients before they were clipped

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.optimizer)  # for isinstance, as modules and torch's schedulers ask

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Let a backward pass give gradients to this optimizer's parameters alone."""
        module: Any = self._task.model
        module.toggle_optimizer(self)
        yield
        module.untoggle_optimizer(self)

    def step(self, closure: Any = None, **options: Any) -> Any:
        """Step, after the closure and the hooks of a step."""

        def computed() -> Any:
            with torch.enable_grad():
                return None if closure is None else closure()

        def gradients() -> Any:
            result = computed()
            self._prepare()
            return result

        if self._computes_once:
            result = computed()
            with phase("optimizer"):
                self._prepare()
                self._step(None, options)
        else:
            with phase("optimizer"):
                result = self._step(gradients, options)
        self._task.trainer.steps += self._task.manual
        self._task.summed.settle(self.optimizer)
        return result

    @property
    def _computes_once(self) -> bool:
        """Whether it begins with the gradients, as torch's do, so that these are phases of their own in a profile."""
        return type(self.optimizer).__module__.startswith("torch.optim.") and not needs_closure(self.optimizer)

    def _step(self, gradients: Callable[[], Any] | None, options: Mapping[str, Any]) -> Any:
        if not self._task.manual:
            return self._run.precision.step(self.optimizer, gradients, **options)
        return self.optimizer.step(**options) if gradients is None else self.optimizer.step(gradients, **options)

    def _prepare(self) -> None:
        task, run = self._task, self._run
        if task.manual:
            task.summed.check(f"{type(task.model).__name__}.training_step", run.world.world_size)
        else:
            run.precision.unscale(self.optimizer)
        task.hooks("on_before_optimizer_step", self.optimizer)
        if not task.manual:
            self.norm = self._clip()

    def _clip(self) -> Tensor | None:
        """Clip as the module says, else as configured; return the norm before that, if it was measured."""
        task, run = self._task, self._run
        if "configure_gradient_clipping" not in task.hooks.own:
            return clip_unscaled(run, self._measured)
        limit, algorithm = run.trainer.gradient_clip_val, run.trainer.gradient_clip_algorithm
        gradients = [p.grad for group in run.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = run.strategy.norm(gradients) if self._measured else None
        task.hooks.of_module("configure_gradient_clipping", run.optimizer, limit, algorithm)
        return norm
