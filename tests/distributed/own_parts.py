"""What a user might bring: models, a data set and a callback, found by their dotted names."""

import contextlib
import gc
import json
import logging
import os
import random
import resource
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, default_collate

from ddp_recipes import Callback, StepOutput, Task
from ddp_recipes.datasets import random_regression
from ddp_recipes.models import Toy


def rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


class Dropout(nn.Sequential):
    """Draws random numbers in training."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        hidden = nn.Linear(in_features, hidden_features)
        super().__init__(hidden, nn.Dropout(0.3), nn.ReLU(), nn.Linear(hidden_features, out_features))


class Wide(nn.Sequential):
    """Needs a megabyte a sample; rank 1 gets so many megabytes more than it has at its first forward pass."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int, more: int | None = None) -> None:
        wide = 10_000 * hidden_features
        super().__init__(nn.Linear(in_features, wide), nn.Tanh(), nn.Linear(wide, out_features))
        self.more = more

    def forward(self, inputs: Tensor) -> Tensor:
        if rank() == 1 and self.more is not None:
            gc.collect()  # what earlier tests left to this fork would be freed later, and count as given
            pages = int(Path("/proc/self/statm").read_text().split()[5])
            allowed = pages * resource.getpagesize() + self.more * 10**6
            self.more = None
            resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
        return cast(Tensor, super().forward(inputs))


class Drawing(Toy):
    """Draws from NumPy and ``random``, in training and in evaluation."""

    def forward(self, input: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.randn(len(input), 1)).float() * random.random()
        return super().forward(input + 0.1 * noise)


class DrawingLate(Drawing):
    """Draws from its third batch on."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.register_buffer("batches", torch.tensor(0))

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.batches += 1
        return super().forward(input) if self.batches > 2 else Toy.forward(self, input)


def mixed(samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return a batch under mixup, as it is often written."""
    inputs, targets = default_collate(samples)
    weight, others = np.random.beta(0.4, 0.4), torch.randperm(len(inputs))
    weight = weight if random.random() < 0.9 else 1.0
    return [weight * each + (1 - weight) * each[others] for each in (inputs, targets)]


class Norm(nn.Sequential):
    """Has buffers that follow each rank's own batches."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        hidden = nn.Linear(in_features, hidden_features)
        super().__init__(hidden, nn.BatchNorm1d(hidden_features), nn.ReLU(), nn.Linear(hidden_features, out_features))


class Making(Toy):
    """Makes a tensor of torch's default type in its forward pass."""

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, super().forward(inputs + torch.full((1, inputs.shape[1]), 0.1)))


class Rotating(Toy):
    """Has complex numbers."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.register_buffer("turns", torch.ones(hidden_features, dtype=torch.complex64))


class Images(nn.Sequential):
    """A small network for images, whose weights have four dimensions.

    Args:
        lie: whether as ``channels_last``; an input that lies otherwise ends the run.
    """

    def __init__(self, in_channels: int, num_classes: int, lie: bool | None = None) -> None:
        first = nn.Conv2d(in_channels, 4, 3, bias=False)  # its gradient would be rounding alone
        super().__init__(first, nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3, groups=2))
        self.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes)])
        self.lie = lie

    def forward(self, inputs: Tensor) -> Tensor:
        for tensor in (inputs, *(each for each in self.parameters() if each.dim() == 4)):
            lies = tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
            assert self.lie is None or lies == self.lie, tensor.stride()
        return cast(Tensor, super().forward(inputs))


class Deciding(Toy):
    """Looks at values in its forward pass."""

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, super().forward(inputs if inputs.sum().item() > 0 else -inputs))


class Deep(nn.Module):
    """Has several blocks of one kind."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int, blocks: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(in_features, hidden_features), nn.Linear(hidden_features, out_features)
        layers = (nn.Sequential(nn.Linear(hidden_features, hidden_features), nn.Tanh()) for _ in range(blocks))
        self.blocks = nn.ModuleList(layers)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = self.first(inputs)
        for block in self.blocks:
            inputs = block(inputs)
        return cast(Tensor, self.last(inputs))


