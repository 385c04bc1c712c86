"""Small models of many kinds, [n, in_features] to [n, out_features]: each has something that strategies may break.

Those that are ``Mixed`` depend on which samples are in a batch together, or on random numbers of their own.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint


class Mixed:
    """Marks a model whose outputs depend on the batch, or on random numbers."""


class Sizes(nn.Module):
    """What all of them are made with."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__()
        self.start, self.head = nn.Linear(in_features, 16), nn.Linear(16, out_features)
        self.make()

    def make(self) -> None:
        """Make what is between the first layer and the last one."""

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.head(self.between(self.start(inputs.flatten(1))))
        return output

    def between(self, hidden: Tensor) -> Tensor:
        """Return what becomes of [n, 16], in the same shape."""
        return hidden


def layer() -> nn.Sequential:
    """A block."""
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh())


# --- convolutions, skip connections ----------------------------------------------------------------------------------


class UNet(Sizes):
    def make(self) -> None:
        self.down = nn.ModuleList([nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1, stride=2)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 1, 3, padding=1)])

    def between(self, hidden: Tensor) -> Tensor:
        first = self.down[0](hidden.view(-1, 1, 4, 4)).relu()
        up = self.up[0](self.down[1](first).relu())
        return self.up[1](torch.cat([up, first], dim=1)).flatten(1)


class Dense(Sizes):
    """Each layer sees all before it."""

    def make(self) -> None:
        self.layers = nn.ModuleList(nn.Linear(16 + 4 * number, 4) for number in range(3))
        self.join = nn.Linear(28, 16)

    def between(self, hidden: Tensor) -> Tensor:
        found = [hidden]
        for each in self.layers:
            found.append(each(torch.cat(found, dim=1)).relu())
        return self.join(torch.cat(found, dim=1))


class ResidualInPlace(Sizes):
    def make(self) -> None:
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True)) for _ in range(2)))

    def between(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


class ConvNorm(Mixed, Sizes):
    def make(self) -> None:
        self.conv = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1))

    def between(self, hidden: Tensor) -> Tensor:
        return self.conv(hidden.view(-1, 1, 4, 4)).flatten(1)


class CumulativeNorm(Mixed, Sizes):
    def make(self) -> None:
        self.norm = nn.BatchNorm2d(1, momentum=None)

    def between(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden.view(-1, 1, 4, 4)).flatten(1)


class GroupNorms(Sizes):
    def make(self) -> None:
        self.blocks = nn.Sequential(nn.GroupNorm(4, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.SiLU())

    def between(self, hidden: Tensor) -> Tensor:
        return hidden + self.blocks(hidden)


class InstanceNorms(Mixed, Sizes):
    def make(self) -> None:
        self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)

    def between(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden.view(-1, 4, 4)).flatten(1)


# --- experts, routing, control flow ----------------------------------------------------------------------------------


class SoftExperts(Sizes):
    def make(self) -> None:
        self.gate = nn.Linear(16, 3)
        self.experts = nn.ModuleList(layer() for _ in range(3))

    def between(self, hidden: Tensor) -> Tensor:
        weights = self.gate(hidden).softmax(dim=1)
        return torch.stack([weights[:, i, None] * each(hidden) for i, each in enumerate(self.experts)]).sum(dim=0)


class RoutedExperts(Sizes):
    """Runs only the experts that a sample of the batch chooses."""

    def make(self) -> None:
        self.gate = nn.Linear(16, 3)
        self.experts = nn.ModuleList(layer() for _ in range(3))

    def between(self, hidden: Tensor) -> Tensor:
        weights, chosen = self.gate(hidden).softmax(dim=1).max(dim=1)
        output = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                output = output.index_add(0, rows, weights[rows, None] * expert(hidden[rows]))
        return output


class MaskedExperts(SoftExperts):
    """Runs all experts on all samples, and takes the best two."""

    def between(self, hidden: Tensor) -> Tensor:
        weights = self.gate(hidden).softmax(dim=1)
        weights = weights * (weights >= weights.topk(2, dim=1).values[:, -1:])
        return torch.stack([weights[:, i, None] * each(hidden) for i, each in enumerate(self.experts)]).sum(dim=0)


