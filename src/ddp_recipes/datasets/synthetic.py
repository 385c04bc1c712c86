"""Made-up data: as much as one wants, the same for the same seed."""

import hashlib
import math

import torch

from ddp_recipes.datasets.memory import InMemory
from ddp_recipes.datasets.transforms import ScaleAndNormalize, Transforms, for_tensors
from ddp_recipes.errors import RequestError, not_one_of

_SPLITS = ("train", "val", "test")
_POOL = 256  # distinct fake images; 64x64 in colour are 3 MB, 224x224 are 38 MB


def random_regression(
    num_samples: int = 2048, in_features: int = 10, out_features: int = 5, seed: int = 42, split: str = "train"
) -> InMemory:
    """Return normal inputs ``[n, in_features]`` and targets ``[n, out_features]``: a linear map of them plus noise.

    The map depends on ``seed`` alone, the samples on ``seed`` and ``split``. Targets have about unit variance, of
    which the noise is 0.01: no model gets below that mean squared error.
    """
    _check(split, num_samples=num_samples, in_features=in_features, out_features=out_features)
    weight = torch.randn(in_features, out_features, generator=_generator(seed, "map")) / math.sqrt(in_features)
    generator = _generator(seed, split)
    inputs = torch.randn(num_samples, in_features, generator=generator)
    noise = torch.randn(num_samples, out_features, generator=generator)
    return InMemory(inputs, inputs @ weight + 0.1 * noise)


def fake_images(
    num_samples: int = 1024,
    image_size: int = 64,
    in_channels: int = 3,
    num_classes: int = 10,
    seed: int = 42,
    split: str = "train",
    transform: Transforms | None = None,
) -> InMemory:
    """Return images float32 ``[n, in_channels, image_size, image_size]`` in 0..1 with int64 targets ``[n]``.

    Every image is its class's pattern, which depends on ``seed`` alone, under as much noise. Classes are equally
    frequent. Memory holds at most 256 distinct images, as bytes, which the samples share. ``transform`` takes the
    bytes in place of the scaling to 0..1.
    """
    _check(split, num_samples=num_samples, image_size=image_size, in_channels=in_channels, num_classes=num_classes)
    # A multiple of the number of classes, so that samples which share an image share its class.
    pool_size = min(num_samples, _POOL - _POOL % num_classes if num_classes <= _POOL else _POOL)
    shape = (in_channels, image_size, image_size)
    patterns = torch.randint(
        0, 128, (min(num_classes, pool_size), *shape), dtype=torch.uint8, generator=_generator(seed, "patterns")
    )
    noise = torch.randint(0, 128, (pool_size, *shape), dtype=torch.uint8, generator=_generator(seed, split))
    pool = patterns[torch.arange(pool_size) % len(patterns)] + noise
    samples = torch.arange(num_samples)
    scale = ScaleAndNormalize() if transform is None else for_tensors(transform)
    return InMemory(pool, samples % num_classes, scale, rows=samples % pool_size)


def _generator(seed: int, purpose: str) -> torch.Generator:
    """Return a generator whose numbers have nothing to do with those for another purpose or seed."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))


def _check(split: str, **sizes: int) -> None:
    if split not in _SPLITS:
        raise not_one_of("split", split, _SPLITS)
    for name, size in sizes.items():
        if size < 1:
            raise RequestError(f"{name}={size} is too small: allowed is 1 and more.")