class Compiled(Toy):
    """Is to run compiled, and says so where it does not."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            raise RuntimeError("this runs as it is written, and not compiled")
        return super().forward(inputs)


class Widths(nn.Sequential):
    """Has blocks of one class, each of another width, which are to run compiled."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        widths = [in_features, *range(hidden_features, hidden_features + 5)]
        super().__init__(*(Compiled(one, 4, other) for one, other in pairwise([*widths, out_features])))


class Sizes(nn.Module):
    """Calls a block, which is to run compiled, on batches of many sizes."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__()
        self.block = Compiled(in_features, hidden_features, out_features)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([self.block(inputs[:size]) for size in range(2, 12)])[-len(inputs) :]


class Steps(nn.Module):
    """Is written as for Lightning; its steps call parts, which are to run compiled, and not itself."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__()
        sizes = in_features, hidden_features, out_features
        self.nets, self.loss = nn.ModuleList([Compiled(*sizes), Compiled(*sizes)]), nn.MSELoss()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cast(Tensor, self.loss(self.nets[0](batch[0]) + self.nets[1](batch[0]), batch[1]))

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Anew(Toy):
    """Has another number in each pass, for which it is compiled anew."""

    passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(inputs) * (1 + 1 / self.passes)


class Letters(nn.Sequential):
    """Predicts a byte by the one before it."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(256, 4), nn.Linear(4, 256))


class OfParts(Task):
    """Calls parts of the model in training, and not itself."""

    def training_step(self, batch: Any) -> StepOutput:
        inputs, targets = batch
        return self.training_output(self.model.net2(self.model.relu(self.model.net1(inputs))), targets)


class Graphs(Callback):
    """Writes how many graphs torch compiled in the run."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def on_start(self, directory: Path | None, task: nn.Module) -> None:
        torch._dynamo.reset()
        self.before = self.count()

    def on_end(self) -> None:
        self.file.write_text(str(self.count() - self.before))

    def count(self) -> int:
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"]


class ManyNorms(nn.Sequential):
    """Has 30 buffers of two dtypes, all of batch norms, half of them before its first weights."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        layers = nn.Linear(in_features, hidden_features), nn.Linear(hidden_features, out_features)
        halves = ([*(nn.BatchNorm1d(layer.in_features) for _ in range(5)), layer] for layer in layers)
        super().__init__(*chain.from_iterable(halves))


class Broadcasts(Callback):
    """Writes down how many broadcasts this rank takes part in, from the end of the first step to a validation's."""

    def __init__(self, path: str) -> None:
        self.path, self.count = Path(path), 0
        self.counting = _Counting(self)

    def on_step(self, step: int) -> None:
        if step == 1:
            self.counting.__enter__()

    def on_validation(self, step: int, metrics: object) -> None:
        self.counting.__exit__(None, None, None)
        self.path.with_name(f"{self.path.name}_{self.run.world.rank}").write_text(str(self.count))


