"""A model over several devices: the same numbers, every tensor where it is used, even stages, and clear refusals.

There is no GPU here. On the CPU all stages run on one device, which shows the numbers; that tensors come to the right
device shows on devices without data, on which operations check their devices as on real ones.
"""

import copy
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ddp_recipes.errors import RequestError
from ddp_recipes.model_parallel import DryRun, Stage, in_micro_batches, split_model, timed
from ddp_recipes.model_parallel.placement import connect, move, place
from ddp_recipes.tasks import Task
from helpers.marks import quick_each
from helpers.patience import patience

CPU = torch.device("cpu")
META = torch.device("meta")
VISITS: list[tuple[str, set[int], int]] = []  # which block, the devices of its inputs, its own


# --- models ----------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class State:
    hidden: Tensor
    steps: int


class Block(nn.Module):
    """A linear layer that notes on which devices its inputs and its weights are."""

    def __init__(self, name: str, size: int = 8) -> None:
        super().__init__()
        self.name = name
        self.layer = nn.Linear(size, size)
        self.register_buffer("scale", torch.full((size,), 0.5))

    def forward(self, *inputs: Tensor) -> Tensor:
        if inputs[0].device.type == "cuda":
            own = self.layer.weight.device.index
            VISITS.append((self.name, {tensor.device.index for tensor in inputs}, own))
        return torch.tanh(self.layer(sum(inputs)) * self.scale)


class Tuples(Block):
    def forward(self, pair: Pair, /) -> Pair:
        return Pair(super().forward(*pair), pair.first)


class Fills(Block):
    """Writes into a list and a dict that it is given."""

    def forward(self, pair: Pair, /, *, seen: list[Tensor], named: dict[str, Tensor]) -> State:  # type: ignore[override]
        seen.append(super().forward(pair.first, *seen))
        named["filled"] = super().forward(pair.second, named["start"])
        return State(seen[-1], steps=len(seen))


class Reads(Block):
    def forward(self, state: State, /, *, named: dict[str, Tensor]) -> dict[str, Any]:  # type: ignore[override]
        return {"out": [super().forward(state.hidden, *named.values())], "steps": state.steps}


class Head(Block):
    def forward(self, found: dict[str, Any], seen: list[Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(*found["out"], *seen)


class Own(nn.Module):
    """A user's module: tuples, dicts, lists, dataclasses and keywords between its blocks, some in a list."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.start = Block("start", size)
        self.blocks = nn.ModuleList([Tuples("blocks.0", size), Tuples("blocks.1", size)])
        self.fills = Fills("fills", size)
        self.reads = Reads("reads", size)
        self.head = Head("head", size)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.start(inputs)
        pair, seen, named = Pair(hidden, hidden * 2), [hidden], {"start": hidden}
        for block in self.blocks:
            pair = block(pair)
        state = self.fills(pair, seen=seen, named=named)
        output: Tensor = self.head(self.reads(state, named=named), seen)
        assert len(seen) == 2
        assert list(named) == ["start", "filled"]
        return output


class Encoder(nn.Module):
    """A transformer over words, its padding masked by keyword."""

    def __init__(self, words: int = 20, size: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, size)
        layer = nn.TransformerEncoderLayer(size, nhead=2, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(size, 8)

    def forward(self, words: Tensor) -> Tensor:
        encoded = self.encoder(self.embedding(words), src_key_padding_mask=words == 0)
        output: Tensor = self.head(encoded.mean(dim=1))
        return output


class Residual(nn.Module):
    """Adds around ``b``, so there is no cut between ``a`` and ``b``."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(size, size) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.a(inputs)
        output: Tensor = self.d(self.c(hidden + self.b(hidden)))
        return output


class Foreign(Residual):
    """Uses a parameter of another block directly."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(nn.functional.linear(inputs, self.c.weight))


class Nested(nn.Module):
    """Most of it is one block of its own kind, which adds around what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.heavy = Residual()
        self.rest = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.rest(self.first(inputs) + self.heavy(self.first(inputs)))
        return output


class Tied(nn.Module):
    """Its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.last = nn.Linear(8, 8)

    def forward(self, words: Tensor) -> Tensor:
        output: Tensor = self.last(self.head(self.embedding(words).mean(dim=1)))
        return output


class TiedByValue(nn.Module):
    """Its head is its embedding, then come parameters that no module is called with; its flow depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.encoder = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(8))])

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.encoder(self.embedding(words)).mean(dim=1)
        output: Tensor = self.head(hidden if hidden.sum() > 0 else -hidden) + self.biases[0]
        return output