class Branching(Mixed, Sizes):
    """Takes one of two ways by the values of the batch."""

    def make(self) -> None:
        self.left, self.right = layer(), layer()

    def between(self, hidden: Tensor) -> Tensor:
        return self.left(hidden) if hidden.mean() > 0 else self.right(hidden)


class StochasticDepth(Mixed, Sizes):
    def make(self) -> None:
        self.blocks = nn.ModuleList(layer() for _ in range(4))

    def between(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or torch.rand(()) < 0.5:
                hidden = hidden + block(hidden)
        return hidden


class Shuffled(Mixed, Sizes):
    """Runs its blocks in an order that it draws."""

    def make(self) -> None:
        self.blocks = nn.ModuleList(layer() for _ in range(4))

    def between(self, hidden: Tensor) -> Tensor:
        order = torch.randperm(4).tolist() if self.training else range(4)
        for number in order:
            hidden = hidden + self.blocks[number](hidden)
        return hidden


class Adaptive(Mixed, Sizes):
    """Repeats a block until its values are small."""

    def make(self) -> None:
        self.block = layer()

    def between(self, hidden: Tensor) -> Tensor:
        for _ in range(5):
            hidden = self.block(hidden)
            if hidden.abs().mean() < 0.3:
                break
        return hidden


class LateHead(Sizes):
    """Uses a layer from its fourth training step on."""

    def make(self) -> None:
        self.early, self.late = layer(), nn.ModuleList([layer()])
        self.register_buffer("steps", torch.tensor(0))

    def between(self, hidden: Tensor) -> Tensor:
        self.steps += self.training
        hidden = self.early(hidden)
        return hidden + self.late[0](hidden) if self.steps > 3 else hidden


class TrainingHead(Sizes):
    """Has a head that only training uses."""

    def make(self) -> None:
        self.block, self.auxiliary = layer(), nn.Linear(16, 16)

    def between(self, hidden: Tensor) -> Tensor:
        found = self.block(hidden)
        return found + 0.1 * self.auxiliary(hidden) if self.training else found


# --- blocks that are called again ------------------------------------------------------------------------------------


class Shared(Sizes):
    def make(self) -> None:
        self.blocks = nn.ModuleList([layer(), layer()])

    def between(self, hidden: Tensor) -> Tensor:
        for number in (0, 1, 0, 0):
            hidden = hidden + self.blocks[number](hidden)
        return hidden


class Siamese(Sizes):
    def make(self) -> None:
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def between(self, hidden: Tensor) -> Tensor:
        left, right = (self.encoder(each) for each in hidden.chunk(2, dim=1))
        return torch.cat([left * right, (left - right).abs()], dim=1)


class Pyramid(Sizes):
    """One head over several levels."""

    def make(self) -> None:
        self.levels, self.heads = nn.ModuleList(layer() for _ in range(3)), nn.ModuleList([nn.Linear(16, 16)])

    def between(self, hidden: Tensor) -> Tensor:
        found = []
        for level in self.levels:
            hidden = level(hidden)
            found.append(self.heads[0](hidden))
        return torch.stack(found).mean(dim=0)


class Equilibrium(Sizes):
    def make(self) -> None:
        self.blocks = nn.ModuleList([nn.Linear(16, 16)])

    def between(self, hidden: Tensor) -> Tensor:
        state = torch.zeros_like(hidden)
        for _ in range(6):
            state = (0.5 * self.blocks[0](state) + hidden).tanh()
        return state


class Partly(Sizes):
    """Calls a block twice, each time another part of it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.both, self.second = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, hidden: Tensor, first: bool) -> Tensor:
            return self.both((self.first if first else self.second)(hidden))

    def make(self) -> None:
        self.blocks = nn.ModuleList([self.Block()])

    def between(self, hidden: Tensor) -> Tensor:
        return self.blocks[0](self.blocks[0](hidden, True).tanh(), False)


class SharedAndChecked(Shared):
    """Computes the activations of shared blocks again."""

    def between(self, hidden: Tensor) -> Tensor:
        for number in (0, 1, 0):
            hidden = hidden + checkpoint(self.blocks[number], hidden, use_reentrant=False)
        return hidden


# --- sequences, attention --------------------------------------------------------------------------------------------


class Recurrent(Sizes):
    def make(self) -> None:
        self.lstm = nn.LSTM(4, 4, num_layers=2, batch_first=True)

    def between(self, hidden: Tensor) -> Tensor:
        return self.lstm(hidden.view(-1, 4, 4))[0].flatten(1)


class Cells(Sizes):
    def make(self) -> None:
        self.cells = nn.ModuleList([nn.GRUCell(4, 16)])

    def between(self, hidden: Tensor) -> Tensor:
        state = torch.zeros_like(hidden)
        for each in hidden.view(-1, 4, 4).unbind(1):
            state = self.cells[0](each, state)
        return state


class Attending(Sizes):
    """Has attention itself as a block, called with one tensor three times."""

    def make(self) -> None:
        self.layers = nn.ModuleList(nn.MultiheadAttention(4, 2, batch_first=True) for _ in range(2))

    def between(self, hidden: Tensor) -> Tensor:
        sequence = hidden.view(-1, 4, 4)
        for each in self.layers:
            sequence = sequence + each(sequence, sequence, sequence, need_weights=False)[0]
        return sequence.flatten(1)


class Borrowed(nn.Module):
    """Uses the weight of its projection with a bias of its own, and never calls it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project, self.shift = nn.Linear(width, width, bias=False), nn.Parameter(torch.zeros(width))
        self.after = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.after(nn.functional.linear(hidden, self.project.weight, self.shift).tanh())


class Borrowing(Sizes):
    def make(self) -> None:
        self.layers = nn.Sequential(Borrowed(16), Borrowed(16))

    def between(self, hidden: Tensor) -> Tensor:
        return self.layers(hidden)


class Factors(nn.ParameterDict):
    """Numbers that others read: it has no forward."""

    def of(self, hidden: Tensor) -> Tensor:
        return hidden @ self["left"] @ self["right"]


class NeverCalled(Sizes):
    """Has a list and a dict of parameters."""

    def make(self) -> None:
        self.inner = layer()
        self.scales = nn.ParameterList([torch.randn(16, 16) / 4, torch.randn(16, 16) / 4])
        self.factors = Factors({"left": torch.randn(16, 8) / 4, "right": torch.randn(8, 16) / 4})

    def between(self, hidden: Tensor) -> Tensor:
        return self.inner(self.factors.of(hidden @ self.scales[0]).tanh() @ self.scales[1])


class CrossAttending(Sizes):
    def make(self) -> None:
        self.layers = nn.ModuleList([nn.MultiheadAttention(4, 2, batch_first=True)])

    def between(self, hidden: Tensor) -> Tensor:
        sequence, other = hidden.view(-1, 4, 4), hidden.view(-1, 4, 4).flip(1)
        return self.layers[0](sequence, key=other, value=other)[0].flatten(1)


class Repeated(Sizes):
    """Calls a block with what the same block gave, as Albert does."""

    def make(self) -> None:
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), nn.Linear(4, 4)])

    def between(self, hidden: Tensor) -> Tensor:
        sequence = hidden.view(-1, 4, 4)
        for number in (0, 0, 0, 1, 1, 0):
            sequence = self.layers[number](sequence)
        return sequence.flatten(1)