class _Counting(TorchDispatchMode):
    def __init__(self, counts: Broadcasts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts.count += str(func).startswith("c10d.broadcast_")
        return func(*args, **(kwargs or {}))


class Centered(Toy):
    """Reads in training what follows each rank's own batches."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.register_buffer("mean", torch.zeros(in_features))

    def forward(self, inputs: Tensor) -> Tensor:
        centered = inputs - self.mean
        if self.training:
            self.mean = self.mean.lerp(inputs.mean(0), 0.1)
        return super().forward(centered)


class Flaky(Toy):
    """Raises in its constructor in the first process that comes to it, once."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int, mark: str) -> None:
        super().__init__(in_features, hidden_features, out_features)
        with contextlib.suppress(FileExistsError):
            Path(mark).touch(exist_ok=False)
            raise LookupError("the cat is not there")


class Counting(nn.Linear):
    """Its forward pass in training writes to a parameter that is not trained."""

    def __init__(self, features: int) -> None:
        super().__init__(features, features)
        self.mean = nn.Parameter(torch.zeros(features), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(torch.ones_like(self.mean), 0.1)
        return super().forward(inputs) - self.mean


class Counted(nn.Sequential):
    """Has such a block."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        first, last = nn.Linear(in_features, hidden_features), nn.Linear(hidden_features, out_features)
        super().__init__(first, Counting(hidden_features), last)


class Teacher(nn.Module):
    """A layer, and a moving average of it, which the forward pass goes on with (Tarvainen and Valpola, 2017)."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(in_features, out_features), nn.Linear(in_features, out_features)
        self.teacher.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for mean, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    mean.lerp_(new, 0.2)
        return cast(Tensor, self.student(inputs) + 0.1 * self.teacher(inputs))


class Bounded(nn.Module):
    """Looks vectors up whose norms are bounded, which the pass sees to for those that it looks up."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int, max_norm: float = 0.5) -> None:
        super().__init__()
        self.table = nn.Embedding(64, hidden_features, max_norm=max_norm)
        self.last = nn.Linear(hidden_features, out_features)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = (inputs.flatten(1)[:, :4] * 64).long().remainder(64)
        return cast(Tensor, self.last(self.table(rows).mean(dim=1)))


class Followed(nn.Module):
    """Keeps the mean of what it has seen in a parameter that is not trained."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__()
        self.last, self.seen = nn.Linear(in_features, out_features), nn.Parameter(torch.zeros(in_features))
        self.seen.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.seen.lerp_(inputs.mean(dim=0), 0.5)
        return cast(Tensor, self.last(inputs - self.seen))


class Momentum(Teacher):
    """Keeps the average by ``parameter.data``, as MoCo does (He et al., 2020)."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            for mean, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mean.data = mean.data * 0.8 + new.data * 0.2
        return cast(Tensor, self.student(inputs) + 0.1 * self.teacher(inputs))


class Polyak(Teacher):
    """Keeps the average in ``parameter.data``, as SAC and DDPG do (Lillicrap et al., 2016)."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            for mean, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mean.data.mul_(0.8).add_(new.data, alpha=0.2)
        return cast(Tensor, self.student(inputs) + 0.1 * self.teacher(inputs))


class Constrained(nn.Linear):
    """Bounds the norms of its rows before each pass, as EEGNet does (Lawhern et al., 2018)."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(inputs)


class Clamped(nn.Linear):
    """Bounds its weights before each pass."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(inputs)


class Within(nn.Sequential):
    """Has a layer of a kind that bounds its weights."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int, kind: str = "Constrained") -> None:
        layer = {"Constrained": Constrained, "Clamped": Clamped}[kind]
        super().__init__(nn.Linear(in_features, hidden_features), nn.ReLU(), layer(hidden_features, out_features))


class Tied(nn.Sequential):
    """Two layers of one weight."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(nn.Linear(in_features, in_features), nn.ReLU(), nn.Linear(in_features, in_features))
        self[2].weight = self[0].weight


class Spare(Toy):
    """Has a layer that it does not use."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.spare = nn.Linear(2, 2)


class Poisoned(Toy):
    """Its output is NaN on one rank in the training batch of one step, counted from the start of the process."""

    def __init__(self, rank: int, step: int, value: float, **sizes: int) -> None:
        super().__init__(**sizes)
        self.rank, self.step, self.value, self.batches = rank, step, value, 0

    def forward(self, input: Tensor) -> Tensor:
        self.batches += self.training
        bad = self.training and self.batches == self.step and self.rank == rank()
        return super().forward(input) * (self.value if bad else 1)


class Buffered(Toy):
    """Has a mask of infinities, as attention does, and a count that is NaN on one rank from batch 3 on."""

    def __init__(self, rank: int, **sizes: int) -> None:
        super().__init__(**sizes)
        self.rank, self.batches = rank, 0
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:
        self.batches += self.training
        if self.batches >= 3 and self.rank == rank():
            self.count.fill_(float("nan"))
        return super().forward(input)


class Loud(Toy):
    """Its gradients overflow in 16 bits until the loss is scaled less."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 4


class Wary(Toy):
    """Warns in training."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            logging.getLogger(__name__).warning("the cat looks at the keyboard")
        return super().forward(input)


class Rooted(Toy):
    """Its gradient is 0 times infinity, which is NaN."""

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        return output + (0 * output).sqrt()


class Weighted(nn.MSELoss):
    """A loss with a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(()))


class OneByOne(Dataset[tuple[Tensor, Tensor]]):
    """Random data read sample by sample, under a random transform."""

    def __init__(self, num_samples: int, in_features: int, out_features: int, seed: int, split: str) -> None:
        self.samples = random_regression(num_samples, in_features, out_features, seed, split)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.samples[index]
        return inputs + 0.1 * torch.randn_like(inputs), targets


class Seen(Callback):
    """Keeps the steps that it has seen, in a container that a checkpoint cannot hold."""

    def __init__(self, late: bool = False) -> None:
        if not late:
            self.steps: set[int] = set()

    def on_start(self, directory: Path | None, task: nn.Module) -> None:
        self.steps = set()

    def on_step(self, step: int) -> None:
        self.steps.add(step)

    def state(self) -> dict[str, Any]:
        return {"of": {"steps": self.steps}}


def scripted(in_features: int, hidden_features: int, out_features: int) -> nn.Module:
    """Return a model of TorchScript."""
    layers = nn.Sequential(nn.Linear(in_features, hidden_features), nn.Linear(hidden_features, out_features))
    return cast(nn.Module, torch.jit.script(layers))


class LazyInTraining(Toy):
    """Has a layer without sizes that only training runs."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.net2 = nn.LazyLinear(out_features)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else x[:, :5]


class Thawing(Toy):
    """Its first layer is frozen until an epoch, or, with ``step``, until a forward pass."""

    def __init__(self, step: int | None = None, **sizes: int) -> None:
        super().__init__(**sizes)
        self.net1.requires_grad_(False)
        self.passes, self.step = 0, step

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        if self.passes == self.step:
            self.net1.requires_grad_(True)
        return super().forward(x)


class Unseeded(Callback):
    """Sees to it that steps seed nothing but torch, which takes a tenth of the time."""

    def on_step(self, step: int) -> None:
        assert not self.run.generators.drawn


class Thaws(Callback):
    """Trains the first layer from the second epoch on, of which it says so, or in each again."""

    def __init__(self, once: bool = False) -> None:
        self.once = once

    def on_epoch_start(self, epoch: int) -> None:
        if epoch == 1 or (epoch > 1 and not self.once):
            self.run.task.model.net1.requires_grad_(True)  # type: ignore[union-attr]


class Measures(Callback):
    """Takes the norm of each weight after a step."""

    def on_step(self, step: int) -> None:
        for weight in self.run.task.parameters():
            weight.norm().item()


class Freezes(Callback):
    """Leaves batch norm its statistics from a step on."""

    def on_step(self, step: int) -> None:
        if step == 3:
            for module in self.run.task.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.eval()


class Signalled(Callback):
    """Sends its own process signals on one rank at a step.

    Args:
        where: ``step``, ``validation`` (in it), ``validated``, ``saving`` (while the state is gathered) or ``saved``.
        name: of the signal.
        times: how many of them.
    """

    def __init__(self, where: str, step: int, rank: int, name: str = "SIGKILL", times: int = 1) -> None:
        self.where, self.step, self.rank, self.now = where, step, rank, 0
        self.number, self.times = signal.Signals[name], times

    def on_start(self, directory: Path | None, task: nn.Module) -> None:
        def forward(module: nn.Module, inputs: object) -> None:
            if not module.training:
                self.come("validation")

        task.model.register_forward_pre_hook(forward)

    def on_step(self, step: int) -> None:
        self.now = step
        self.come("step")

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.come("validated")

    def on_save(self, step: int) -> None:
        self.come("saved")

    def state(self) -> dict[str, Any]:
        self.come("saving")
        return {}

    def come(self, where: str) -> None:
        if (where, self.now, rank()) == (self.where, self.step, self.rank):
            while self.times:
                self.times -= 1
                os.kill(os.getpid(), self.number)


class Broken(Callback):
    """Puts a file where the folder of checkpoints is, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.folder: Path | None = None

    def on_start(self, directory: Path | None, task: nn.Module) -> None:
        self.folder = directory / "checkpoints" if directory is not None else None

    def on_step(self, step: int) -> None:
        if step == self.step and self.folder is not None:
            if self.folder.exists():
                self.folder.rename(self.folder.with_name("good"))
            self.folder.touch()


class KilledCosine(torch.optim.lr_scheduler.CosineAnnealingLR):
    """Kills its own process on one rank when it is about to go to a step."""

    def __init__(self, optimizer: torch.optim.Optimizer, T_max: int, kill_at: int | None, rank: int) -> None:
        self.kill_at, self.rank = kill_at, rank
        super().__init__(optimizer, T_max)

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch + 1 == self.kill_at and self.rank == rank():
            os.kill(os.getpid(), signal.SIGKILL)
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name not in ("kill_at", "rank")}


