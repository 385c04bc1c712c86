"""Models of a user's own for runs in a pipeline."""

import json
import os
from pathlib import Path
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torchvision.models import resnet18

from ddp_recipes.tasks import StepOutput, Task


class Encoder(nn.Module):
    """A transformer's encoder on a vector as tokens of one number, with parameters of its own and a mask."""

    def __init__(self, in_features: int, out_features: int, blocks: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.position = nn.Parameter(torch.randn(in_features, 8) * 0.1)
        layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(8, out_features)

    def forward(self, input: Tensor) -> Tensor:
        mask = input < -2  # computed from the inputs: each stage does that itself
        tokens = self.embed(input.unsqueeze(-1)) + self.position
        tokens = self.encoder(tokens, src_key_padding_mask=mask)
        output: Tensor = self.head(tokens.mean(dim=1))
        return output


class Chain(nn.Sequential):
    """A plain chain, with a block that works in place and one that drops."""

    def __init__(self, in_features: int, out_features: int, dropout: float = 0.0) -> None:
        super().__init__(
            nn.Linear(in_features, 16),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(16, 16),
            nn.Tanh(),
            nn.Linear(16, 16),
            nn.ReLU(inplace=True),
            nn.Linear(16, out_features),
        )


class Penalty(Task):
    """Adds a penalty on the gradient of outputs by inputs (WGAN-GP), which goes back through all of the model."""

    def training_step(self, batch: Any) -> StepOutput:
        inputs, targets = batch
        outputs = self.model(inputs.requires_grad_())
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        output = self.training_output(outputs, targets)
        return output._replace(loss=output.loss + (slope.norm(dim=1) - 1).square().mean())


class Checkpointed(nn.Module):
    """Runs each of its blocks in a checkpoint of torch's, in an order that it may draw, or segments of several."""

    def __init__(
        self, in_features: int, out_features: int, reentrant: bool = False, shuffled: bool = False, segments: int = 0
    ) -> None:
        super().__init__()
        self.reentrant, self.shuffled, self.segments = reentrant, shuffled, segments
        self.start = nn.Linear(in_features, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, out_features)

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.start(input)
        if self.segments:
            hidden = checkpoint_sequential([*self.blocks], self.segments, hidden, use_reentrant=False)
            return cast(Tensor, self.head(hidden))
        order = torch.randperm(4).tolist() if self.shuffled and self.training else range(4)
        for number in order:
            hidden = checkpoint(self.blocks[number], hidden, use_reentrant=self.reentrant)
        output: Tensor = self.head(hidden)
        return output


class Images(nn.Module):
    """A residual network with batch norm on a vector as a tiny image."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.net = resnet18(num_classes=out_features)

    def forward(self, input: Tensor) -> Tensor:
        image = input[:, :1, None, None] * torch.ones(3, 32, 32) + input[:, 1:4, None, None]
        output: Tensor = self.net(image)
        return output


class Tied(nn.Module):
    """Two blocks with one weight."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.first = nn.Linear(in_features, in_features)
        self.second = nn.Linear(in_features, in_features)
        self.last = nn.Linear(in_features, out_features)
        self.second.weight = self.first.weight

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.last(self.second(self.first(input)))
        return output


class Skip(nn.Module):
    """What the first block gives is needed by the last one; with ``doubled`` the one between is not given it."""

    def __init__(self, in_features: int, out_features: int, doubled: bool = False) -> None:
        super().__init__()
        self.doubled = doubled
        self.first = nn.Linear(in_features, 8)
        self.second = nn.Linear(8, 8)
        self.last = nn.Bilinear(8, 8, out_features)

    def forward(self, input: Tensor) -> Tensor:
        first = self.first(input)
        output: Tensor = self.last(first, self.second(2 * first if self.doubled else first))
        return output


class Recurrent(nn.Module):
    """Two LSTM on a vector as a sequence of numbers, of which each keeps weak references to its weights."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 6)
        self.first = nn.LSTM(6, 8, num_layers=2, batch_first=True)
        self.second = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, out_features)

    def forward(self, input: Tensor) -> Tensor:
        outputs, _ = self.first(self.embed(input.unsqueeze(-1)))
        outputs, _ = self.second(outputs)
        output: Tensor = self.head(outputs[:, -1])
        return output


class UNet(nn.Module):
    """Skip connections from the way down to the way up, on a tensor that is made on the CPU whatever the inputs are."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, padding=1)
        self.lower = nn.Conv2d(4, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.join = nn.Conv2d(8, 4, 3, padding=1)
        self.head = nn.Linear(4, out_features)

    def forward(self, input: Tensor) -> Tensor:
        down = self.down(input[:, :1, None, None] * torch.ones(1, 8, 8))
        up = self.up(self.lower(nn.functional.max_pool2d(down, 2)))
        output: Tensor = self.head(self.join(torch.cat([up, down], 1)).mean((2, 3)))
        return output


class Moving(nn.Module):
    """Takes what its first block gives to the device of what its second one does."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.first = nn.Linear(in_features, 16)
        self.second = nn.Linear(16, 16)
        self.last = nn.Linear(16, out_features)

    def forward(self, input: Tensor) -> Tensor:
        first = self.first(input)
        second = self.second(first)
        output: Tensor = self.last(second + first.to(second.device))
        return output


class Deciding(nn.Module):
    """Its flow depends on what its first block gives, or on the inputs alone."""

    def __init__(self, in_features: int, out_features: int, by_inputs: bool = False) -> None:
        super().__init__()
        self.by_inputs = by_inputs
        self.first = nn.Linear(in_features, 16)
        self.second = nn.Linear(16, 16)
        self.last = nn.Linear(16, out_features)

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.first(input)
        if (input if self.by_inputs else hidden).abs().max() > -1:
            hidden = torch.relu(hidden)
        output: Tensor = self.last(self.second(hidden))
        return output


class Noted(nn.Sequential):
    """Two or more linear layers that note, each in a file of its own, when they run forward and backward."""

    def __init__(self, in_features: int, out_features: int, folder: str, blocks: int = 2) -> None:
        sizes = [in_features, *[8] * (blocks - 1), out_features]
        super().__init__(*(_Noting(sizes[at], sizes[at + 1], at, folder) for at in range(blocks)))


class _Noting(nn.Linear):
    def __init__(self, in_features: int, out_features: int, stage: int, folder: str) -> None:
        super().__init__(in_features, out_features)
        self.stage, self.folder = stage, folder
        self.seen = 0

    def note(self, kind: str, number: int) -> None:
        with (Path(self.folder) / str(os.getpid())).open("a") as file:
            file.write(json.dumps([kind, self.stage, number]) + "\n")

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        if not self.training or output.is_meta or type(output) is not Tensor:  # a look at shapes alone
            return output
        number, self.seen = self.seen, self.seen + 1
        self.note("F", number)

        def backward(gradient: Tensor) -> None:
            self.note("B", number)

        output.register_hook(backward)
        return output


class Hooked(Chain):
    """Has hooks of gradients: of blocks, and, if ``late``, of a parameter; and a lock that no copy may have."""

    def __init__(self, in_features: int, out_features: int, late: bool = False, locked: bool = False) -> None:
        super().__init__(in_features, out_features)
        self.lock = Lock() if locked else None
        self[3].register_full_backward_hook(self.halved)
        self[7].register_full_backward_pre_hook(self.halved_before)
        if late:
            self[5].weight.register_post_accumulate_grad_hook(self.halved_late)

    @staticmethod
    def halved(module: nn.Module, given: Any, output: Any) -> Any:
        return tuple(each / 2 for each in given)

    @staticmethod
    def halved_before(module: nn.Module, output: Any) -> Any:
        return tuple(each / 2 for each in output)

    @staticmethod
    def halved_late(parameter: Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad /= 2


class Exploding(Chain):
    """Its last block gives NaN from some training step on."""

    def __init__(self, in_features: int, out_features: int, after: int) -> None:
        super().__init__(in_features, out_features)
        self.append(_Exploding(after))


class _Exploding(nn.Module):
    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input: Tensor) -> Tensor:
        self.after -= self.training and not input.is_meta
        return input * self.scale * (float("nan") if self.after < 0 else 1.0)


class Frozen(Chain):
    """Its first blocks are not trained, and one does not drop."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, dropout=0.3)
        self[2].eval()
        for parameter in (*self[0].parameters(), *self[3].parameters()):
            parameter.requires_grad_(False)


class _Angles(nn.Module):
    """Has a table that no checkpoint has."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("rates", torch.arange(1.0, size + 1) / size, persistent=False)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        turns = torch.arange(hidden.shape[0], device=hidden.device)[:, None] * 0 + self.rates.to(hidden.device)
        return turns.cos(), turns.sin()


class _Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, hidden: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = turns
        return hidden + torch.tanh(self.layer(hidden * cos + hidden.roll(1, -1) * sin))


class Rotary(nn.Module):
    """As a language model of Transformers: its table of angles is registered last, used first, and given to each block.

    With ``asking`` it looks at values of a mask, but not at those of a tensor by which somebody traces it.
    """

    def __init__(self, in_features: int, out_features: int, asking: bool = False) -> None:
        super().__init__()
        self.asking = asking
        self.embed = nn.Linear(in_features, 16)
        self.layers = nn.ModuleList(_Turned() for _ in range(5))
        self.angles = _Angles(16)
        self.head = nn.Linear(16, out_features)

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.embed(input)
        mask = torch.ones(len(input), 1, dtype=torch.bool, device=hidden.device)
        if self.asking and not isinstance(mask, FakeTensor) and not mask.all():
            hidden = hidden * mask
        turns = self.angles(hidden)
        for layer in self.layers:
            hidden = layer(hidden, turns=turns)
        output: Tensor = self.head(hidden)
        return output