class EncoderDecoder(Sizes):
    """What the encoder gives is used twice by each block of the decoder, and beside them."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, sequence: Tensor, memory: Tensor) -> Tensor:
            found = F.scaled_dot_product_attention(self.query(sequence), self.key(memory), self.value(memory))
            return sequence + found

    def make(self) -> None:
        self.encoder = nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)])
        self.decoder = nn.ModuleList(self.Block() for _ in range(3))

    def between(self, hidden: Tensor) -> Tensor:
        memory = self.encoder[0](hidden.view(-1, 4, 4))
        sequence = memory.flip(1)
        for block in self.decoder:
            sequence = block(sequence, memory)
        return (sequence + memory).flatten(1)


class Encoder(Mixed, Sizes):
    """torch's own transformer, with dropout."""

    def make(self) -> None:
        one = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, batch_first=True)
        self.encoder = nn.TransformerEncoder(one, 2, enable_nested_tensor=False)

    def between(self, hidden: Tensor) -> Tensor:
        return self.encoder(hidden.view(-1, 4, 4)).flatten(1)


class VisionTransformer(Sizes):
    """Has a token and positions of its own."""

    def make(self) -> None:
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 5, 4))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True) for _ in range(2))

    def between(self, hidden: Tensor) -> Tensor:
        sequence = torch.cat([self.token.expand(len(hidden), -1, -1), hidden.view(-1, 4, 4)], dim=1) + self.positions
        for block in self.blocks:
            sequence = block(sequence)
        return sequence[:, 1:].flatten(1)