class ByValue(Residual):
    """Its flow depends on values."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs if inputs.sum() > 0 else -inputs)


def resnet18() -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.resnet18(num_classes=8)
    return model


def resnet50() -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.resnet50(num_classes=8)
    return model


def vit_b_16() -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.vit_b_16(image_size=32, num_classes=8)
    return model


def perceptron() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.ReLU())))


IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
WORDS = torch.tensor([[3, 4, 5, 0], [7, 1, 2, 6]])
VECTORS = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))


# --- ways to split ---------------------------------------------------------------------------------------------------


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return make()


def dry_run_of(model: nn.Module, inputs: Tensor, size: int | None = None) -> DryRun:
    def batch_of(count: int) -> tuple[Tensor, Tensor]:
        return inputs[:1].expand(count, *inputs.shape[1:]), torch.zeros(count, dtype=torch.int64)

    return DryRun(Task(model, nn.CrossEntropyLoss()), "training_step", batch_of, size or len(inputs))


def split(model: nn.Module, inputs: Tensor, where: int | Sequence[str]) -> list[Stage]:
    """Split over CPUs, by names or into so many stages."""
    dry_run = dry_run_of(model, inputs)
    k, names = (where, None) if isinstance(where, int) else (len(where) + 1, where)
    stages = split_model(dry_run.task, [CPU] * k, names, dry_run)
    assert dry_run.failure is None
    return stages


def trained(model: nn.Module, inputs: Tensor, steps: int) -> dict[str, Tensor]:
    """Return the state after a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    targets = torch.arange(len(inputs)) % 8
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model.state_dict()


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-6, msg=name)


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "inputs", "where", "steps"),
    [
        pytest.param(resnet18, IMAGES, ["layer2", "layer3.1"], 2, marks=pytest.mark.slow),
        pytest.param(resnet50, IMAGES, 3, 2, marks=pytest.mark.slow),
        pytest.param(vit_b_16, IMAGES, ["encoder.layers.encoder_layer_5"], 1, marks=pytest.mark.nightly),
        pytest.param(Encoder, WORDS, ["encoder.layers.1", "encoder.layers.2"], 3, marks=pytest.mark.slow),
        (Encoder, WORDS, 2, 3),
        pytest.param(Own, VECTORS, ["blocks.1", "reads"], 3, marks=pytest.mark.slow),
        (Own, VECTORS, 3, 3),
        pytest.param(perceptron, VECTORS, ["2", "4"], 3, marks=pytest.mark.slow),
        (Residual, VECTORS, 3, 3),
    ],
    ids=lambda value: value.__name__ if callable(value) else "" if isinstance(value, Tensor) else str(value),
)
def test_a_split_model_learns_what_the_whole_one_does(
    make: Callable[[], nn.Module], inputs: Tensor, where: int | list[str], steps: int
) -> None:
    whole = make()
    parted = copy.deepcopy(whole)
    stages = split(parted, inputs, where)
    assert len(stages) == (where if isinstance(where, int) else len(where) + 1)
    assert sum(stage.parameters for stage in stages) == sum(p.numel() for p in whole.parameters())
    assert_same(trained(whole, inputs, steps), trained(parted, inputs, steps))


def test_parameters_stay_the_same_objects() -> None:
    model = Own()
    before = dict(model.named_parameters())
    split(model, VECTORS, ["fills"])
    assert all(before[name] is parameter for name, parameter in model.named_parameters())


# --- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("starts", "own"),
    [
        (["blocks"], [0, 1, 1, 1, 1, 1]),
        (["blocks.1"], [0, 0, 1, 1, 1, 1]),
        (["blocks.1", "reads"], [0, 0, 1, 1, 2, 2]),
        (["blocks.0", "blocks.1", "fills", "reads", "head"], [0, 1, 2, 3, 4, 5]),
    ],
    ids=str,
)
def test_every_tensor_comes_to_the_device_of_the_block_that_uses_it(starts: list[str], own: list[int]) -> None:
    VISITS.clear()
    dry_run = dry_run_of(Own(), VECTORS)
    dry_run.run(starts)
    assert dry_run.failure is None
    devices: dict[str, int] = {}
    for name, inputs, device in VISITS:
        assert inputs == {device}, name
        devices[name] = device
    assert list(devices.values()) == own