class NumpyCosine(torch.optim.lr_scheduler.LambdaLR):
    """Gives rates as NumPy computes them, in its own kind of number."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        super().__init__(optimizer, lambda step: np.cos(np.float64(step) / steps) ** 2)


class Notes(Callback):
    """Writes what each rank saw to ``folder/rank_<number>.json``."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.steps: list[int] = []
        self.validations: list[int] = []
        self.saves: list[int] = []

    def on_step(self, step: int) -> None:
        self.steps.append(step)

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.validations.append(step)

    def on_save(self, step: int) -> None:
        self.saves.append(step)

    def on_end(self) -> None:
        notes = {
            "steps": self.steps,
            "validations": self.validations,
            "saves": self.saves,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        (self.folder / f"rank_{rank()}.json").write_text(json.dumps(notes))


class Extra(Toy):
    """Its extra state is an array from the n-th training step on; some steps later a forward pass may raise."""

    def __init__(self, after: int, raises: bool = False, **sizes: int) -> None:
        super().__init__(**sizes)
        self.left, self.raises = after, raises

    def forward(self, x: Tensor) -> Tensor:
        self.left -= self.training
        if self.raises and self.left < -2:
            raise ValueError("the cat sat on the keyboard")
        return super().forward(x)

    def get_extra_state(self) -> object:
        return np.zeros(2) if self.left <= 0 else 0

    def set_extra_state(self, state: object) -> None:
        pass


class Norms(Toy):
    """Has two batch norms, of which one is in eval mode from the beginning, or all of the model is.

    Args:
        by: ``train``: the model's own puts it there.
    """

    def __init__(self, *arguments: Any, whole: bool = False, by: str = "init", **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.frozen, self.norm, self.by = nn.BatchNorm1d(10).train(by == "train"), nn.BatchNorm1d(10), by
        if whole:
            self.eval()  # as what is loaded by from_pretrained

    def train(self, mode: bool = True) -> "Norms":
        super().train(mode)
        if self.by == "train":
            self.frozen.eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, super().forward(self.frozen(inputs) + self.norm(inputs)))


class Lit(Toy):
    """A toy written for Lightning, as far as the loop needs it: steps that log, and an optimizer of its own."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        inputs, targets = batch
        return {"loss": nn.functional.mse_loss(self(inputs), targets)}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        outputs = self(inputs)
        self.log("val_loss", nn.functional.mse_loss(outputs, targets), prog_bar=True)
        self.log_dict({"val/mae": (outputs - targets).abs().mean()})

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[object]]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "epoch"}]


class Held(Callback):
    """Writes what tensors this rank holds at the end of a run, in bytes, to ``<folder>/<rank>``."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_end(self) -> None:
        gc.collect()
        held = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and each.is_cpu]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}
        (self.folder / f"{rank()}").write_text(str(sum(storages.values())))