class Words(Sizes):
    """Looks up what its inputs round to; input and output embeddings are one."""

    def make(self) -> None:
        self.words, self.out = nn.Embedding(8, 16), nn.Linear(16, 8, bias=False)
        self.out.weight = self.words.weight

    def between(self, hidden: Tensor) -> Tensor:
        found = self.words(hidden[:, :4].abs().mul(2).long().clamp(max=7)).mean(dim=1)
        return hidden + (self.out(found + hidden) @ self.words.weight).tanh()


class DenseWords(Sizes):
    def make(self) -> None:
        self.words = nn.Embedding(8, 16)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden + self.words(hidden[:, 0].abs().mul(2).long().clamp(max=7))


class SparseWords(DenseWords):
    """Has sparse gradients, of the very values that come to the layer before."""

    def make(self) -> None:
        self.words = nn.Embedding(8, 16, sparse=True)


class FunctionalSparse(DenseWords):
    """Has sparse gradients that no module tells of."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden + F.embedding(hidden[:, 0].abs().mul(2).long().clamp(max=7), self.words.weight, sparse=True)


class Bag(Sizes):
    def make(self) -> None:
        self.bag = nn.EmbeddingBag(8, 16)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden + self.bag(hidden[:, :4].abs().mul(2).long().clamp(max=7))


# --- parameters ------------------------------------------------------------------------------------------------------


class WeightNorm(Sizes):
    def make(self) -> None:
        self.blocks = nn.Sequential(parametrizations.weight_norm(nn.Linear(16, 16)), nn.Tanh())

    def between(self, hidden: Tensor) -> Tensor:
        return self.blocks(hidden)


class Pruned(Sizes):
    """Computes a weight before each pass, and keeps it as an attribute."""

    def make(self) -> None:
        self.blocks = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        prune.l1_unstructured(self.blocks[0], "weight", amount=0.3)

    def between(self, hidden: Tensor) -> Tensor:
        return self.blocks(hidden)


class Lazy(Sizes):
    """Has layers that learn their sizes of what they are called with."""

    def make(self) -> None:
        self.blocks = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(16))

    def between(self, hidden: Tensor) -> Tensor:
        return self.blocks(hidden)


class SpectralNorm(Mixed, Sizes):
    """Its vectors move with each pass, so with the number of shards."""

    def make(self) -> None:
        self.blocks = nn.Sequential(parametrizations.spectral_norm(nn.Linear(16, 16)), nn.Tanh())

    def between(self, hidden: Tensor) -> Tensor:
        return self.blocks(hidden)


class Orthogonal(Sizes):
    def make(self) -> None:
        self.blocks = nn.Sequential(parametrizations.orthogonal(nn.Linear(16, 16)), nn.Tanh())

    def between(self, hidden: Tensor) -> Tensor:
        return self.blocks(hidden)


class Symmetric(Sizes):
    """Has a parametrization of its own."""

    class Half(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).T

    def make(self) -> None:
        self.blocks = nn.Sequential(nn.Linear(16, 16))
        parametrize.register_parametrization(self.blocks[0], "weight", self.Half())

    def between(self, hidden: Tensor) -> Tensor:
        return self.blocks(hidden)


class Frozen(Sizes):
    def make(self) -> None:
        self.backbone, self.tuned = nn.Sequential(layer(), layer()).requires_grad_(False), layer()

    def between(self, hidden: Tensor) -> Tensor:
        return self.tuned(self.backbone(hidden))


class FrozenWithin(Sizes):
    """Each block has a frozen weight, and two small ones beside it, as LoRA has."""

    def make(self) -> None:
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 2), nn.Linear(2, 16)]) for _ in "ab"
        )
        for each in self.blocks:
            each[0].requires_grad_(False)

    def between(self, hidden: Tensor) -> Tensor:
        for whole, down, up in self.blocks:
            hidden = whole(hidden) + up(down(hidden))
        return hidden


class Unused(Sizes):
    def make(self) -> None:
        self.block, self.spare = layer(), nn.Linear(3, 3)

    def between(self, hidden: Tensor) -> Tensor:
        return self.block(hidden)


class Listed(Sizes):
    def make(self) -> None:
        self.weights = nn.ParameterList(torch.randn(16, 16) / 4 for _ in range(2))
        self.named = nn.ParameterDict({"shift": torch.zeros(16), "scale": torch.ones(16)})

    def between(self, hidden: Tensor) -> Tensor:
        for weight in self.weights:
            hidden = (hidden @ weight).tanh()
        return hidden * self.named["scale"] + self.named["shift"]


class Single(Sizes):
    """Has a parameter that is a number."""

    def make(self) -> None:
        self.scale = nn.Parameter(torch.tensor(1.5))

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale


class One(Sizes):
    """Has parameters of fewer rows than there are ranks."""

    def make(self) -> None:
        self.scale, self.rows = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(2, 16))

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale + self.rows.sum(dim=0)


class Constant(Sizes):
    """Returns a parameter of its own, whatever comes in."""

    def make(self) -> None:
        self.answer = nn.Parameter(torch.randn(1, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.answer.expand(len(inputs), 5)


class Codebook(Sizes):
    """Has a block that returns its own parameter."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.randn(4, 16))

        def forward(self) -> Tensor:
            return self.rows

    def make(self) -> None:
        self.tables = nn.ModuleList(self.Table() for _ in range(2))

    def between(self, hidden: Tensor) -> Tensor:
        first, second = (table() for table in self.tables)
        return (hidden @ first.T).softmax(dim=1) @ second


