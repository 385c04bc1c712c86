"""torchvision's ResNets for any number of input channels, and ResNet-50 over two devices."""

from collections.abc import Sequence
from typing import Any

import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck, ResNet

from ddp_recipes.models.basic import Device, two_devices


def resnet18(num_classes: int = 1000, in_channels: int = 3, **kwargs: Any) -> nn.Module:
    """Return torchvision's ``resnet18``; ``kwargs`` are its own. Input ``[n, in_channels, h, w]``."""
    return _with_channels(torchvision.models.resnet18(num_classes=num_classes, **kwargs), in_channels)


def resnet50(num_classes: int = 1000, in_channels: int = 3, **kwargs: Any) -> nn.Module:
    """Return torchvision's ``resnet50``; ``kwargs`` are its own. Input ``[n, in_channels, h, w]``."""
    return _with_channels(torchvision.models.resnet50(num_classes=num_classes, **kwargs), in_channels)


class ResNet50MP(ResNet):  # type: ignore[misc]  # torchvision has no types
    """ResNet-50 over two devices, cut as in PyTorch's tutorial "Single-Machine Model Parallel Best Practices".

    ``conv1`` to ``layer2`` are on the first device, ``layer3`` to ``fc``, hence the output ``[n, num_classes]``, on
    the second. State dict and, from the same seed, initial weights are those of ``resnet50``; ``kwargs`` are those
    of torchvision's ``ResNet``.
    """

    def __init__(self, devices: Sequence[Device], num_classes: int = 1000, in_channels: int = 3, **kwargs: Any) -> None:
        first, second = two_devices("ResNet50MP", devices)
        super().__init__(Bottleneck, [3, 4, 6, 3], num_classes=num_classes, **kwargs)
        _with_channels(self, in_channels)
        for part in (self.conv1, self.bn1, self.layer1, self.layer2):
            part.to(first)
        for part in (self.layer3, self.layer4, self.fc):
            part.to(second)

    def forward(self, x: Tensor) -> Tensor:
        # Ask the weights where they are: a copy of the model may have been moved since it was made.
        x = x.to(self.conv1.weight.device)
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        x = x.to(self.fc.weight.device)
        x = self.avgpool(self.layer4(self.layer3(x)))
        output: Tensor = self.fc(x.flatten(1))
        return output


resnet50_mp = ResNet50MP


def _with_channels(model: nn.Module, in_channels: int) -> nn.Module:
    """Replace the first convolution, initialised as torchvision does, if ``in_channels`` is not what it takes."""
    old = model.conv1
    assert isinstance(old, nn.Conv2d)
    if in_channels != old.in_channels:
        model.conv1 = nn.Conv2d(in_channels, old.out_channels, kernel_size=7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    return model