class Talking(Toy):
    """Prints in its first forward pass: lines, a line in parts, and to standard error."""

    said = False

    def forward(self, input: Tensor) -> Tensor:
        if not self.said:
            self.said = True
            print(f"one of {rank()}\ntwo of {rank()}")
            print("three", f"of {rank()}", end="")
            print()
            print(f"error of {rank()}", file=sys.stderr)
        return super().forward(input)


class Ignoring(Dataset[Any]):
    """Samples of two classes, every third of which does not count, and none of twelve in a row.

    Args:
        named: whether they are mappings, as Hugging Face's are.
    """

    def __init__(
        self,
        num_samples: int = 64,
        in_features: int = 10,
        out_features: int = 2,
        ignores: bool = True,
        named: bool = False,
        seed: int = 3,
        split: str = "train",
        **others: object,
    ) -> None:
        self.named = named
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(num_samples, in_features, generator=generator)
        self.targets = (self.inputs[:, 0] > 0.5).long() % out_features
        if ignores:
            self.targets[::3] = -100
            self.targets[12:24] = -100

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.inputs[index], self.targets[index]
        return {"input": inputs, "labels": targets} if self.named else (inputs, targets)


class Ignorant(Toy):
    """A toy that computes the loss itself, as models of Hugging Face do."""

    def forward(self, input: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(input)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Shifting(Task):
    """Has a step of its own, which returns the task's loss."""

    def training_step(self, batch: Any) -> StepOutput:
        inputs, targets = batch
        return self.training_output(self.model(inputs), targets)


class Sets(Dataset[Tensor]):
    """Samples of one to seven points each, as graphs have nodes."""

    def __init__(self, num_samples: int = 64, in_features: int = 10, seed: int = 3, **others: object) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.samples = [torch.randn(1 + at % 7, in_features, generator=generator) for at in range(num_samples)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        return self.samples[index]


def ragged(samples: list[Tensor]) -> SimpleNamespace:
    """Return a batch of sets: the points of all, and of each point the number of its set."""
    sets = torch.tensor([number for number, points in enumerate(samples) for _ in points])
    return SimpleNamespace(points=torch.cat(samples), sets=sets, count=len(samples))


class OfSets(Toy):
    """Learns how many points a set has, and returns its loss."""

    def forward(self, batch: SimpleNamespace) -> Tensor:  # type: ignore[override]
        points = super().forward(batch.points).mean(dim=1)
        found = points.new_zeros(batch.count).index_add(0, batch.sets, points)
        return (found - torch.bincount(batch.sets)).square().mean()


def off(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return how far each number is off, [n, numbers]."""
    return (outputs - targets).abs()


def off_in_all(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return how far all are off, [1]."""
    return off(outputs, targets).mean().reshape(1)


def off_as_number(outputs: Tensor, targets: Tensor) -> float:
    """Return the same as a number of Python."""
    return off(outputs, targets).mean().item()


def off_one_by_one(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return it of all numbers of all samples, [n * numbers]."""
    return off(outputs, targets).flatten()


def no_number(outputs: Tensor, targets: Tensor) -> None:
    """Return nothing."""


class Annealed(Toy):
    """Divides its outputs by a temperature that follows from how often it was called, which it counts in Python."""

    calls = 0
    longest = 0  # a cache, which the first call fills

    def forward(self, input: Tensor) -> Tensor:
        self.longest = max(self.longest, len(input))
        self.calls += self.training
        return cast(Tensor, super().forward(input) / (1 + 0.5**self.calls))


class SavedAnnealed(Annealed):
    """The same, whose count is in its checkpoints."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Recurrent(nn.Module):
    """Goes on with the state that it had after the pass before, if ``stateful``; what it computed last is kept anyhow.

    It also keeps the largest batch, which no step changes once it was there.
    """

    def __init__(self, in_features: int, hidden_features: int, out_features: int, stateful: bool) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(in_features, hidden_features), nn.Linear(hidden_features, out_features)
        self.stateful = stateful
        self.state: tuple[Tensor, Tensor] | None = None
        self.largest = torch.empty(0)

    def forward(self, input: Tensor) -> Tensor:
        if len(self.largest) < len(input):
            self.largest = input
        goes_on = self.stateful and self.state is not None and len(self.state[0]) == len(input)
        state = self.cell(input, self.state if goes_on else None)
        self.state = state[0].detach(), state[1].detach()
        return cast(Tensor, self.out(state[0]))


class Quantized(Toy):
    """Trains for numbers of 8 bits; what observes its weights gets its shape in the first pass (Jacob et al., 2018)."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        observed = torch.ao.quantization.FakeQuantize.with_args(
            observer=torch.ao.quantization.MovingAveragePerChannelMinMaxObserver,
            **{"quant_min": -128, "quant_max": 127, "dtype": torch.qint8, "qscheme": torch.per_channel_symmetric},
        )
        self.quantized = observed()

    def forward(self, input: Tensor) -> Tensor:
        hidden = nn.functional.linear(input.flatten(1), self.quantized(self.net1.weight), self.net1.bias)
        return cast(Tensor, self.net2(self.relu(hidden)))


class CompiledInside(nn.Module):
    """Has a part that it compiles by itself."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__()
        layers = nn.Linear(in_features, hidden_features), nn.Tanh(), nn.Linear(hidden_features, out_features)
        self.layers = torch.compile(nn.Sequential(*layers), backend="eager")

    def forward(self, input: Tensor) -> Tensor:
        return cast(Tensor, self.layers(input.flatten(1)))


class Replacing(Toy):
    """Counts its passes in a tensor that is a new one each time, mostly where the last one has lain."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.passes: Tensor | None = torch.tensor(0)

    def forward(self, input: Tensor) -> Tensor:
        passes, self.passes = int(cast(Tensor, self.passes)), None
        self.passes = torch.tensor(passes + 1)
        return super().forward(input)


class Several(nn.Module):
    """Returns several outputs, as models with an auxiliary head do.

    Args:
        kind: ``dict`` of out and aux, ``out`` of out alone, ``tuple``, ``list``, ``named``, ``none`` or ``training``:
            a named tuple, but a tensor in evaluations.
    """

    def __init__(self, in_features: int, hidden_features: int, out_features: int, kind: str) -> None:
        super().__init__()
        self.net, self.kind = Toy(in_features, hidden_features, out_features), kind

    def forward(self, input: Tensor) -> Any:
        out = self.net(input)
        match self.kind:
            case "dict":
                return {"aux": out + 1, "out": out}
            case "out":
                return OrderedDict(out=out)
            case "tuple":
                return out, out + 1
            case "list":
                return [out + 1, out]
            case "none":
                return None
        return out if self.kind == "training" and not self.training else Outputs(out, out + 1)


class Outputs(NamedTuple):
    """Of a model with an auxiliary head."""

    logits: Tensor
    aux_logits: Tensor


class Gathering(nn.Linear):
    """Takes the mean over the outputs of all ranks, as a contrastive loss takes other ranks' samples."""

    def forward(self, inputs: Tensor) -> Tensor:
        output = super().forward(inputs)
        if not dist.is_initialized():
            return output
        all_ = [torch.zeros_like(output) for _ in range(dist.get_world_size())]
        dist.all_gather(all_, output.detach())
        return output - torch.stack(all_).mean()


class Contrast(nn.Sequential):
    """Has such a layer."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(nn.Linear(in_features, hidden_features), nn.ReLU(), Gathering(hidden_features, out_features))


class OverRanks(nn.MSELoss):
    """In training takes the loss beside the mean over ranks."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = super().forward(outputs, targets)
        if loss.requires_grad and dist.is_initialized():
            dist.all_reduce(mean := loss.detach().clone())
            loss = loss * mean / dist.get_world_size()
        return loss


class ScheduleFree(torch.optim.Optimizer):
    """SGD whose steps start from between its average and its iterate (Defazio et al., 2024), with two modes."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "training": False})

    @torch.no_grad()
    def _move(self, training: bool) -> None:
        for group in self.param_groups:
            share = 1 - group["beta"] if training else 1 - 1 / group["beta"]
            for each in group["params"] if group["training"] != training else ():
                if "iterate" in self.state[each]:
                    each.lerp_(self.state[each]["iterate"], share)
            group["training"] = training

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["training"]
            for each in group["params"]:
                state = self.state[each]
                iterate = state.setdefault("iterate", each.clone())
                state["steps"] = state.get("steps", 0) + 1
                average = each.lerp(iterate, 1 - 1 / group["beta"])
                iterate.sub_(each.grad, alpha=group["lr"])
                each.copy_(average.lerp_(iterate, 1 / state["steps"]).lerp(iterate, 1 - group["beta"]))


class Remembering(torch.optim.Optimizer):
    """Keeps other dtypes than the parameters', a list, a text, and a count under a name."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Follow an average that is decayed more and more, where a mask allows it."""
        self.state["steps"] = steps = self.state.get("steps", 0) + 1  # type: ignore[call-overload]
        for parameter in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            own = self.state[parameter]
            if not own:
                zeros = torch.zeros_like(parameter, dtype=torch.float64)
                own.update(means=[zeros, zeros.clone()], mask=zeros == 0, kind="mean")
            for mean, decay in zip(own["means"], (0.5, 0.9), strict=True):
                mean.mul_(decay).add_(parameter.grad)
            assert own["kind"] == "mean"
            parameter[own["mask"]] -= (sum(own["means"])[own["mask"]] * (0.02 / (1 + 0.1 * steps))).to(parameter)


class SlowToStart(Callback):
    """Takes its time before the first step."""

    def __init__(self, sleep_s: float) -> None:
        self.sleep_s = sleep_s

    def on_start(self, directory: Path | None, task: nn.Module) -> None:
        time.sleep(self.sleep_s)
