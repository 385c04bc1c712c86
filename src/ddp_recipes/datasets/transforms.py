"""Which transforms may run on a whole batch at once, and transforms for images that already are tensors.

Nothing here imports torchvision: its transforms are known by the name of their class.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Transform = Callable[[Any], Any]
"""Takes one sample's input, gives one sample's input."""

Transforms = Transform | Sequence[Transform]
"""One transform, or several that run in order."""

# torchvision's transforms that do to each image of a batch [n, c, h, w] what they do to it alone, bit for bit.
_BATCHED = {"CenterCrop", "ConvertImageDtype", "Grayscale", "Identity", "Normalize", "Pad"}
_BATCHED |= {"Resize", "ToDtype", "ToImage", "ToPureTensor"}


class Chain:
    """Transforms that run in order; on a whole batch if each of them may."""

    def __init__(self, transforms: Iterable[Transform]) -> None:
        self.transforms = list(transforms)

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class ScaleAndNormalize:
    """Scale bytes to float32 0..1, then take ``(x - mean) / std`` by channel, on images ``[..., c, h, w]``.

    The numbers are those of torchvision's ``ToTensor`` followed by ``Normalize``; without ``mean``, of the first alone.
    """

    batched = True

    def __init__(self, mean: Sequence[float] = (), std: Sequence[float] = ()) -> None:
        self.mean = torch.tensor(list(mean)).view(-1, 1, 1)
        self.std = torch.tensor(list(std)).view(-1, 1, 1)

    def __call__(self, image: Tensor) -> Tensor:
        if image.dtype == torch.uint8:
            image = image.to(torch.float32).div_(255)
        return (image - self.mean).div_(self.std) if self.mean.numel() else image


def runs_on_batches(transform: Transform | None) -> bool:
    """Return whether ``transform`` gives the same numbers on a batch ``[n, ...]`` as on its samples one by one.

    A transform may say so itself, by an attribute ``batched``. Otherwise only known ones do: what is random has to draw
    numbers for each sample.
    """
    if (declared := getattr(transform, "batched", None)) is not None:
        return bool(declared)
    return _is_known_or_made_of(transform, runs_on_batches)


def is_known(transform: Transform | None) -> bool:
    """Return whether ``transform`` is known to depend on the sample alone, so that it may run at any time."""
    return type(transform) is ScaleAndNormalize or _is_known_or_made_of(transform, is_known)


def _is_known_or_made_of(transform: Transform | None, condition: Callable[[Transform], bool]) -> bool:
    """Return whether a transform is one of torchvision's for batches, or made of others that meet a condition."""
    if transform is None or type(transform) is nn.Identity:
        return True
    if type(transform) in (Chain, nn.Sequential) or _is_torchvision(transform, {"Compose"}):
        return all(map(condition, _parts(transform)))
    return _is_torchvision(transform, _BATCHED)


def in_order(transforms: Transforms) -> Transform:
    """Return one transform for one or several."""
    return transforms if callable(transforms) else Chain(transforms)


def for_tensors(transforms: Transforms) -> Transform:
    """Return ``transforms``, which may be written for PIL images, for images ``[c, h, w]`` of bytes.

    ``ToTensor`` becomes the scaling that it is, ``PILToTensor`` nothing; from a ``ToPILImage`` on nothing changes.
    """
    parts = _parts(transforms)
    result: list[Transform] = []
    for number, part in enumerate(parts):
        if _is_torchvision(part, {"ToPILImage"}):
            result += parts[number:]
            break
        if _is_torchvision(part, {"ToTensor"}):
            result.append(ScaleAndNormalize())
        elif not _is_torchvision(part, {"PILToTensor"}):
            result.append(for_tensors(part) if _is_torchvision(part, {"Compose"}) else part)
    return result[0] if len(result) == 1 else Chain(result)


def _parts(transforms: Any) -> list[Transform]:
    """Return what a sequence, ``Chain``, ``Compose`` or ``nn.Sequential`` is made of; any other transform alone."""
    if _is_torchvision(transforms, {"Compose"}):
        return list(transforms.transforms)
    if type(transforms) is Chain:
        return transforms.transforms
    if type(transforms) is nn.Sequential or not callable(transforms):
        return list(transforms)
    return [transforms]


def _is_torchvision(transform: object, names: set[str]) -> bool:
    # By exact class, not by isinstance: a subclass may do anything.
    kind = type(transform)
    return kind.__module__.startswith("torchvision.transforms.") and kind.__name__ in names