class Hyper(Sizes):
    """Makes the weights of a layer."""

    def make(self) -> None:
        self.makers = nn.ModuleList([nn.Linear(16, 16 * 16)])

    def between(self, hidden: Tensor) -> Tensor:
        weights = self.makers[0](hidden).view(-1, 16, 16) / 16
        return (weights @ hidden[:, :, None])[:, :, 0]


class Complex(Sizes):
    """Has complex parameters."""

    def make(self) -> None:
        self.phases = nn.Parameter(torch.randn(16, dtype=torch.complex64))

    def between(self, hidden: Tensor) -> Tensor:
        return (torch.fft.fft(hidden) * self.phases).real


class Spectral(Sizes):
    """Computes with complex numbers, of real parameters."""

    def make(self) -> None:
        self.filters = nn.ParameterList([torch.randn(9, 2)])

    def between(self, hidden: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(hidden) * torch.view_as_complex(self.filters[0]), n=16)


class Double(Sizes):
    """Has a block in 64 bits."""

    def make(self) -> None:
        self.blocks = nn.ModuleList([layer().double()])

    def between(self, hidden: Tensor) -> Tensor:
        return self.blocks[0](hidden.double()).float()


class Bilinear(Sizes):
    def make(self) -> None:
        self.blocks = nn.ModuleList([nn.Bilinear(16, 16, 16)])

    def between(self, hidden: Tensor) -> Tensor:
        return self.blocks[0](hidden, hidden).tanh()


