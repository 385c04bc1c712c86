"""Image data on disk, read by torchvision."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddp_recipes.datasets.memory import InMemory
from ddp_recipes.datasets.transforms import ScaleAndNormalize, Transform, Transforms, for_tensors, in_order
from ddp_recipes.errors import RequestError, nearest, not_one_of


def mnist(
    root: str | Path, split: str = "train", download: bool = False, transform: Transforms | None = None
) -> InMemory:
    """Return MNIST: images ``[n, 1, 28, 28]``, targets int64 ``[n]`` in 0..9; ``split`` is ``train`` or ``test``.

    In memory the images are bytes. ``transform`` takes them so, in place of the default, which scales to float32
    0..1 and normalises with the mean and deviation of the training set.

    Raises:
        RequestError: the files are not under ``root`` and ``download`` is false, or cannot be read.
    """
    return _in_memory("MNIST", "MNIST/raw", root, split, download, transform, mean=[0.1307], std=[0.3081])


def fashion_mnist(
    root: str | Path, split: str = "train", download: bool = False, transform: Transforms | None = None
) -> InMemory:
    """Return Fashion-MNIST, in everything else like ``mnist``."""
    return _in_memory("FashionMNIST", "FashionMNIST/raw", root, split, download, transform, [0.2860], [0.3530])


def cifar10(
    root: str | Path, split: str = "train", download: bool = False, transform: Transforms | None = None
) -> InMemory:
    """Return CIFAR-10: images ``[n, 3, 32, 32]``, in everything else like ``mnist``."""
    mean, std = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
    return _in_memory("CIFAR10", "cifar-10-batches-py", root, split, download, transform, mean, std)


def image_folder(
    root: str | Path,
    split: str = "train",
    image_size: int = 224,
    transform: Transforms | None = None,
    num_classes: int | None = None,
) -> Dataset[Any]:
    """Return the images of ``root/split``, one folder a class, read from disk when fetched.

    Samples are ``(image, class number)``; classes are numbered by the sorted names of the folders of ``root/train``
    where that exists. ``transform`` takes an RGB PIL image; the default is ``imagenet_transform(image_size)``.

    Raises:
        RequestError: there is no such folder, no image in one of its class folders, a class that ``root/train`` does
            not have, or more classes than ``num_classes``.
    """
    from torchvision.datasets import ImageFolder

    folder = Path(root).expanduser() / split
    if not folder.is_dir():
        raise RequestError(
            f"data.root={root}: there is no folder {folder.absolute()}. Expected are images in "
            f"<root>/{split}/<class>/. Set data.root to the folder that holds '{split}'."
        )
    chosen = imagenet_transform(image_size) if transform is None else in_order(transform)
    try:
        dataset = ImageFolder(str(folder), transform=chosen, loader=rgb_image)
    except FileNotFoundError as error:
        raise RequestError(f"data.root={root}: {error}. Expected are images in <root>/{split}/<class>/.") from error
    _number_classes_as_in(folder.parent / "train", dataset)
    if num_classes is not None and len(dataset.class_to_idx) > num_classes:
        found = len(dataset.class_to_idx)
        raise RequestError(f"{found} classes are in {folder.absolute()}, data.out_features={num_classes} is too small.")
    return dataset  # type: ignore[no-any-return]  # torchvision has no types


def rgb_image(path: str | Path) -> Any:
    """Return an image of PIL's, in RGB.

    Raises:
        RequestError: it is no regular file, or has values that RGB does not.
    """
    from PIL import Image

    # Without waiting: to open a pipe would take for ever.
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise RequestError(f"{path} is no regular file, and so no image. Take it out of the data.")
        try:
            return in_rgb(Image.open(file))
        except ValueError as error:
            raise RequestError(f"{path}: {error} by a data set of your own.") from error


def in_rgb(image: Any) -> Any:
    """Return an image of PIL's in RGB, of 8 bits a channel.

    Raises:
        ValueError: it has other values, as depths and most medical images do, which Pillow would cut to 255.
    """
    image.load()  # its file may be closed afterwards
    if image.mode[0] == "F" or (image.mode[0] == "I" and image.getextrema()[1] > 255):
        raise ValueError(f"images are read in RGB, of 8 bits a channel, and one has mode {image.mode}. Give its array")
    return image if image.mode == "RGB" else image.convert("RGB")


def imagenet_transform(image_size: int) -> Transform:
    """Return resize, centre crop, ``ToTensor`` and ImageNet's normalisation: PIL image to ``[3, size, size]``."""
    from torchvision import transforms

    steps: Transform = transforms.Compose(
        [
            # The shorter side a little longer than the crop, in ImageNet's usual proportion of 256 to 224.
            transforms.Resize(round(image_size * 256 / 224)),
            transforms.CenterCrop(image_size),
            transforms.ToTensor(),
            transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        ]
    )
    return steps


def _in_memory(
    name: str,
    folder: str,
    root: str | Path,
    split: str,
    download: bool,
    transform: Transforms | None,
    mean: Sequence[float],
    std: Sequence[float],
) -> InMemory:
    """Read the torchvision data set ``name``, whose files are in ``root/folder``, into memory."""
    if split not in ("train", "test"):
        raise not_one_of("split", split, ("train", "test"))
    from torchvision import datasets

    files = Path(root).expanduser() / folder
    try:
        dataset = getattr(datasets, name)(files.parents[folder.count("/")], train=split == "train", download=download)
    except (RuntimeError, ValueError, AssertionError, OSError) as error:
        if download:
            problem = f"{name} could not be downloaded to {files.absolute()}: {error}"
        elif files.is_dir():
            problem = f"{name} in {files.absolute()} is incomplete or damaged: {error}"
        else:
            problem = f"there is no {name} in {files.absolute()}"
        raise RequestError(
            f"data.root={root}: {problem}. Set data.root=<the folder that holds {folder}>, or data.download=true to "
            "fetch it."
        ) from error
    images = torch.as_tensor(dataset.data)
    chosen = ScaleAndNormalize(mean, std) if transform is None else for_tensors(transform)
    return InMemory(_channels_first(images), torch.as_tensor(dataset.targets), chosen)


def _channels_first(images: Tensor) -> Tensor:
    """Return images ``[n, h, w]`` or ``[n, h, w, c]`` as ``[n, c, h, w]``."""
    return images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()


def _number_classes_as_in(train: Path, dataset: Any) -> None:
    """Give the classes of an ``ImageFolder`` the numbers they have in training, even if it lacks some of them."""
    if not train.is_dir():
        return
    known = sorted(entry.name for entry in train.iterdir() if entry.is_dir())
    for name in dataset.classes:
        if name not in known:
            raise RequestError(
                f"{Path(dataset.root).absolute()} has the class '{name}', which {train.absolute()} does not have."
                f"{nearest(name, known)} Classes are: {', '.join(known)}."
            )
    number = {name: index for index, name in enumerate(known)}
    dataset.samples = [(path, number[dataset.classes[index]]) for path, index in dataset.samples]
    dataset.imgs, dataset.targets = dataset.samples, [index for _, index in dataset.samples]
    dataset.classes, dataset.class_to_idx = known, number