@pytest.mark.parametrize(
    ("make", "inputs", "starts"),
    [
        (resnet18, IMAGES, ["layer1.1", "layer3", "avgpool", "fc"]),
        pytest.param(vit_b_16, IMAGES, ["encoder", "encoder.layers.encoder_layer_3", "heads"], marks=pytest.mark.slow),
        (Encoder, WORDS, ["encoder", "encoder.layers.1", "head"]),
        (perceptron, VECTORS, ["1", "3"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_models_run_on_separate_devices(make: Callable[[], nn.Module], inputs: Tensor, starts: list[str]) -> None:
    dry_run = dry_run_of(make(), inputs)
    dry_run.run(starts)
    assert dry_run.failure is None


def test_weights_and_outputs_are_where_they_belong() -> None:
    """The meta device stands for a second device, where there is only one."""
    model = seeded(resnet18)
    place(model, ["layer3"], [CPU, META])
    connect(model, ["layer3"], [CPU, META])
    on_first = {name.split(".")[0] for name, value in model.state_dict().items() if value.device == CPU}
    assert on_first == {"conv1", "bn1", "layer1", "layer2"}
    assert model(IMAGES).device == META


def test_what_has_no_state_runs_where_its_inputs_are_unless_a_stage_begins_there() -> None:
    for starts, device in ((["2"], CPU), (["1"], META)):
        model = perceptron()
        place(model, starts, [CPU, META])
        connect(model, starts, [CPU, META])
        seen: list[torch.device] = []
        model[1].register_forward_hook(lambda *hooked, seen=seen: seen.append(hooked[-1].device))
        assert model(VECTORS).device == META
        assert seen == [device]


def test_a_dry_run_leaves_the_task_and_the_random_numbers_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.BatchNorm1d(8))
    dry_run = dry_run_of(model, VECTORS)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    dry_run.run(["1"])
    assert_same(before, model.state_dict())
    assert torch.equal(torch.get_rng_state(), state)
    assert not model[1]._forward_pre_hooks


@pytest.mark.slow
@pytest.mark.spawn
def test_a_process_that_did_a_dry_run_can_be_forked() -> None:
    """Autograd starts no thread for a device that is not there, which a fork would not survive."""
    code = """
import os, torch
from torch import nn
from ddp_recipes.model_parallel import DryRun
from ddp_recipes.tasks import Task

def learn():
    nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()

task = Task(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.MSELoss())
dry_run = DryRun(task, "training_step", lambda size: (torch.ones(size, 2), torch.ones(size, 2)), size=4)
dry_run.run(["1"])
assert dry_run.failure is None
learn()
child = os.fork()
if child == 0:
    learn()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patience(60))


def test_what_is_moved_keeps_its_form() -> None:
    def tensor() -> Tensor:
        return torch.ones(2)

    packed = pack_padded_sequence(torch.ones(2, 3, 4), torch.tensor([3, 2]), batch_first=True)
    moved = move((tensor(), Pair(tensor(), tensor()), {"a": [tensor(), 3, "text", None]}, packed, (1, 2)), META)
    assert moved[0].device == moved[1].second.device == moved[2]["a"][0].device == moved[3].data.device == META
    assert isinstance(moved[1], Pair)
    assert moved[2]["a"][1:] == [3, "text", None]
    assert moved[3].batch_sizes.device == CPU, "cuDNN wants them there"
    assert moved[4] == (1, 2)


def test_what_a_block_fills_stays_the_same_object() -> None:
    state, values, named = State(torch.ones(2), 0), [torch.ones(2)], {"a": torch.ones(2)}
    moved = move((state, values, named), META)
    assert moved[0] is state
    assert moved[1] is values
    assert moved[2] is named
    assert state.hidden.device == values[0].device == named["a"].device == META


def test_nothing_is_made_anew_where_everything_is_in_place() -> None:
    value = (torch.ones(2), [torch.ones(2)], {"a": State(torch.ones(2), 0)})
    assert move(value, CPU) is value


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(8, 8, batch_first=True)
        self.second = nn.GRU(8, 8, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        lengths = torch.full((len(inputs),), 3)
        packed = pack_padded_sequence(inputs[:, None].expand(-1, 3, -1), lengths, batch_first=True)
        hidden: PackedSequence = self.first(packed)[0]
        output: Tensor = pad_packed_sequence(self.second(hidden)[0], batch_first=True)[0][:, -1]
        return output


def test_recurrent_layers_can_be_split() -> None:
    whole, parted = seeded(Recurrent), seeded(Recurrent)
    dry_run = dry_run_of(parted, VECTORS)
    split_model(dry_run.task, [CPU, CPU], ["second"], dry_run)
    assert_same(trained(whole, VECTORS, 2), trained(parted, VECTORS, 2))


# --- even stages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 3, 4])
def test_stages_are_even(k: int) -> None:
    stages = split(resnet18(), IMAGES.repeat(16, 1, 1, 1), k)
    assert max((stage.time or 0) + (stage.memory or 0) for stage in stages) / 2 < 1.3 / k
    for fractions in ([stage.time for stage in stages], [stage.memory for stage in stages]):
        assert sum(fraction or 0 for fraction in fractions) == pytest.approx(1)


def test_equal_blocks_are_dealt_equally() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    assert [stage.parameters for stage in split(model, VECTORS, 4)] == [3 * 72] * 4


def test_the_choice_is_the_same_each_time() -> None:
    assert split(seeded(resnet18), IMAGES, 3) == split(resnet18(), IMAGES + 1, 3)


@pytest.mark.slow
def test_the_batch_counts() -> None:
    """With more samples activations weigh more, and they are at the front of a convolutional net."""
    few, many = resnet18(), resnet18()
    sizes = []
    for model, size in ((few, 1), (many, 512)):
        dry_run = dry_run_of(model, IMAGES, size)
        sizes.append(split_model(dry_run.task, [CPU, CPU], None, dry_run)[0].parameters)
    assert sizes[1] < sizes[0]


def test_what_is_kept_for_the_backward_pass_is_what_counts() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    costs = dry_run_of(model, VECTORS, size=100).run()
    assert costs.memory == {
        "": 0,
        "0": 3 * 4 * (8 * 16 + 16) + 4 * 100 * 8,  # its input
        "1": 4 * 100 * 16,  # its output, which the next layer keeps as well
        "2": 3 * 4 * (16 * 8 + 8),
    }


@pytest.mark.parametrize(
    ("make", "k", "firsts"),
    [
        (Residual, 2, ["a", "c"]),
        (Residual, 3, ["a", "c", "d"]),
        (Foreign, 2, ["a", "d"]),
        (Nested, 2, ["first", "rest"]),
        (Tied, 2, ["embedding", "last"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_there_is_no_cut_where_it_would_part_what_belongs_together(
    make: Callable[[], nn.Module], k: int, firsts: list[str]
) -> None:
    inputs = torch.zeros(4, 3, dtype=torch.int64) if make is Tied else VECTORS
    assert [stage.first for stage in split(make(), inputs, k)] == firsts


class Descends(Block):
    """Takes a gradient in its forward pass."""

    def forward(self, *inputs: Tensor) -> Tensor:
        (step,) = torch.autograd.grad(super().forward(*inputs).sum(), inputs[0], create_graph=True)
        return inputs[0] - step


def test_a_model_that_takes_a_gradient_in_its_forward_pass_is_counted() -> None:
    dry_run = dry_run_of(nn.Sequential(Block("first"), Descends("second")), VECTORS)
    time = dry_run.run().time
    assert dry_run.failure is None
    assert time["1.layer"] > 0


def test_a_flow_that_depends_on_values_is_split_by_weights() -> None:
    whole, parted = seeded(ByValue), seeded(ByValue)
    dry_run = dry_run_of(parted, VECTORS)
    stages = split_model(dry_run.task, [CPU, CPU], None, dry_run)
    assert "follows from values" in str(dry_run.failure)
    assert [str(stage) for stage in stages] == ["a to b: 144 parameters", "c to d: 144 parameters"]
    assert_same(trained(whole, VECTORS, 2), trained(parted, VECTORS, 2))


class Work(torch.autograd.Function):
    """Hands values and gradients on, with some work of its own."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, forward: int, backward: int) -> Tensor:
        ctx.backward_work = backward
        return Work.done(inputs.clone(), forward)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return Work.done(gradient, ctx.backward_work), None, None

    @staticmethod
    def done(values: Tensor, times: int) -> Tensor:
        for _ in range(times):
            torch.ones(300, 300) @ torch.ones(300, 300)
        return values


class Loaded(nn.Module):
    """A layer with more to do in forward or in backward, and an operation in place behind it."""

    def __init__(self, forward: int = 0, backward: int = 0) -> None:
        super().__init__()
        self.layer, self.work = nn.Linear(8, 8), (forward, backward)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = Work.apply(self.layer(inputs), *self.work)  # type: ignore[no-untyped-call]
        return outputs.relu_()


@pytest.mark.parametrize("step", ["training_step", "predict_step"])
def test_timing_gives_every_module_with_operations_a_time(step: str) -> None:
    model = nn.Sequential(Loaded(), Loaded(forward=5), nn.Sequential(Loaded(), Loaded(backward=15)), Loaded())
    dry_run = dry_run_of(model, torch.randn(4, 8))
    dry_run.step = step
    times = timed(dry_run, CPU, nullcontext)
    # "2" is a container, which computes nothing itself. Which times are right, benchmarks/splitting.py --times tells.
    blocks = {"0", "1", "2.0", "2.1", "3"}
    assert blocks <= times.keys() <= {name for name, _ in model.named_modules()}
    assert all(took > 0 for took in times.values())


def test_timing_leaves_the_task_and_the_random_numbers_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 8))
    dry_run = dry_run_of(model, torch.randn(4, 8))
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    timed(dry_run, CPU, nullcontext)
    assert_same(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# --- micro-batches ---------------------------------------------------------------------------------------------------


class Named(Residual):
    """Takes and gives a dict."""

    def forward(self, inputs: dict[str, Tensor], factor: float = 1.0) -> dict[str, Any]:  # type: ignore[override]
        return {"found": (super().forward(inputs["in"] * factor), None), "factor": factor}


@pytest.mark.parametrize("make", quick_each(3, [Residual, Encoder, perceptron]))
@pytest.mark.parametrize("count", quick_each(3, [3, 2, 9]))
def test_micro_batches_leave_the_result(make: Callable[[], nn.Module], count: int) -> None:
    """Four samples in two micro-batches, in three uneven ones, and in four, for there are no more."""
    inputs = WORDS.repeat(2, 1) if make is Encoder else VECTORS
    whole, parted = seeded(make), seeded(make)
    in_micro_batches(parted, count)
    split(parted, inputs, 2)
    assert_same(trained(whole, inputs, 3), trained(parted, inputs, 3))


def test_micro_batches_of_dicts_and_tuples() -> None:
    whole, parted = seeded(Named), seeded(Named)
    in_micro_batches(parted, 3)
    found, expected = (model({"in": VECTORS}, factor=2.0) for model in (parted, whole))
    assert found["factor"] == 2.0
    assert found["found"][1] is None
    torch.testing.assert_close(found["found"][0], expected["found"][0])


def test_a_model_in_micro_batches_is_still_what_it_was() -> None:
    whole, parted = seeded(Residual), seeded(Residual)
    in_micro_batches(parted, 2)
    assert isinstance(parted, Residual)
    assert type(parted).__name__ == "Residual"
    assert_same(whole.state_dict(), parted.state_dict())
    other = copy.deepcopy(parted)
    with torch.no_grad():
        parted.d.bias.zero_()
    assert torch.equal(other(VECTORS), seeded(Residual)(VECTORS)), "a copy has weights of its own"


def test_batch_norm_takes_its_statistics_from_each_micro_batch() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8))
    in_micro_batches(model, 2)
    expected = torch.cat([nn.BatchNorm1d(8)(each) for each in VECTORS.chunk(2)])
    torch.testing.assert_close(model(VECTORS), expected)
    assert model.state_dict()["0.num_batches_tracked"] == 2


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("m", [1, 2, 5])
def test_stages_take_turns_in_the_forward_pass(k: int, m: int) -> None:
    """What is given to each GPU, and when it can run.

    A GPU works off what it is given in that order. A copy from one GPU to another waits for what both were given before
    it, and both wait for the copy ("two-way barrier" in ATen/native/cuda/Copy.cu). A stage takes one turn.
    """
    model = nn.Sequential(*(Block(str(number)) for number in range(k)))
    in_micro_batches(model, m)
    VISITS.clear()
    dry_run_of(model, VECTORS, size=2 * m).run([str(number) for number in range(1, k)])
    free = [0] * k  # the turn at which each GPU is done
    for _, _, device in VISITS:
        if device > 0:
            free[device - 1] = free[device] = max(free[device - 1], free[device])
        free[device] += 1
    assert len(VISITS) == k * m
    assert max(free) == m + k - 1


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("m", [1, 2, 5])
def test_stages_take_turns_in_the_backward_pass(k: int, m: int) -> None:
    """Autograd has a thread for each GPU, which takes of what is ready the latest first, as the only one here does."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(k)))
    in_micro_batches(model, m)
    done: dict[tuple[int, int], int] = {}  # (stage, micro-batch) -> the turn at which it is done
    free, order = [0] * k, [0] * k

    def note(stage: int, micro_batch: int) -> None:
        ready = done.get((stage + 1, micro_batch), 0)
        done[stage, micro_batch] = free[stage] = max(free[stage], ready) + 1

    def watch(stage: int, output: Tensor) -> None:
        micro_batch = order[stage]
        order[stage] += 1
        output.register_hook(lambda _: note(stage, micro_batch))

    for number, layer in enumerate(model):
        layer.register_forward_hook(lambda *hooked, number=number: watch(number, hooked[-1]))
    model(VECTORS.repeat(m, 1)).sum().backward()
    assert len(done) == k * m
    assert max(done.values()) == m + k - 1


class Outputs(nn.Module):
    """Returns what a function gives."""

    def __init__(self, give: Callable[[Any], Any]) -> None:
        super().__init__()
        self.give = give

    def forward(self, *inputs: Any) -> Any:
        return self.give(*inputs)


@pytest.mark.parametrize(
    ("give", "inputs", "message"),
    [
        (lambda x: x.mean(), [VECTORS], r"Outputs returns a tensor \[\]"),
        (lambda x: (x, x.T), [VECTORS], r"Outputs returns a tensor \[2, 8\], a tensor \[8, 2\]"),
        (lambda x: x.T, [VECTORS], r"Outputs returns a tensor \[8, 2\]"),
        (lambda x: State(x, 1), [VECTORS], "Outputs returns a State"),
        (lambda x: None, [VECTORS], "Outputs returns a NoneType"),
        (lambda x, y: x, [VECTORS, VECTORS.T], r"Outputs is given a tensor \[4, 8\], a tensor \[8, 4\]. Allowed:"),
        (lambda x, y: x, [VECTORS, {1, 2}], r"Outputs is given a tensor \[4, 8\], a set"),
    ],
)
def test_what_cannot_be_cut_is_refused(give: Callable[..., Any], inputs: list[Any], message: str) -> None:
    model = Outputs(give)
    in_micro_batches(model, 2)
    with pytest.raises(RequestError, match=rf"{message}.*Use model.micro_batches=1"):
        model(*inputs)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "where", "parts"),
    [
        (resnet18, ["layer33"], ["ResNet has no layer33. Did you mean 'layer3'?", "ResNet has conv1, bn1, relu,"]),
        (resnet18, ["layer3", "layer2"], ["stages follow the order of the model", "model.split=[layer2, layer3]"]),
        (resnet18, ["layer2", "layer2"], ["each with blocks of its own: model.split=[layer2]"]),
        (resnet18, ["conv1"], ["the stage before conv1 has no module that is called and has parameters"]),
        (resnet18, ["relu", "layer1"], ["the stage that begins at relu has no module"]),
        (TiedByValue, ["biases"], ["the stage that begins at biases has no module"]),
        (resnet18, ["layer1.1.conv2"], ["add_.Tensor in the forward of layer1.1 ", "no stage begin inside layer1.1"]),
        (Residual, ["b"], ["aten.add.Tensor in the forward of the model mixes tensors of stage 0 and stage 1"]),
        (Residual, ["b"], ["Let no stage begin at b, or leave the choice to model.split=auto"]),
        (Foreign, ["c"], ["aten.mm.default in the forward of the model mixes tensors of stage 0 and stage 1"]),
        (Tied, ["head"], ["embedding.weight and head.weight are one parameter, in stages 0 and 1"]),
        (Residual, 5, ["model.num_devices=5, but Residual can be cut into 4 stage(s) at most"]),
        (Residual, 4, ["3 stage(s) at most", "aten.add.Tensor in the forward of the model", "Use model.num_devices=3"]),
        (TiedByValue, 2, ["1 stage(s) at most", "embedding.weight and head.weight are one parameter"]),
        (Tied, 3, ["2 stage(s) at most", "embedding.weight and head.weight are one parameter, and so in one stage"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_cannot_be_is_refused(make: Callable[[], nn.Module], where: int | list[str], parts: list[str]) -> None:
    words = torch.zeros(4, 3, dtype=torch.int64)
    inputs = {resnet18: IMAGES, Tied: words, TiedByValue: words}.get(make, VECTORS)
    with pytest.raises(RequestError) as refusal:
        split(make(), inputs, where)
    for part in parts:
        assert part in str(refusal.value)
