"""The protocol of strategies, and what most of them have in common."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_recipes._compat.messages import of_sparse
from ddp_recipes._compat.torch_ import BatchNorm, norm_of_each
from ddp_recipes.config.parallelism import StrategySettings
from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.phases import phase
from ddp_recipes.runtime.tensors import OwnRows, digest, put_together
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies.exchanges import Exchanges
from ddp_recipes.tasks import StepOutput, Task

T = TypeVar("T", bound=Sequence[Any])


class Wrapped(Protocol):
    """A task as the strategy wrapped it: calling it runs a training step."""

    def __call__(self, batch: Any) -> StepOutput: ...


class Passes(Protocol):
    """The numeric precision of a step, as ``trainer.precision`` sets it."""

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""

    def backward(self, loss: Tensor) -> None:
        """Run backward."""


@dataclass(frozen=True)
class Collective:
    """What a rank gives to a kind of collective, for a dry run.

    Attributes:
        kind: ``passed`` is from the first of two ranks to the other.
        bytes: each time; to a broadcast rank 0 gives them.
        ranks: that take part where rank 0 does.
        every: when it does: each batch, each optimizer step, or each step that clips by norm.
    """

    kind: Literal["all_reduced", "reduce_scattered", "scattered", "gathered", "broadcast", "passed"]
    bytes: int
    ranks: range
    every: Literal["batch", "step", "norm"] = "step"


def passes(accumulate: int) -> Sequence[AbstractContextManager[None]]:
    """Return contexts of the batches of a step that a dry run runs: a third one would only repeat the second."""
    return [nullcontext()] * min(accumulate, 2)


@dataclass(frozen=True)
class Exchange:
    """What a strategy keeps and exchanges in an optimizer step, for a dry run.

    Attributes:
        held: tensors that a rank keeps from step to step beside weights and optimizer.
        places: where in them a gradient lies at the end of a step; empty where it is a tensor of its own.
        at_once: whether a gradient is put there as soon as it is known, or once all are.
        sent: what is exchanged.
        parts: what a rank has and updates of parameters that it does not have as wholes.
        passes: from the number of batches of a step, contexts of those to run; they do what the strategy would.
    """

    held: Sequence[Tensor] = ()
    places: Mapping[nn.Parameter, Tensor] = field(default_factory=dict)
    at_once: bool = True
    sent: Sequence[Collective] = ()
    parts: Mapping[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    passes: Callable[[int], Sequence[AbstractContextManager[None]]] = passes


class Strategy(Protocol):
    """How replicas learn together. The loop sees only this, and a strategy never sees the loop.

    What is not abstract has the answers that most share: a process a replica, one shard of a batch, nothing to refuse.
    """

    settings: StrategySettings  # what it means for the shape of a run
    world: World = World()  # the ranks that learn together; of setup
    takes_empty: bool = False  # whether a shard without a sample has to be run as well, on one that does not count
    starts: Sequence[str] = ()  # the blocks at which the 2nd, 3rd, … stage of a pipeline begins
    rejoins: bool = True  # whether :meth:`setup` takes ranks that have trained, and left, to a new group
    peers: dist.ProcessGroup | None = None  # ranks that hold the same part of the model; ``None``: all
    shares_memory: bool = False  # ranks exchange gradients in memory, not by the backend; known after :meth:`wrap`
    bound: torch.device | None = None  # the one accelerator of a replica, which the group is for; set before setup
    silent: bool = False  # whether collectives wait for :meth:`abort` once a rank is lost, and raise nothing; of setup
    moved: frozenset[str] = frozenset()  # buffers that an evaluation has moved, and that were put back
    exchanges: Exchanges = Exchanges()  # by these; each method that returns what was exchanged synchronizes before

    @property
    @abstractmethod
    def divisor(self) -> int:
        """What gradients come out divided by: where ranks' are averaged, the number of ranks."""

    def replicas(self, device_type: str) -> int:
        """Return how many replicas share a shard of a batch; ``data.batch_size`` is for each of them."""
        return 1

    def draws_on(self, devices: Sequence[torch.device]) -> Sequence[torch.device]:
        """Return the devices whose generators a step may draw from, given those of a replica."""
        return devices

    def check(self, task: Task, devices: Sequence[torch.device]) -> None:
        """Refuse what cannot work, before anything is written; in a dry run the devices need not be there.

        Raises:
            RequestError: with what to do instead.
        """
        return

    @abstractmethod
    def setup(
        self, world: World, messages: Messages | None, backend: str, timeout: timedelta, init_method: str | None
    ) -> None:
        """Join the other ranks. A collective: every rank calls it."""

    @abstractmethod
    def shard(self, task: Task, devices: Sequence[torch.device]) -> None:
        """Leave this rank what it holds of the task. Called before any step.

        Its weights are loaded, or, where the settings say ``deferred``, on ``meta``: they are loaded next.
        """

    def make_optimizers(self, task: Task, make: Callable[[], T]) -> T:
        """Return what ``make()`` makes, optimizers first, while the task's parameters are those that this rank updates.

        Raises:
            RequestError: an optimizer cannot update them.
        """
        return make()

    @abstractmethod
    def wrap(self, task: Task, devices: Sequence[torch.device]) -> Wrapped:
        """Return the task as training steps run it, on this replica's devices."""

    def batch_shard(self, weight: float) -> AbstractContextManager[Any]:
        """Return the context in which one shard of a step runs; ``weight`` is its fraction of the step's samples."""
        return nullcontext()

    @abstractmethod
    def training_step(self, module: Wrapped, batch: Any, weight: float, last: bool, precision: Passes) -> Tensor:
        """Run forward and backward of one batch, its loss multiplied with ``weight``; ``last`` ends its shard.

        Returns:
            The loss, the mean over the batch's samples, without a graph. It counts where the model's outputs are.
        """

    @abstractmethod
    def reduce(self) -> None:
        """Reduce gradients to those of the whole step, on every rank. Called once all shards are done; a collective."""

    @abstractmethod
    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm over all gradients of the model, given this rank's. A collective."""

    def weights(self, task: Task) -> dict[str, Tensor]:
        """Return the weights of the whole model, under their names, on rank 0. A collective."""
        return task.weights()

    def saved_weights(self, task: Task) -> Mapping[str, Tensor | OwnRows]:
        """Return what this rank saves of them: of a sharded model its rows, else :meth:`weights`."""
        return self.weights(task)

    def digest(self, task: Task) -> str | None:
        """Return the SHA-256 of the whole model's weights on rank 0. A collective."""
        return digest(self.weights(task))

    def copies(self, task: Task) -> dict[str, int]:
        """Return the sums of bits of those of this rank's parameters that must be the same on all ranks."""
        return {}

    @abstractmethod
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of the whole model's optimizer on rank 0, or what this rank saves of it. A collective."""

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Restore what :meth:`optimizer_state` returned, of whatever strategy, as far as this rank holds it.

        By itself it takes all: what belongs to other ranks has no data here.
        """
        optimizer.load_state_dict(put_together(state))

    def explain(self, error: BaseException, task: Task) -> str | None:
        """Return what a failure in a step comes from and what to do, where the strategy knows better than torch.

        By itself of a gradient that ranks would have to exchange, and that is sparse.
        """
        if not of_sparse(error):
            return None
        return (
            f"With strategy={self.settings.name} something got a sparse tensor that it cannot take, most likely a "
            f"sparse gradient. Have gradients dense (sparse=False). strategy=ddp takes those of "
            f"nn.Embedding(sparse=True) and nn.EmbeddingBag(sparse=True), on devices whose operations do."
        )

    @abstractmethod
    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over rows, [rows, ...] to [...], and over ranks. A collective: rows are as many on each."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's value in rank order on rank 0, ``None`` elsewhere. A collective."""

    @abstractmethod
    def sync_buffers(self, task: Task) -> None:
        """Give every rank rank 0's buffers, so that all evaluate one model. A collective."""

    def evaluation(self, task: Task) -> AbstractContextManager[Any]:
        """Return the context in which a data set is evaluated, of which each rank has samples of its own."""
        return nullcontext()

    def send_buffers(self, task: Task) -> None:
        """Do so before a forward pass that the wrapper of :meth:`wrap` knows nothing of, where it would. A collective.

        Of Lightning's manual optimization alone.
        """
        return

    def exchange(self, task: Task, world: World) -> Exchange:
        """Return what a rank of that world would keep and send, for a task whose tensors may have no data.

        Raises:
            RequestError: this strategy does not know.
        """
        raise RequestError(
            f"plan=true does not know what strategy={self.settings.name} exchanges. Use strategy=ddp, ddp_exact, "
            f"fsdp or single."
        )

    def abort(self) -> None:
        """End the collectives under way. Any thread may call it, and again."""
        return

    @abstractmethod
    def teardown(self) -> None:
        """Leave the group."""


