"""Models whose gradients and buffers are awkward to add up."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_recipes.models import Toy
from ddp_recipes.tasks import StepOutput, Task


class Sometimes(Toy):
    """Uses one layer only where the batch says so, and another one never."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.rare, self.never = nn.Linear(in_features, out_features), nn.Linear(2, 2)

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        return output + self.rare(input) if input.mean() > 0.2 else output


class Seeding(Toy):
    """Seeds torch in its forward pass, or, ``put_back``, for a while."""

    def __init__(self, put_back: bool = False, **sizes: int) -> None:
        super().__init__(**sizes)
        self.put_back = put_back

    def forward(self, input: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[], enabled=self.put_back):
            torch.seed()
        return nn.functional.dropout(super().forward(input), 0.1, self.training)


class Keeping(Toy):
    """Keeps the mean of what it saw in a new tensor each time, a count, and what never changes; learns a number."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.register_buffer("mean", torch.zeros(in_features))
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        self.register_buffer("tenth", torch.tensor(0.1))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.mean = self.mean + input.mean(dim=0)
            self.batches += 1
        return super().forward((input - self.mean) * self.scale)


class Growing(Toy):
    """Has a buffer that gets another row in each pass, as those of observers do."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.register_buffer("seen", torch.zeros(0, in_features))

    def forward(self, input: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, input.detach().mean(dim=0, keepdim=True)])
        return super().forward(input)


class FromFirst(Toy):
    """Takes a buffer, or a parameter, from the first batch that it sees, in whichever mode: as a codebook begins.

    It counts evaluations.
    """

    def __init__(self, in_features: int, hidden_features: int, out_features: int, writes: bool = False) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.register_buffer("begun", torch.tensor(False))
        self.register_buffer("shift", torch.zeros(in_features))
        self.register_buffer("evaluated", torch.tensor(0))
        self.scale, self.writes = nn.Parameter(torch.ones(in_features)), writes

    def forward(self, input: Tensor) -> Tensor:
        self.evaluated += not self.training
        if not self.begun:
            self.begun.fill_(True)
            self.shift.copy_(input.mean(dim=0))
            if self.writes:
                self.scale.data.copy_(1 / (1 + self.shift.abs()))
        return super().forward((input - self.shift) * self.scale)


class TurnsRound(Toy):
    """Runs its blocks the other way round on rank 1 from its sixth training batch on."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.blocks, self.batches = nn.ModuleList(nn.Linear(out_features, out_features) for _ in range(2)), 0

    def forward(self, input: Tensor) -> Tensor:
        self.batches += self.training
        turned = self.batches > 5 and torch.distributed.get_rank() == 1
        output = super().forward(input)
        for number in (1, 0) if turned else (0, 1):
            output = self.blocks[number](output)
        return output


class Sparse(Toy):
    """Has sparse gradients."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.words = nn.Embedding(10, 2, sparse=True)


class Forgotten(Toy):
    """Has a buffer that follows each replica's own samples, and that its output does not need."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.register_buffer("latest", torch.zeros(in_features))

    def forward(self, input: Tensor) -> Tensor:
        self.latest.copy_(input[0])
        return super().forward(input)


class ScaledTwice(Task):
    """Divides its loss by the number of ranks, although the ranks' gradients are averaged."""

    def training_step(self, batch: tuple[Tensor, Tensor]) -> StepOutput:
        output = super().training_step(batch)
        return output._replace(loss=output.loss / _ranks())


class HeadScaled(Toy):
    """Scales the gradient of one layer by the number of ranks."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.net2.bias.register_hook(lambda gradient: gradient * _ranks())


def _ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


class Steep(Toy):
    """Has a first unit whose gradients are 1000 times too large: in 16 bits they overflow before the others do."""

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.net1(input.flatten(1))
        steep = hidden[:, :1] * 1000 - (hidden[:, :1] * 999).detach()
        output: Tensor = self.net2(self.relu(torch.cat([steep, hidden[:, 1:]], dim=1)))
        return output


class Spinning(Toy):
    """Has complex parameters."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.phases = nn.Parameter(torch.ones(3, dtype=torch.complex64))


