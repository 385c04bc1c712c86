"""Models: sizes, state dicts, and that a model over two devices is the model on one."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ddp_recipes.errors import RequestError
from ddp_recipes.models import MLP, Linear, Toy, ToyMP
from helpers.marks import quick_each

CPUS = ["cpu", "cpu"]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return make()


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    assert list(one.state_dict()) == list(other.state_dict())
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def gradients(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(model(inputs).square().sum(), list(model.parameters())))


@pytest.mark.parametrize(
    ("model", "inputs", "outputs"),
    [
        (Linear(), (3, 10), (3, 1)),
        (Linear(784, 10), (3, 1, 28, 28), (3, 10)),
        (MLP(), (3, 1, 28, 28), (3, 10)),
        (MLP(64, (8, 7, 6), 2), (3, 64), (3, 2)),
        (MLP(64, (), 2), (3, 8, 8), (3, 2)),
        (Toy(), (3, 10), (3, 5)),
        (Toy(64, 4, 10), (3, 1, 8, 8), (3, 10)),
        (ToyMP(CPUS), (3, 10), (3, 5)),
        (ToyMP(CPUS, 64, 4, 10), (3, 1, 8, 8), (3, 10)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_sizes(model: nn.Module, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
    assert model(torch.randn(inputs)).shape == outputs


def test_layers_of_mlp() -> None:
    kinds = [type(layer) for layer in MLP().layers]
    assert kinds == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    sizes = [layer.weight.shape for layer in MLP().layers if isinstance(layer, nn.Linear)]
    assert sizes == [(10, 784), (10, 10), (10, 10)]


def test_names_of_toy() -> None:
    assert list(Toy().state_dict()) == ["net1.weight", "net1.bias", "net2.weight", "net2.bias"]


def test_toy_mp_is_toy() -> None:
    toy, toy_mp = seeded(Toy), seeded(lambda: ToyMP(CPUS))
    assert_same_state(toy, toy_mp)
    inputs = torch.randn(6, 10)
    assert torch.equal(toy(inputs), toy_mp(inputs))
    assert all(map(torch.equal, gradients(toy, inputs), gradients(toy_mp, inputs)))


def test_toy_mp_places_its_halves() -> None:
    """The meta device stands for a second device, where there is only one."""
    model = ToyMP(["cpu", "meta"])
    devices = [parameter.device.type for parameter in model.parameters()]
    assert devices == ["cpu", "cpu", "meta", "meta"]
    assert model(torch.randn(2, 10)).device.type == "meta"


def test_toy_mp_runs_where_its_weights_went() -> None:
    model = ToyMP(["cpu", "meta"]).to("meta")
    assert model(torch.randn(2, 10)).device.type == "meta"


@pytest.mark.parametrize("devices", [[], ["cpu"], ["cpu"] * 3])
def test_toy_mp_wants_two_devices(devices: list[str]) -> None:
    with pytest.raises(RequestError, match=rf"spans 2 devices and was given {len(devices)} .*model.num_devices=2"):
        ToyMP(devices)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_toy_mp_on_two_gpus() -> None:
    toy, toy_mp = seeded(Toy), seeded(lambda: ToyMP([0, 1]))
    inputs = torch.randn(6, 10)
    output = toy_mp(inputs)
    assert output.device == torch.device("cuda", 1)
    torch.testing.assert_close(output.cpu(), toy(inputs))


@pytest.mark.parametrize(("name", "in_channels"), quick_each(2, [("resnet18", 1), ("resnet50", 3)]))
def test_resnet_is_torchvisions(name: str, in_channels: int) -> None:
    import torchvision

    from ddp_recipes import models

    model = seeded(lambda: getattr(models, name)(num_classes=7, in_channels=in_channels))
    theirs = seeded(lambda: getattr(torchvision.models, name)(num_classes=7))
    if in_channels == 3:
        assert_same_state(theirs, model)
    else:
        assert list(theirs.state_dict()) == list(model.state_dict())
        assert model.state_dict()["conv1.weight"].shape == (64, in_channels, 7, 7)
    assert model(torch.randn(2, in_channels, 32, 32)).shape == (2, 7)


@pytest.mark.slow
def test_resnet50_mp_is_resnet50() -> None:
    from ddp_recipes.models import resnet50, resnet50_mp

    one = seeded(lambda: resnet50(num_classes=7, in_channels=1))
    two = seeded(lambda: resnet50_mp(CPUS, num_classes=7, in_channels=1))
    assert_same_state(one, two)
    inputs = torch.randn(2, 1, 32, 32)
    assert torch.equal(one(inputs), two(inputs))
    assert_same_state(one, two)  # the running statistics moved alike
    assert all(map(torch.equal, gradients(one, inputs), gradients(two, inputs)))


def test_resnet50_mp_places_its_halves() -> None:
    from ddp_recipes.models import resnet50_mp

    model = resnet50_mp(["cpu", "meta"], num_classes=7)
    on_first = {name.split(".")[0] for name, value in model.state_dict().items() if value.device.type == "cpu"}
    on_second = {name.split(".")[0] for name, value in model.state_dict().items() if value.device.type == "meta"}
    assert on_first == {"conv1", "bn1", "layer1", "layer2"}
    assert on_second == {"layer3", "layer4", "fc"}
    assert model(torch.randn(2, 3, 32, 32)).device.type == "meta"
    with pytest.raises(RequestError, match="spans 2 devices"):
        resnet50_mp(["cpu"])


def test_unknown_name() -> None:
    from ddp_recipes import models

    with pytest.raises(AttributeError, match="resnet19"):
        _ = models.resnet19


@pytest.mark.slow
def test_torchvision_comes_only_with_a_resnet() -> None:
    code = (
        "import sys, ddp_recipes.models as models, ddp_recipes.datasets\n"
        "models.Toy(); ddp_recipes.datasets.random_regression()\n"
        "assert not {'torchvision', 'sklearn', 'PIL'} & set(sys.modules)\n"
        "models.resnet18; assert 'torchvision' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