class Whole(Strategy):
    """Methods of strategies whose ranks each hold the whole model."""

    def training_step(self, module: Wrapped, batch: Any, weight: float, last: bool, precision: Passes) -> Tensor:
        """Run the wrapped task, then backward."""
        with phase("forward"), precision.forward():
            loss = module(batch).loss
        with phase("backward"):
            self.backward(loss if weight == 1 else loss * weight, precision)
        return loss.detach()

    def backward(self, loss: Tensor, precision: Passes) -> None:
        """Run backward from a weighted loss."""
        precision.backward(loss)

    def shard(self, task: Task, devices: Sequence[torch.device]) -> None:
        """Leave the model as it is: every rank holds all of it."""

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of all gradients, each of which this rank has."""
        return total_norm(gradients)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state, all of which this rank has."""
        return optimizer.state_dict()


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm over gradients, the same bits on one device as on several, which torch takes in any order."""
    places: dict[torch.device, list[int]] = {}
    for place, gradient in enumerate(gradients):
        places.setdefault(gradient.device, []).append(place)
    if len(places) < 2:
        return nn.utils.get_total_norm(gradients)
    norms = {
        place: norm.to(gradients[0].device)
        for own in places.values()
        for place, norm in zip(own, norm_of_each([gradients[place] for place in own]), strict=True)
    }
    return nn.utils.get_total_norm([norms[place] for place in range(len(gradients))])


def parameters_in(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return an optimizer's parameters by the numbers that they have in its state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def states_in_order(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return an optimizer's states by the numbers of parameters, and then those that it keeps under names."""
    return dict(sorted(states.items(), key=lambda item: (isinstance(item[0], str), item[0])))