class Eight(Toy):
    """Trains parameters of 8 bits."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.bits = nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn))


class Double(Toy):
    """Has parameters of two types beside each other."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.net1.bias = nn.Parameter(torch.zeros(hidden_features, dtype=torch.float64))


class HalfOfIt(Toy):
    """Has its first layer in 16 bits."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.net1.to(torch.bfloat16)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.net2(self.relu(self.net1(input.flatten(1).bfloat16())).float())
        return output


class Apart(Toy):
    """Places itself, half of it nowhere."""

    def __init__(self, devices: list[torch.device], in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.net2.to("meta")


class Ready(nn.Sequential):
    """Is wrapped for one process by its author."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(nn.DataParallel(Toy(in_features, hidden_features, out_features)))


class Listed(Toy):
    """Has its layers in a list, too."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.nets = nn.ModuleList([self.net1, self.net2])


class Held(nn.Module):
    """Has heads in a dict, and a number by itself in another."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__()
        self.net = nn.Linear(in_features, hidden_features)
        self.heads = nn.ModuleDict({"one": nn.Linear(hidden_features, out_features)})
        self.scales = nn.ParameterDict({"one": nn.Parameter(torch.ones(1))})

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = self.heads["one"](self.net(input.flatten(1))) * self.scales["one"]
        return found


class Around(Toy):
    """Takes a layer's parameters and leaves the layer out."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(self.relu(self.net1(input.flatten(1))), self.net2.weight, self.net2.bias)


class Shifted(Toy):
    """Adds a buffer between two layers, of which one is in a block with it."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.register_buffer("shift", torch.ones(hidden_features))

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.net2(self.relu(self.net1(input.flatten(1)) + self.shift))
        return output


class Normed(torch.optim.SGD):
    """Steps by another method than torch's own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """Adds noise to what it learns, as Langevin dynamics do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.01 * random.random() * np.random.rand())
        return found


class Tied(Toy):
    """Has one parameter in two layers."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.net2.weight = self.net1.weight


class Transposed(Toy):
    """Has a parameter that does not lie in memory in its order."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.net1.weight = nn.Parameter(self.net1.weight.detach().t().contiguous().t())


class Empty(Toy):
    """Has a parameter without numbers."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.nothing = nn.Parameter(torch.zeros(0, 4))


class Late(Toy):
    """Bounds a gradient once it is there."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.net1.weight.register_post_accumulate_grad_hook(self.bound)  # type: ignore[no-untyped-call]

    def bound(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.clamp_(-0.001, 0.001)


class Known(nn.Parameter):
    """A parameter that code tells from others by its class."""


class Told(Toy):
    """Has one."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.net1.weight = Known(self.net1.weight.detach())


class Scaled(Toy):
    """Has a parameter that is a number."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, input: Tensor) -> Tensor:
        return self.scale * super().forward(input)


class Counting(Toy):
    """Counts what it is called for, outside of its tensors; its output depends on that only after a hundred passes.

    Args:
        where: ``attribute``, ``dict``, ``class``, ``global`` or ``samples``, whose number it counts; ``late``: an
            attribute that comes with the first pass. ``notes``: it counts nothing, but notes what a batch was.
    """

    passes = 0

    def __init__(self, in_features: int, hidden_features: int, out_features: int, where: str) -> None:
        super().__init__(in_features, hidden_features, out_features)
        self.where, self.seen, self.stats = where, 0, {"passes": 0}

    def forward(self, input: Tensor) -> Tensor:
        global PASSES
        match self.where:
            case "attribute":
                self.seen += 1
            case "late":
                self.since = getattr(self, "since", 0) + 1
            case "dict":
                self.stats["passes"] += 1
            case "class":
                type(self).passes += 1
            case "global":
                PASSES += 1
            case "samples":
                self.seen += len(input)
        if self.where == "notes":
            self.size, self.mean, self.inputs, self.shape = len(input), input.mean().item(), input, input.shape
        output = super().forward(input)
        late = max(self.seen, self.stats["passes"], self.passes, PASSES, getattr(self, "since", 0)) > 100
        return output * 0.5 if late and self.where != "samples" else output


PASSES = 0


class CountingTask(Task):
    """Counts its steps."""

    steps = 0

    def training_step(self, batch: Any) -> StepOutput:
        self.steps += 1
        return super().training_step(batch)
