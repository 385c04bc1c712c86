"""torch's FSDP2, ``fully_shard``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from ddp_recipes._compat.fsdp import (
    LEAVES,
    gradient_hooks,
    keep_assigned_data,
    leave,
    leave_graph_alone,
    refuse_rows,
    set_groups,
    tell_managed,
)
from ddp_recipes._compat.torch_ import local
from ddp_recipes.devices import HOST, beside_host, for_sums, is_accelerator
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.tensors import OwnRows, Source, digest, rows_here, take_attributes
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies.base import Exchange, Passes, T, Whole, Wrapped, in_place, parameters_in
from ddp_recipes.strategies.collectives import broadcast_each
from ddp_recipes.strategies.ddp_exact.ordered_sum import OrderedSum, sum_in_turns
from ddp_recipes.strategies.exchanges import exchanged
from ddp_recipes.strategies.fsdp.blocks import (
    blocks_of,
    explanation,
    policies_of,
    refuse_optimizers,
    refuse_parameters,
    single_numbers,
)
from ddp_recipes.strategies.fsdp.calls import Calls, gather_in_steps, set_backward
from ddp_recipes.strategies.fsdp.order import Gather, Order, OrderedReduceScatter, ReduceScatter
from ddp_recipes.strategies.fsdp.parts import Part, WholeSizes, joined, norms, own_of, own_rows
from ddp_recipes.strategies.fsdp.plan import exchange_of
from ddp_recipes.strategies.fsdp.settings import FSDPSettings
from ddp_recipes.strategies.fsdp.usage import Usage
from ddp_recipes.strategies.group import Group
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.blocks import on_copies
from ddp_recipes.tasks.written import buffers_kept


class FSDP(Whole, Group):
    """Each rank holds a part of every parameter, of its gradient and of its optimizer state (ZeRO, Rajbhandari et al.).

    With ``shards`` gradients are added in the order of the shards: what comes out are the bits of ``ddp_exact`` with as
    many, at any world size.

    A parameter that is a single number has no rows. Each rank has it, and all update it alike.
    """

    Settings = FSDPSettings
    settings: FSDPSettings
    divisor = 1
    rejoins = LEAVES
    takes_empty = True  # the others wait for this rank in the model, and a shard ends with its last batch

    def __init__(self, settings: FSDPSettings | None = None) -> None:
        self.settings = settings or FSDPSettings()
        self.parts: dict[int, Part] = {}  # by the id of what an optimizer updates
        self.blocks: list[FSDPModule] = []  # the model first
        self.reductions: list[ReduceScatter] = []
        self.ordered: list[OrderedReduceScatter] = []  # of these
        self.single: list[nn.Parameter] = []  # numbers, which each rank has
        self.wholes: OrderedSum | None = None  # of these, and of buffers
        self.group: dist.ProcessGroup  # ranks that hold a replica together
        self.passes = 0  # shards of this step that have begun
        self.last = True  # whether a pass is the last of its shard
        self.hooks: dict[str, list[Callable[[Tensor], Tensor | None]]] = {}  # of gradients, the user's
        ordered = self.settings.shards is not None
        self.order, self.usage, self.calls = Order((), ordered), Usage(ordered), Calls()

    def check(self, task: Task, devices: Sequence[torch.device]) -> None:
        """Refuse a model that cannot be dealt, and parameters beside it."""
        super().check(task, devices)
        refuse_parameters(task, blocks_of(task.model, self.settings.wrap))

    def explain(self, error: BaseException, task: Task) -> str | None:
        """Say what parameters that are not gathered, or of another dtype, come from."""
        return explanation(error, self.settings.param_dtype) or super().explain(error, task)

    def setup(
        self, world: World, messages: Messages | None, backend: str, timeout: timedelta, init_method: str | None
    ) -> None:
        """Join the process group, and set the number of threads: sums within an operation depend on it."""
        if self.settings.shards is not None and self.settings.num_threads is not None:
            torch.set_num_threads(self.settings.num_threads)
        if self.settings.offload:
            backend = beside_host(backend)  # for the rows of a rank, wherever they are
        super().setup(world, messages, backend, timeout, init_method)
        assert dist.group.WORLD is not None
        self.group = dist.group.WORLD
        if self.settings.replicas > 1:
            rows = torch.arange(world.world_size).view(self.settings.replicas, -1)
            # Groups of our own: a device mesh gives those that it makes torch's timeout, not the launcher's.
            groups: Any = [
                dist.new_subgroups_by_enumeration(each.tolist(), timeout=timeout)[0] for each in (rows, rows.T)
            ]
            self.group, self.peers = groups
        if self.blocks:
            set_groups(self.blocks, self.mesh, self._mesh(self.mesh.device_type))
            self.passes, self.usage.always, self.usage.step, self.order.known = 0, None, None, {}
            self.order.begin(step=False)
            self._set_replicas(self.peers)
            for each in self.ordered:
                each.total = None

    def _mesh(self, kind: str) -> DeviceMesh:
        """Return the ranks that the model is dealt to, and the replicas whose gradients FSDP2 adds.

        On an accelerator it does so beside the next block's. Between CPUs we do: it would wait for those of a rank that
        is lost as long as a collective may take.
        """
        if self.peers is None or self._adds_replicas(kind):
            return DeviceMesh.from_group(self.group, kind)
        rows = torch.arange(self.world.world_size).view(self.settings.replicas, -1)
        return DeviceMesh.from_group([self.peers, self.group], kind, rows, mesh_dim_names=("replicas", "shards"))

    def _adds_replicas(self, kind: str) -> bool:
        """Whether we add the gradients of replicas, not FSDP2."""
        return self.settings.shards is not None or kind == HOST

    def _set_replicas(self, peers: dist.ProcessGroup | None) -> None:
        for each in self.reductions if self._adds_replicas(self.device.type) else ():
            each.replicas = peers

    def shard(self, task: Task, devices: Sequence[torch.device]) -> None:
        """Leave this rank its rows of each parameter; the model gathers those of a block before it runs."""
        model, self.mesh, self.device = task.model, self._mesh(devices[0].type), devices[0]
        self.hooks = {name: gradient_hooks(each) for name, each in model.named_parameters() if each.dim()}
        attributes = {name: dict(vars(each)) for name, each in model.named_parameters()}
        keep_assigned_data()
        leave_graph_alone()
        refuse_rows()
        policies = policies_of(model, blocks_of(model, self.settings.wrap), self.settings.param_dtype)
        offload = CPUOffloadPolicy() if self.settings.offload and is_accelerator(devices[0]) else OffloadPolicy()
        ignored = {*single_numbers(model)}
        shard = partial(fully_shard, mesh=self.mesh, offload_policy=offload, ignored_params=ignored)
        for name, policy in policies.items():
            after = self.settings.level == 3 and name != ""  # of the model, needed first in backward
            module = model.get_submodule(name)
            deal = partial(shard, module, reshard_after_forward=after, mp_policy=policy)
            self.blocks.insert(0, self.calls.watch(module, deal))
        for name, parameter in model.named_parameters():
            vars(parameter).update(attributes[name])
        tell_managed(model, False)
        self.order.blocks = [*policies]
        set_backward(self.blocks, reduces=False, over=False, gives_back=False)
        model.register_forward_pre_hook(self._gather_anew, prepend=True)
        model.register_forward_hook(self._give_back)
        gather_in_steps(model, self._gather_anew, self._give_back)
        for number, block in enumerate(reversed(self.blocks)):
            _, own = type(block).__bases__  # the user's class, which messages name, and some models look up by its name
            type(block).__name__, type(block).__qualname__ = own.__name__, own.__qualname__
            type(block).__module__ = own.__module__
            block.set_gradient_divide_factor(1.0)  # losses are weighted
            block.set_force_sum_reduction_for_comms(True)
            if hasattr(block, "set_reduce_scatter_unused_params"):  # from torch 2.15 on; else ranks would send less
                block.set_reduce_scatter_unused_params(True)
            if self.world.world_size > 1:
                reduce = ReduceScatter(self.order, number)
                if self.settings.shards is not None:
                    reduce = OrderedReduceScatter(self.order, number)
                    self.ordered.append(reduce)
                self.reductions.append(reduce)
                block.set_custom_reduce_scatter(cast(Any, reduce))
                block.set_custom_all_gather(cast(Any, Gather(self.order, number)))
        self._set_replicas(self.peers)

    def _gather_anew(self, *_: Any) -> None:
        """Give back what an earlier call gathered, in which no backward pass did: weights may have changed."""
        for block in () if self.calls.in_step else self.blocks:
            block.reshard()

    def _give_back(self, *_: Any) -> None:
        """Give back what an evaluation gathered: no backward pass does."""
        if torch.is_grad_enabled():
            return
        for block in self.blocks:
            block.reshard()
        if not self.order.step:
            self.order.end(self.device)

    def make_optimizers(self, task: Task, make: Callable[[], T]) -> T:
        """Have them made of this rank's rows; refuse those that look at whole tensors."""
        named_ = {parameter: name for name, parameter in task.model.named_parameters()}
        parts = {parameter: Part.of(name, parameter) for parameter, name in named_.items()}
        with in_place(task, {parameter: part.own for parameter, part in parts.items()}), WholeSizes(parts.values()):
            made = make()
        refuse_optimizers(made[0], exact_on_cpu=self.settings.shards is not None and next(iter(named_)).is_cpu)
        self.parts = {id(part.own): part for part in parts.values()}
        return made

    def wrap(self, task: Task, devices: Sequence[torch.device]) -> Wrapped:
        """Return the task itself: its model has been changed in place."""
        self.task, self.single = task, single_numbers(task.model)
        if self.settings.shards is not None:
            self.wholes = OrderedSum(task, self.world, self.settings.batch_shards(self.world).count, self.single)
        names = {id(part.whole): part.name for part in self.parts.values()}
        for block in self.blocks:
            before = [*cast(nn.Module, block).parameters()]
            block.unshard()
            for sharded, parameter in zip(before, cast(nn.Module, block).parameters(), strict=True):
                take_attributes(parameter, sharded)
                if parameter.requires_grad and local(parameter) is parameter:  # not of a block inside
                    name = names[id(sharded)]
                    self.usage.watch(name, parameter)
                    for hook in self.hooks.pop(name, ()):
                        parameter.register_hook(hook)  # type: ignore[no-untyped-call]
            block.reshard()
        self.order.begin(step=False)
        return cast(Wrapped, task)

    @contextmanager
    def batch_shard(self, weight: float) -> Iterator[None]:
        """Let what the shard's backward adds up begin in a tensor of its own where a total goes on in order."""
        self.passes += 1
        if self.passes == 1:
            self.order.begin(step=True)
            self._gather_anew()
        for each in self.ordered:
            each.counts = weight > 0
        if self.ordered or self.passes == 1:  # else torch adds to what is there
            for part in self.parts.values():
                part.whole.grad = None
        with self.usage.of_shard(counts=weight > 0):
            if self.wholes is None:
                yield
                return
            self.wholes.begin()
            yield
            if not weight:
                for number in self.single:
                    number.grad = None
            self.wholes.take(weight)

    def training_step(self, module: Wrapped, batch: Any, weight: float, last: bool, precision: Passes) -> Tensor:
        """Run the task, then backward."""
        self.last = last
        with nullcontext() if weight else on_copies(self.task), self.calls.step(self.blocks):
            return super().training_step(module, batch, weight, last, precision)

    def backward(self, loss: Tensor, precision: Passes) -> None:
        """Run backward, which exchanges gradients with the last pass of a shard."""
        whole = self.settings.level == 1
        over = self.last and self.passes == self.settings.batch_shards(self.world).count
        reduces = over if whole and self.settings.shards is None else self.last
        with self.calls.backward(self.blocks, reduces, over, over or not whole):
            super().backward(loss, precision)

    def reduce(self) -> None:
        """Hand over the gradients; they are reduced in backward."""
        self.passes = 0
        self.order.end(self.device)
        self.order.begin(step=False)
        for each in self.ordered:
            each.total = None
        self.usage.agree(self.device)
        if self.wholes is not None:
            self.wholes.reduce()
        else:
            self._add_single()
            self.sync_buffers(self.task)  # as DDP does
        for part in self.parts.values():
            part.take_gradient(part.name in (self.usage.always or ()))

    @contextmanager
    def evaluation(self, task: Task) -> Iterator[None]:
        """Leave buffers as they are where they are the same on all ranks after each step."""
        tell_managed(task, True)
        try:
            with nullcontext(set[str]()) if self.settings.shards is None else buffers_kept(task) as moved:
                yield
        finally:  # also where a rank is lost meanwhile, and replaced
            tell_managed(task, False)
        self.moved |= moved

    def _add_single(self) -> None:
        """Add up the gradients of single numbers over all ranks, which have used the same ones."""
        for number in self.single if self.world.world_size > 1 else ():
            if number.grad is not None:
                exchanged(dist.all_reduce, number.grad)

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Add up the norms of whole gradients, or the squares of all parts."""
        if self.world.world_size == 1:
            return super().norm(gradients)
        mine = own_of(gradients, self.group)
        if self.settings.shards is None:
            total = nn.utils.get_total_norm(mine)
            squared = for_sums(total).square()
            exchanged(dist.all_reduce, squared, group=self.group)
            return squared.sqrt().to(torch.promote_types(total.dtype, torch.float32))
        sizes = {id(part.own.grad): part.whole.shape or [1] for part in self.parts.values()}
        found = norms(mine, [sizes[id(gradient)] for gradient in gradients], self.group)
        return nn.utils.get_total_norm([found])

    def weights(self, task: Task) -> dict[str, Tensor]:
        """Gather one parameter after the other on rank 0."""
        return {name: self._on_rank_0(value) for name, value in task.weights().items()}

    def digest(self, task: Task) -> str | None:
        """Gather one parameter at a time."""
        found = digest({name: partial(self._on_rank_0, value) for name, value in task.weights().items()})
        return found if self.world.is_main else None

    def _on_rank_0(self, value: Tensor) -> Tensor:
        own = local(value) if isinstance(value, Tensor) else value
        if own is value:
            return value
        return self._joined(own, value)

    def saved_weights(self, task: Task) -> dict[str, Tensor | OwnRows]:
        """Return this rank's rows of parameters, and buffers."""
        return {name: own_rows(local(value), value) for name, value in task.weights().items()}

    def _joined(self, own: Tensor, like: Tensor) -> Tensor:
        """Return on rank 0 the whole of what all ranks have, elsewhere their own."""
        first = self.world.rank < self.group.size()  # of the first replica
        whole = joined(own, like.shape, self.group) if first else None
        return own if whole is None else whole.cpu()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return this rank's rows of each tensor, and what is not dealt, as a count of steps."""
        return self._of_each(optimizer, optimizer.state_dict(), self._saved)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Take this rank's rows of each tensor."""
        optimizer.load_state_dict(self._of_each(optimizer, state, self._own))

    def _of_each(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], change: Callable[[Any, Part], Any]
    ) -> dict[str, Any]:
        """Return an optimizer's state, its tensors changed."""
        parameters = parameters_in(optimizer)
        changed = {
            number: {
                name: change(value, self.parts[id(parameters[number])]) if hasattr(value, "shape") else value
                for name, value in of_one.items()
            }
            for number, of_one in state["state"].items()
        }
        return {**state, "state": changed}

    def _saved(self, value: Tensor, part: Part) -> Tensor | OwnRows:
        return own_rows(value, part.whole) if value.shape == part.own.shape else value

    def _own(self, value: Tensor | Source, part: Part) -> Tensor:
        if isinstance(value, Tensor) and value.shape != part.whole.shape:
            return value
        rows = rows_here(value, part.whole)
        return rows.clone() if isinstance(value, Tensor) else rows

    def sum(self, values: Tensor) -> Tensor:
        """Add the rows of all ranks, in the order of the shards where they have one."""
        return super().sum(values) if self.settings.shards is None else sum_in_turns(self, values)

    def sync_buffers(self, task: Task) -> None:
        """Give every rank rank 0's, unless they are the same after each step."""
        if self.wholes is None and self.world.world_size > 1:
            broadcast_each(task.buffers())

    def teardown(self) -> None:
        """Drop what holds the groups as well, and what a pass that was cut off has left."""
        self.wholes = None
        if self.blocks and self.rejoins:
            leave(self.blocks, self.mesh)
        for each in self.reductions:
            each.replicas = None
        super().teardown()

    def exchange(self, task: Task, world: World) -> Exchange:
        """Return a rank's rows, what it exchanges, and passes that gather and reduce without data."""
        return exchange_of(self.settings, task, world)
