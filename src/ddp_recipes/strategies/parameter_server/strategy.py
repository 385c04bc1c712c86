"""Workers send gradients; servers hold the parameters and the optimizer's state."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_recipes._compat.messages import timed_out
from ddp_recipes._compat.torch_ import laid_out_as
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.phases import ALL_REDUCE, phase
from ddp_recipes.runtime.process import lines
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies.base import Passes, Whole, Wrapped, parameters_in, states_in_order
from ddp_recipes.strategies.collectives import gather
from ddp_recipes.strategies.group import Group
from ddp_recipes.strategies.parameter_server.server import (
    ANY,
    ASK,
    DEAL,
    GRADIENTS,
    SUM,
    WEIGHTS,
    Push,
    Served,
    Server,
    copy,
    deal,
)
from ddp_recipes.strategies.parameter_server.settings import ParameterServerSettings
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.written import Watch


class ParameterServer(Whole, Group):
    """The first ranks serve, the others work.

    All go through the same loop. A worker gets weights before each shard of a batch and sends its gradients after it,
    so its optimizer finds none. A server's finds those of the parameters that it holds, of as many shards as a step
    has. Ranks send each other single messages, not collectives: so the others can go on when a worker dies.
    """

    settings: ParameterServerSettings

    def __init__(self, settings: ParameterServerSettings) -> None:
        self.settings = settings
        self.server: Server | None = None  # of this rank, if it serves
        self.served: list[Served] = []  # by server
        self.pushes: list[Push] = []  # of this rank to each server, if it works
        self.working = False  # on the shard that the loop is at
        self.at, self.mine = 0, -1  # the shard, of those of all workers, that the loop is at; the one dealt to this one

    @property
    def workers(self) -> range:
        """Their ranks."""
        return range(self.settings.servers, self.world.world_size)

    @property
    def divisor(self) -> int:
        """A server averages over workers."""
        return len(self.workers)

    def check(self, task: Task, devices: Sequence[torch.device]) -> None:
        """Refuse what cannot be sent, or what gathers among all ranks by itself."""
        for name, module in task.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                raise RequestError(
                    f"strategy=parameter_server sends dense gradients, but those of {name} are sparse. Make it with "
                    f"sparse=False, or use strategy=ddp."
                )
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                raise RequestError(
                    f"strategy=parameter_server sends parameters and buffers, and a {type(module).__name__} saves more "
                    f"(get_extra_state), which servers would evaluate and save as it was made. Keep it in a buffer, or "
                    f"use strategy=ddp."
                )
        if self.settings.asynchronous and task.stateful_metrics:
            raise RequestError(
                f"strategy.staleness={self.settings.staleness} does not go with metrics of torchmetrics "
                f"({', '.join(task.stateful_metrics)}): they gather among all ranks, of which some may have died. Use "
                f"strategy.staleness=0, or functions that return a value a sample."
            )
        if self.settings.asynchronous and task.weighs:
            raise RequestError(
                f"task.loss is a mean over targets that count, or by weights of classes, which all workers of a step "
                f"would have to add up, and with strategy.staleness={self.settings.staleness} each takes its own. Set "
                f"task.mean_over=samples, or strategy.staleness=0."
            )

    def setup(
        self, world: World, messages: Messages | None, backend: str, timeout: timedelta, init_method: str | None
    ) -> None:
        """Join the process group; servers, whose death ends the run, have one of their own as well."""
        super().setup(world, messages, backend, timeout, init_method)
        assert messages is not None  # there are several processes
        self.messages = messages
        self.servers = cast(dist.ProcessGroup, dist.new_group(list(range(self.settings.servers))))
        if world.rank in self.workers:
            messages.set(f"lines/{world.rank}", json.dumps([*lines().values()]))

    def shard(self, task: Task, devices: Sequence[torch.device]) -> None:
        """Deal the parameters to the servers."""
        self.served = deal(task, self.settings.servers)
        if self.world.rank in self.workers:
            self.pushes = [Push(served) for served in self.served]
            return
        served, staleness = self.served[self.world.rank], self.settings.staleness
        found = {worker: self._line(worker) for worker in self.workers}
        self.server = Server(self.world, self.workers, staleness, self.messages, served, self.timeout_s, found)

    def _line(self, worker: int) -> int | None:
        """Return the connection to a worker: its ports are those of one of the worker's, the other way around."""
        text = self.messages.get(f"lines/{worker}", self.timeout_s, lambda: worker in self.messages.exited())
        if text is None:
            raise RuntimeError(f"Connection closed by rank {worker}.")
        theirs = {(there, here) for here, there in json.loads(text)}
        return next((line for line, ports in lines().items() if ports in theirs), None)

    def wrap(self, task: Task, devices: Sequence[torch.device]) -> Wrapped:
        if self.server is not None:
            self.server.listen()
        self.watch = Watch(task)
        return cast(Wrapped, task)

    # --- a step

    def batch_shard(self, weight: float) -> AbstractContextManager[Any]:
        """Return the work on a shard; a server has none."""
        return nullcontext() if self.server is not None else self._work(weight)

    @contextmanager
    def _work(self, weight: float) -> Iterator[None]:
        """Get weights and send gradients, for a shard that falls to this worker."""
        shard, self.working = self.at, True
        if self.settings.asynchronous:
            if self.mine < shard:
                dist.send(torch.tensor([ANY]), 0, tag=ASK)
                dist.recv(dealt := torch.empty(1, dtype=torch.int64), 0, tag=DEAL)
                self.mine = int(dealt)
            self.working = self.mine == shard
            self.at += 1
        else:
            shard += self.workers.index(self.world.rank)
            self.at += len(self.workers)
        if self.working:
            with phase(ALL_REDUCE):
                for server in range(self.settings.servers):
                    dist.send(torch.tensor([shard]), server, tag=ASK)
                for server in range(self.settings.servers):
                    self._receive_weights(server)
        yield
        if self.working:
            with phase(ALL_REDUCE):
                for server, push in enumerate(self.pushes):
                    dist.send(push.fill(weight), server, tag=GRADIENTS)

    def _receive_weights(self, server: int) -> None:
        dist.recv(self.served[server].message, server, tag=WEIGHTS)
        self.served[server].unpack()

    def training_step(self, module: Wrapped, batch: Any, weight: float, last: bool, precision: Passes) -> Tensor:
        """Leave out what falls to another worker."""
        if not self.working:
            return torch.zeros(())
        with self.watch.one():
            return super().training_step(module, batch, weight, last, precision)

    def reduce(self) -> None:
        """Average the gradients of the next step, on the servers."""
        if self.server is None:
            return
        served = self.served[self.world.rank]
        pushes = self.server.collect()
        weight = sum(push.weight for _, push in pushes)
        for at, parameter in enumerate(served.parameters):
            gradients = [gradient for _, push in pushes if (gradient := push.gradient(at)) is not None]
            if gradients:
                mean = gradients[0] * (1 / self.divisor)  # each by itself, as ddp does
                for gradient in gradients[1:]:
                    mean += gradient * (1 / self.divisor)
                if self.settings.asynchronous:
                    mean /= weight  # shards of several steps, or fewer than all, need not make 1
                parameter.grad = laid_out_as(mean.to(parameter.device), parameter)
        for shard, push in pushes:
            if shard % len(self.workers) == 0:  # ddp takes rank 0's
                copy(served.buffers, push.buffers)

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm over all servers; workers have no gradients any more."""
        total = nn.utils.get_total_norm(gradients)
        if self.server is None or self.settings.servers == 1:
            return total
        squared = total.cpu().to(torch.float64).square()
        dist.all_reduce(squared, group=self.servers)
        return squared.sqrt().to(total)

    # --- between steps, where ranks wait for each other

    def sum(self, values: Tensor) -> Tensor:
        """Add up on rank 0, which knows who is alive."""
        total = values.sum(dim=0).cpu()
        if self.world.is_main:
            for rank in self._others():
                value = torch.empty_like(total)
                if self._exchange(dist.recv, value, rank, SUM):
                    total += value
            for rank in self._others():
                self._exchange(dist.send, total, rank, SUM)
        else:
            dist.send(total, 0, tag=SUM)
            dist.recv(total, 0, tag=SUM)
        return total.to(values.device)

    def sync_buffers(self, task: Task) -> None:
        """Give every rank the weights and buffers that servers hold."""
        for server, served in enumerate(self.served):
            if server != self.world.rank:
                self._receive_weights(server)
                continue
            weights = served.pack()
            for rank in self._others():
                self._exchange(dist.send, weights, rank, WEIGHTS)

    def weights(self, task: Task) -> dict[str, Tensor]:
        """Return the servers' weights."""
        self.sync_buffers(task)
        return task.weights()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Gather the servers' on rank 0."""
        state = optimizer.state_dict()
        if self.server is None or self.settings.servers == 1:
            return state
        gathered = gather(state["state"], self.servers)
        merged = {at: value for of_server in gathered or () for at, value in of_server.items()}
        return {**state, "state": states_in_order(merged)}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Take what belongs to the parameters that this rank holds."""
        mine = set() if self.server is None else {id(each) for each in self.served[self.world.rank].parameters}
        elsewhere = {at for at, parameter in enumerate(parameters_in(optimizer)) if id(parameter) not in mine}
        held = {at: value for at, value in state["state"].items() if at not in elsewhere}
        super().load_optimizer_state(optimizer, {**state, "state": held})

    def _others(self) -> list[int]:
        """Return the other servers and the living workers, for a server."""
        assert self.server is not None
        return [rank for rank in (*range(self.settings.servers), *self.server.living) if rank != self.world.rank]

    def _exchange(self, call: Callable[..., object], tensor: Tensor, rank: int, tag: int) -> bool:
        """Send to a rank or receive from it; return whether it is there, and not a worker that died."""
        try:
            call(tensor, rank, tag=tag)
            return True
        except RuntimeError as error:
            if self.server is None or rank not in self.workers or timed_out(error):
                raise
            self.server.go_on_without(rank)
            return False