def by_rank(value: Tensor, world: World, total: Callable[[Tensor], Tensor]) -> Tensor:
    """Return every rank's value, [...] to [ranks, ...], by a strategy's sum. A collective."""
    every = value.new_zeros(1, world.world_size, *value.shape)
    every[0, world.rank] = value
    return total(every)


@contextmanager
def in_place(task: nn.Module, others: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """Let modules have other parameters for a while."""
    places = [
        (module, name, parameter)
        for module in task.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if parameter in others
    ]
    for module, name, parameter in places:
        setattr(module, name, others[parameter])
    try:
        yield
    finally:
        for module, name, parameter in places:
            setattr(module, name, parameter)


def batch_norms(task: nn.Module) -> list[str]:
    """Return the names of the batch-norm modules."""
    return [name for name, module in task.named_modules() if isinstance(module, BatchNorm)]


def refuse_differing(of_ranks: Sequence[Mapping[str, int]]) -> None:
    """Refuse to go on with parameters that are not the same on all ranks: rank 0's are saved.

    Args:
        of_ranks: by rank the sums of bits of each parameter.

    Raises:
        RunFailed: names the first that differs, and where.
    """
    for name, value in of_ranks[0].items():
        ranks = [rank for rank, sums in enumerate(of_ranks) if sums[name] != value]
        if ranks:
            other = ", ".join(map(str, ranks[:8])) + (", …" if ranks[8:] else "")
            raise RunFailed(
                f"The parameter {name.removeprefix('model.')} has other values on rank {other} than on rank 0, whose "
                f"are saved: something writes to it by what a rank alone has seen. A forward pass does so, with "
                f"nn.Embedding(max_norm=…) or averages over a batch, or a callback that not all ranks run alike. Have "
                f"all ranks write the same once a step (in a callback's on_step, or on_train_batch_end of a Lightning "
                f"module), or make it a buffer (register_buffer), of which all get rank 0's."
            )
