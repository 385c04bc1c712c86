"""One process a stage, torch's pipeline schedules, and DDP across the replicas of a stage."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_recipes._compat.model_parallel import of_no_data
from ddp_recipes._compat.torch_ import late_hooks
from ddp_recipes.devices import for_sums
from ddp_recipes.errors import RequestError
from ddp_recipes.model_parallel.micro_batches import joined_rows
from ddp_recipes.model_parallel.pipeline import Pipeline, joined
from ddp_recipes.model_parallel.placement import Layout
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.phases import phase
from ddp_recipes.runtime.tensors import put_together
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies.base import Passes, Wrapped, parameters_in, states_in_order
from ddp_recipes.strategies.collectives import broadcast, broadcast_each, gather, in_buckets
from ddp_recipes.strategies.ddp_pipeline.settings import DDPPipelineSettings
from ddp_recipes.strategies.exchanges import exchanged, wait_for_message
from ddp_recipes.strategies.group import Group
from ddp_recipes.tasks import StepOutput, Task
from ddp_recipes.tasks.task import outside
from ddp_recipes.tasks.written import Watch


class DDPPipeline(Group):
    """Cuts the model into stages, each in a process of its own, which work on different micro-batches at a time.

    The processes of a replica are neighbouring ranks. They see the same batches; the first one reads the inputs, the
    last one computes the loss. The gradients of a stage are added up over replicas once all micro-batches are done.
    """

    Settings = DDPPipelineSettings
    settings: DDPPipelineSettings
    divisor = 1

    def __init__(self, settings: DDPPipelineSettings) -> None:
        self.settings = settings
        self.processes = settings.processes_per_replica
        self.weight = 1.0
        self.pipeline: Pipeline | None = None
        self.within: dist.ProcessGroup | None = None  # the processes of this replica

    def check(self, task: Task, devices: Sequence[torch.device]) -> None:
        """Refuse what only some processes could measure."""
        if task.train_metrics:
            raise RequestError(
                f"task.train_metrics=true does not go with strategy={self.settings.name}, which keeps no outputs of "
                f"training steps. Leave it out; those of validation are measured."
            )
        if task.weighs:
            raise RequestError(
                f"task.loss is a mean over targets that count, or by weights of classes, and strategy="
                f"{self.settings.name} averages micro-batches by their samples. Set task.mean_over=samples to have it "
                f"so, or choose a strategy whose ranks take whole batches."
            )
        for name, parameter in task.model.named_parameters():
            if late_hooks(parameter):
                raise RequestError(
                    f"{name} has a hook of register_post_accumulate_grad_hook, which strategy={self.settings.name} "
                    f"would call for each micro-batch with the gradients of those before. Take register_hook, or "
                    f"choose strategy=ddp."
                )

    @property
    def layout(self) -> Layout:
        """The stages of each process, and which process of a replica this is."""
        return Layout(self.starts, self.processes, self.world.rank % self.processes)

    def setup(
        self, world: World, messages: Messages | None, backend: str, timeout: timedelta, init_method: str | None
    ) -> None:
        """Join the process group, and make one of each replica and one of each stage."""
        super().setup(world, messages, backend, timeout, init_method)
        ranks = torch.arange(world.world_size).view(-1, self.processes)
        rows = (ranks.T.tolist(), ranks.tolist())
        groups: Any = [dist.new_subgroups_by_enumeration(each, timeout=timeout)[0] for each in rows]
        self.peers, self.within = groups
        if self.pipeline is not None:
            self.pipeline.set_group(self.within)

    @property
    def replica(self) -> int:
        """The replica that this process belongs to."""
        return self.world.rank // self.processes

    def shard(self, task: Task, devices: Sequence[torch.device]) -> None:
        """Leave the stages of this process; from now on all steps of the task go through the pipeline."""
        settings = self.settings
        self.pipeline = pipeline = Pipeline(
            task, self.layout, settings.schedule, settings.micro_batches, self.within, devices[0]
        )
        pipeline.wait = None if self.silent else wait_for_message

        def validation_step(batch: Any) -> StepOutput:
            return self._in_all_processes(pipeline.run("validation_step", batch))

        def predict_step(batch: Any) -> Any:
            outputs, sizes = pipeline.run("predict_step", batch)
            given = outputs and outputs[0] is not None
            return joined_rows(outputs, sizes, "predict_step returns") if given else None

        task.validation_step = validation_step  # type: ignore[method-assign]
        task.predict_step = predict_step  # type: ignore[method-assign]

    def _in_all_processes(self, result: tuple[list[StepOutput], list[int]]) -> StepOutput:
        """Return the whole output where the last stage is, elsewhere one of its names that counts nothing."""
        assert self.pipeline is not None
        output = joined(*result) if self.layout.has_last else None
        names = None if output is None else list(output.metrics)
        names = broadcast(names, (self.settings.stages - 1) % self.processes, self.within)
        if output is not None:
            return output
        zero = torch.zeros((), device=self.pipeline.device)
        return StepOutput(zero, {name: zero.new_zeros(0) for name in names}, 0)

    def explain(self, error: BaseException, task: Task) -> str | None:
        """Say what a tensor without data is, which a stage came upon in a step."""
        if not of_no_data(error):
            return super().explain(error, task)
        return (
            "A stage came upon a tensor that only another stage has, which a try without data does not show where a "
            "callback takes all weights, or a model does more than call a block with what another one gave: by an "
            "autograd.Function of its own that runs blocks again, or by moving modules. Cut it elsewhere "
            "(model.split), or use a strategy without stages, as ddp."
        )

    def wrap(self, task: Task, devices: Sequence[torch.device]) -> Wrapped:
        """Return a step that runs forward and backward by the schedule; its loss counts in the last stage."""
        pipeline = self.pipeline
        assert pipeline is not None
        self.watch = Watch(task)
        self.trained = [parameter for parameter in task.parameters() if not parameter.is_meta]
        self.trained = [parameter for parameter in self.trained if parameter.requires_grad]

        def training_step(batch: Any) -> StepOutput:
            outputs, sizes = pipeline.run("training_step", batch, self.weight)
            if outputs:
                return joined([output._replace(metrics={}) for output in outputs], sizes)
            return StepOutput(torch.zeros((), device=pipeline.device), {}, 0)

        return training_step

    def training_step(self, module: Wrapped, batch: Any, weight: float, last: bool, precision: Passes) -> Tensor:
        """Run the schedule, which has the backward pass of each micro-batch in it."""
        self.weight = weight
        with phase("forward and backward"), precision.forward(), self.watch.one():
            return module(batch).loss.detach()

    def reduce(self) -> None:
        """Add up the gradients of this process's stages over replicas."""
        group = self.peers
        if dist.get_world_size(group) == 1:
            return
        assert self.pipeline is not None
        unused = [at for at, each in enumerate(self.trained) if each.grad is None]
        used = torch.ones(len(self.trained), dtype=torch.int32, device=self.pipeline.device)
        if unused:  # by this replica
            used[unused] = 0
            for at in unused:
                self.trained[at].grad = torch.zeros_like(self.trained[at])
        gradients = [each.grad for each in self.trained if each.grad is not None]
        in_buckets(gradients, lambda flat: exchanged(dist.all_reduce, flat, group=group))
        exchanged(dist.all_reduce, used, group=group)
        if unused:  # only then: a device is waited for
            by_any = used.tolist()
            for at in unused:
                self.trained[at].grad = self.trained[at].grad if by_any[at] else None

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm over all stages."""
        assert self.pipeline is not None
        mine = nn.utils.get_total_norm(gradients)
        squared = for_sums(mine.to(self.pipeline.device)).square()
        exchanged(dist.all_reduce, squared, group=self.within)
        return squared.sqrt().to(torch.promote_types(mine.dtype, torch.float32))

    def weights(self, task: Task) -> dict[str, Tensor]:
        """Gather all stages' on rank 0."""
        mine = task.weights()
        if self.pipeline is None:
            return mine  # each process still has all of them
        stages, layout = self.layout.stages_of(task), self.layout
        others = {name for name, module in task.named_modules() if stages[module] not in layout.mine}
        extra = {outside(f"{name}._extra_state") for name in others}  # as these were made, for they run elsewhere
        gathered = self._on_rank_0(
            {name: value for name, value in mine.items() if name not in extra and not getattr(value, "is_meta", False)}
        )
        return {name: gathered.get(name, value) for name, value in mine.items()}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Gather all stages' on rank 0."""
        state = optimizer.state_dict()
        elsewhere = _elsewhere(optimizer)
        mine = {at: value for at, value in state["state"].items() if at not in elsewhere}
        return {**state, "state": states_in_order(self._on_rank_0(mine))}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Leave out what belongs to other processes: the optimizer would keep it, without data."""
        elsewhere, whole = _elsewhere(optimizer), put_together(state)
        mine = {at: value for at, value in whole["state"].items() if at not in elsewhere}
        optimizer.load_state_dict({**whole, "state": mine})

    def _on_rank_0(self, mine: dict[Any, Any]) -> dict[Any, Any]:
        """Return on rank 0 what all processes of its replica have, elsewhere what is given."""
        if self.replica != 0:
            return mine
        gathered = gather(mine, self.within)
        return mine if gathered is None else {name: value for each in gathered for name, value in each.items()}

    def sync_buffers(self, task: Task) -> None:
        """Give a stage's replicas the buffers of the first one."""
        if dist.get_world_size(self.peers) > 1:
            broadcast_each((buffer for buffer in task.buffers() if not buffer.is_meta), self.peers)

    def teardown(self) -> None:
        """Drop what holds the groups as well."""
        self.within = None
        if self.pipeline is not None:
            self.pipeline.set_group(None)
        super().teardown()


def _elsewhere(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the numbers of the parameters that other processes have."""
    return {number for number, parameter in enumerate(parameters_in(optimizer)) if parameter.is_meta}