class Teacher(Sizes):
    """Keeps a mean of its own layer's weights, which it is pulled to."""

    def make(self) -> None:
        self.student, self.teacher = nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False)

    def between(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(hidden)
        return self.student(hidden) + 0.1 * target


# --- buffers ---------------------------------------------------------------------------------------------------------


class Kinds(Mixed, Sizes):
    """Has buffers of many dtypes, some of which move."""

    def make(self) -> None:
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("bytes", torch.arange(5, dtype=torch.uint8))
        self.register_buffer("wave", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("far", torch.zeros(16, dtype=torch.float64))
        self.register_buffer("bits", torch.zeros(16, dtype=torch.bfloat16))
        self.register_buffer("none", None)
        self.register_buffer("passing", torch.zeros(1), persistent=False)

    def between(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.flags[0] = True
            self.far = 0.9 * self.far + 0.1 * hidden.detach().double().mean(dim=0)
            self.bits.mul_(0.5).add_(hidden.detach().mean(dim=0).bfloat16())
            self.passing += 1
        return hidden - self.far.float()


class Eights(Sizes):
    """Has a buffer of 8-bit floats."""

    def make(self) -> None:
        self.register_buffer("codes", torch.ones(16).to(torch.float8_e4m3fn))

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * self.codes.float()


class Highest(Mixed, Sizes):
    """Has a buffer that starts at minus infinity, and one that keeps a mask of it."""

    def make(self) -> None:
        self.register_buffer("highest", torch.full((16,), float("-inf")))
        self.register_buffer("lowest", torch.full((), float("inf")))
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def between(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.highest = torch.maximum(self.highest, hidden.detach().amax(dim=0))
            self.lowest.copy_(torch.minimum(self.lowest, hidden.detach().min()))
        return hidden / (1 + self.highest.abs() + self.lowest.abs())


class Observed(Mixed, Sizes):
    """Has an observer of quantisation, whose buffers change their shape."""

    def make(self) -> None:
        from torch.ao.quantization import PerChannelMinMaxObserver

        self.observer = PerChannelMinMaxObserver(ch_axis=1)

    def between(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.observer(hidden.detach())
        return hidden.tanh()


class Grows(Mixed, Sizes):
    """Has a buffer that gets another row in each pass."""

    def make(self) -> None:
        self.register_buffer("seen", torch.zeros(0, 16))

    def between(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.seen = torch.cat([self.seen, hidden.detach().mean(dim=0, keepdim=True)])
        return hidden


# --- randomness, gradients of one's own ------------------------------------------------------------------------------


class Dropouts(Mixed, Sizes):
    def make(self) -> None:
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.AlphaDropout(0.1)) for _ in "ab"
        )

    def between(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Variational(Mixed, Sizes):
    def make(self) -> None:
        self.mean, self.spread = nn.Linear(16, 16), nn.Linear(16, 16)

    def between(self, hidden: Tensor) -> Tensor:
        mean, spread = self.mean(hidden), self.spread(hidden).tanh()
        return mean + (spread / 2).exp() * torch.randn_like(mean) if self.training else mean


class Reversed(Sizes):
    """Turns a gradient around."""

    class Turn(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor) -> Tensor:
            return hidden.view_as(hidden)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return -0.1 * gradient

    def make(self) -> None:
        self.blocks = nn.ModuleList([layer(), layer()])

    def between(self, hidden: Tensor) -> Tensor:
        return self.blocks[0](hidden) + self.blocks[1](self.Turn.apply(hidden))


class Hooked(Sizes):
    """Scales a gradient by a hook of a parameter."""

    def make(self) -> None:
        self.block = layer()
        self.block[0].weight.register_hook(lambda gradient: 0.5 * gradient)

    def between(self, hidden: Tensor) -> Tensor:
        return self.block(hidden)


_FACTORS: dict[str, float] = {}


class LookedUp(Sizes):
    """Looks up by the name of its class what a block does, as models of Transformers do."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(16, 16)
            _FACTORS[str(type(self))] = 2

        def forward(self, hidden: Tensor) -> Tensor:
            return self.net(hidden) * _FACTORS.get(str(type(self)), 1)

    def make(self) -> None:
        self.blocks = nn.Sequential(self.Block(), self.Block())

    def between(self, hidden: Tensor) -> Tensor:
        return self.blocks(hidden)


class Tagged(Sizes):
    """Its forward pass asks its parameters for attributes, and :func:`tagged_sgd` for others."""

    def make(self) -> None:
        self.blocks = nn.ModuleList([nn.Linear(16, 256), nn.Linear(256, 16)])  # large enough to be made without memory
        self.frozen, self.one = nn.Linear(16, 16).requires_grad_(False), nn.Parameter(torch.tensor(1.0))
        for number, each in enumerate((self.blocks[0].weight, self.blocks[1].bias, self.frozen.weight, self.one)):
            vars(each).update(factor=1 + number, rate=1 + 0.3 * number, decays=number != 1)

    def between(self, hidden: Tensor) -> Tensor:
        first, second = self.blocks
        hidden = second(first(hidden).tanh() * first.weight.factor) + second.bias.factor
        return (hidden + self.frozen(hidden) * self.frozen.weight.factor + self.one * self.one.factor).tanh()


def tagged_sgd(parameters: Iterable[nn.Parameter], lr: float, **options: Any) -> torch.optim.Optimizer:
    """Return an SGD that gives each parameter the rate and the decay that it asks for, as those of Mamba and S4 do."""
    groups = [
        {"params": [each], "lr": lr * getattr(each, "rate", 1), "weight_decay": 0.1 * getattr(each, "decays", True)}
        for each in parameters
    ]
    return torch.optim.SGD(groups, lr, momentum=options["momentum"])


def sized_sgd(parameters: Iterable[nn.Parameter], lr: float, **options: Any) -> torch.optim.Optimizer:
    """Return an SGD whose learning rates follow from how large a parameter is."""
    groups = [{"params": [each], "lr": lr / (1 + each.numel() % 7 + each.shape[0:1].numel())} for each in parameters]
    return torch.optim.SGD(groups, lr, momentum=options["momentum"])


class Flow(Sizes):
    """Runs each coupling forward, then back."""

    class Coupling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 8)

        def forward(self, hidden: Tensor, back: bool = False) -> Tensor:
            left, right = hidden.chunk(2, dim=1)
            moved = self.net(left).tanh()
            return torch.cat([left, right - moved if back else right + moved], dim=1)

    def make(self) -> None:
        self.blocks = nn.ModuleList(self.Coupling() for _ in range(2))

    def between(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden).flip(1)
        for block in self.blocks:
            hidden = 0.5 * hidden + 0.1 * block(hidden, back=True)
        return hidden


class Checked(Sizes):
    def make(self) -> None:
        self.blocks = nn.ModuleList([layer(), layer()])

    def between(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden


class InnerGradient(Sizes):
    """Takes a gradient in its forward pass, and goes on with it."""

    def make(self) -> None:
        self.energy = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def between(self, hidden: Tensor) -> Tensor:
        with torch.enable_grad():
            place = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(place).sum(), place, create_graph=self.training)
        return hidden - force


class Unrolled(InnerGradient):
    """Goes some steps down, and on with how far it came (Langevin dynamics, unrolled optimization)."""

    def between(self, hidden: Tensor) -> Tensor:
        for _ in range(2):
            hidden = hidden.tanh() + super().between(hidden)
        return hidden * (1 + self.energy(hidden))


class CalledAgain(InnerGradient):
    """Calls what it has taken a gradient through once more."""

    def between(self, hidden: Tensor) -> Tensor:
        moved = super().between(hidden)
        with torch.no_grad():
            level = self.energy(hidden)
        return moved + level


class InnerTransform(InnerGradient):
    """Takes that gradient by ``torch.func``."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden - torch.func.vmap(torch.func.grad(lambda place: self.energy(place).sum()))(hidden)


class Vectorised(Sizes):
    """Maps blocks over samples by ``torch.func``."""

    def make(self) -> None:
        self.blocks = nn.ModuleList([layer(), layer()])

    def between(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = hidden + torch.func.vmap(block)(hidden)
        return hidden


class Functional(Sizes):
    """Calls a block with other parameters than its own, made of them."""

    def make(self) -> None:
        self.blocks = nn.ModuleList([layer(), layer()])

    def between(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            others = {name: 1.5 * each for name, each in block.named_parameters()}
            hidden = hidden + torch.func.functional_call(block, others, (hidden,))
        return hidden


class Adapted(Functional, Mixed):
    """Calls a block with its own parameters, then with these after a step on them, by all of a batch (MAML)."""

    lenient = False

    def between(self, hidden: Tensor) -> Tensor:
        for block in self.blocks if torch.is_grad_enabled() else ():
            own = dict(block.named_parameters())
            loss = torch.func.functional_call(block, own, (hidden,)).square().mean()
            steps = torch.autograd.grad(loss, [*own.values()], create_graph=True, allow_unused=self.lenient)
            found = zip(own.items(), steps, strict=True)
            after = {name: each if step is None else each - 0.1 * step for (name, each), step in found}
            hidden = hidden + torch.func.functional_call(block, after, (hidden,))
        return hidden


class AdaptedIfUsed(Adapted):
    """Takes no step on parameters that have no gradient."""

    lenient = True


# --- what blocks take and return -------------------------------------------------------------------------------------


class Nested(Sizes):
    """Passes dicts, tuples and keywords, and one tensor twice."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(16, 16)

        def forward(
            self, state: dict[str, tuple[Tensor, Tensor]], *, scale: Tensor
        ) -> dict[str, tuple[Tensor, Tensor]]:
            new, old = state["pair"]
            again = new if new is old else old.tanh()
            return {"pair": (self.net(new) * scale + again, new)}

    def make(self) -> None:
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def between(self, hidden: Tensor) -> Tensor:
        state = {"pair": (hidden, hidden)}
        for block in self.blocks:
            state = block(state, scale=hidden.mean(dim=1, keepdim=True))
        return state["pair"][0]


class Heads(Sizes):
    """Adds several heads up."""

    def make(self) -> None:
        self.heads = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("depth", "normal", "class")})

    def between(self, hidden: Tensor) -> Tensor:
        found = {name: head(hidden) for name, head in self.heads.items()}
        return found["depth"].tanh() + found["normal"].sigmoid() * found["class"]


class Views(Sizes):
    """Its blocks return views of what they get."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 4)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.net(hidden.view(-1, 4, 4)).mT.clone().mT.flatten(1)

    def make(self) -> None:
        self.blocks = nn.ModuleList(self.Turned() for _ in range(2))

    def between(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Still(Mixed, Sizes):
    """Keeps a part in evaluation mode: its norm moves no statistics."""

    def make(self) -> None:
        self.still = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))

    def between(self, hidden: Tensor) -> Tensor:
        self.still.eval()
        return self.still(hidden)


class Quiet(nn.Sequential):
    """Is a list itself."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__(nn.Linear(in_features, 16), nn.Tanh(), nn.Linear(16, out_features))


def names() -> list[str]:
    """Return the names of all of them."""
    found = [each for each in globals().values() if isinstance(each, type) and issubclass(each, nn.Module)]
    parts = (Sizes, Borrowed, Factors)
    return sorted(each.__name__ for each in found if each.__module__ == __name__ and each not in parts)


def wraps(name: str) -> list[str]:
    """Return ways to cut a model into the blocks of fsdp."""
    model = globals()[name](10, 8, 5)
    lists = any(isinstance(each, (nn.Sequential, nn.ModuleList)) for each in model.modules())
    return ["64", *(["auto"] if lists else []), *(["[start,head]"] if isinstance(model, Sizes) else [])]
