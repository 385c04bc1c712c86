"""Data sets: a batch is its samples bit for bit, splits are honest, and bad requests say what is wrong."""

import csv
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from ddp_recipes import datasets
from ddp_recipes.build.instantiate import make
from ddp_recipes.datasets import Chain, InMemory, ScaleAndNormalize, csv_table
from ddp_recipes.datasets.classes import column_classes
from ddp_recipes.datasets.tabular import rows_of, standardize
from ddp_recipes.datasets.transforms import for_tensors, runs_on_batches
from ddp_recipes.errors import RequestError
from ddp_recipes.testing import make_job

MNIST_MEAN, MNIST_STD = [0.1307], [0.3081]


def assert_batch_is_its_samples(dataset: InMemory, size: int = 70) -> None:
    assert dataset.batched
    indices = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(1))[:size]
    samples = [dataset[index] for index in indices.tolist()]
    for whole, parts in zip(dataset.fetch(indices), zip(*samples, strict=True), strict=True):
        stacked = torch.stack(parts)
        assert type(whole) is torch.Tensor
        assert whole.dtype == stacked.dtype
        assert torch.equal(whole, stacked)


def write_idx(path: Path, values: Tensor) -> None:
    """Write bytes in the format of MNIST's files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape)
    path.write_bytes(header + values.numpy().tobytes())


def write_mnist(root: Path, name: str = "MNIST", counts: tuple[int, int] = (90, 40)) -> Path:
    generator = torch.Generator().manual_seed(3)
    for prefix, count in zip(("train", "t10k"), counts, strict=True):
        images = torch.randint(0, 256, (count, 28, 28), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, 10, (count,), dtype=torch.uint8, generator=generator)
        write_idx(root / name / "raw" / f"{prefix}-images-idx3-ubyte", images)
        write_idx(root / name / "raw" / f"{prefix}-labels-idx1-ubyte", labels)
    return root


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        datasets.digits,
        datasets.breast_cancer,
        datasets.random_regression,
        lambda: datasets.fake_images(300, 31, num_classes=7),
        lambda: datasets.fake_images(300, 8, in_channels=1, num_classes=1000),
    ],
    ids=["digits", "breast_cancer", "random_regression", "fake_images", "fake_images, many classes"],
)
def test_batch_is_its_samples(make: Callable[[], InMemory]) -> None:
    assert_batch_is_its_samples(make())


@pytest.mark.parametrize(("name", "make"), [("MNIST", datasets.mnist), ("FashionMNIST", datasets.fashion_mnist)])
def test_batch_of_mnist_is_its_samples(tmp_path: Path, name: str, make: Callable[..., InMemory]) -> None:
    root = write_mnist(tmp_path, name)
    assert_batch_is_its_samples(make(root, "train"))
    assert_batch_is_its_samples(make(root, "test"))


@pytest.mark.parametrize("split", ["train", "test"])
def test_mnist_is_torchvisions(split: str, mnist_root: Path) -> None:
    """On the real data: the numbers of torchvision's own data set with its usual transform."""
    from torchvision import transforms
    from torchvision.datasets import MNIST

    ours = datasets.mnist(mnist_root, split)
    usual = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MNIST_MEAN, MNIST_STD)])
    theirs = MNIST(mnist_root, train=split == "train", transform=usual)
    assert len(ours) == len(theirs)
    assert_batch_is_its_samples(ours, 500)
    inputs, targets = ours.fetch(torch.arange(500))
    assert torch.equal(inputs, torch.stack([theirs[i][0] for i in range(500)]))
    assert targets.tolist() == [theirs[i][1] for i in range(500)]
    assert datasets.mnist(mnist_root, split, transform=usual).batched
    assert torch.equal(datasets.mnist(mnist_root, split, transform=usual).fetch(torch.arange(500))[0], inputs)


def test_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    import numpy as np
    from torchvision import transforms
    from torchvision.datasets import CIFAR10

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rows = np.random.default_rng(0).integers(0, 256, (20, 3 * 32 * 32), dtype=np.uint8)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (folder / name).write_bytes(pickle.dumps({"data": rows, "labels": [i % 10 for i in range(20)]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    with pytest.raises(RequestError, match=r"CIFAR10 in .*cifar-10-batches-py is incomplete or damaged"):
        datasets.cifar10(tmp_path)

    for files in (CIFAR10.train_list, CIFAR10.test_list):
        monkeypatch.setattr(CIFAR10, "train_list" if len(files) > 1 else "test_list", [(f[0], None) for f in files])
    monkeypatch.setitem(CIFAR10.meta, "md5", None)
    dataset = datasets.cifar10(tmp_path)
    assert_batch_is_its_samples(dataset)
    theirs = CIFAR10(tmp_path, transform=transforms.ToTensor())
    unnormalised = datasets.cifar10(tmp_path, transform=ScaleAndNormalize())
    assert torch.equal(unnormalised.fetch(torch.arange(100))[0], torch.stack([image for image, _ in theirs]))
    assert len(datasets.cifar10(tmp_path, "test")) == 20


def test_rows_share_inputs() -> None:
    dataset = InMemory(torch.arange(3.0), torch.arange(7), rows=torch.arange(7) % 3)
    assert_batch_is_its_samples(dataset)
    assert [dataset[i][0].item() for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert dataset[-1][0] == 0
    assert len(list(dataset)) == 7  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="3 inputs for 7 targets"):
        InMemory(torch.arange(3.0), torch.arange(7))


def test_transform_in_place_leaves_the_data_alone() -> None:
    from torchvision.transforms import Normalize

    inputs = torch.rand(4, 1, 5, 5)
    dataset = InMemory(inputs.clone(), torch.arange(4), Normalize([0.5], [0.5], inplace=True))
    assert_batch_is_its_samples(dataset)
    assert torch.equal(dataset.inputs, inputs)


# --- transforms ------------------------------------------------------------------------------------------------------


def known_transforms() -> list[Any]:
    from torchvision import transforms as v1
    from torchvision.transforms import v2

    to_float = v2.ToDtype(torch.float32, scale=True)
    normalize = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]}
    return [
        None,
        nn.Identity(),
        ScaleAndNormalize(**normalize),
        v1.Compose([v1.ConvertImageDtype(torch.float32), v1.Normalize(**normalize)]),
        v2.Compose([v2.ToImage(), to_float, v2.Normalize(**normalize)]),
        v2.Compose([to_float, v2.Normalize(**normalize), v2.ToPureTensor()]),
        nn.Sequential(v1.ConvertImageDtype(torch.float32), v1.Resize(9)),
        v1.Resize(20),
        v2.Resize((40, 17)),
        v2.Compose([to_float, v2.Resize(50, interpolation=v2.InterpolationMode.BICUBIC)]),
        v1.CenterCrop(12),
        v2.CenterCrop(40),
        v1.Grayscale(),
        v2.Compose([to_float, v2.Grayscale(3)]),
        v1.Pad(3),
        v2.Pad(2, padding_mode="reflect"),
        Chain([v1.CenterCrop(12), ScaleAndNormalize()]),
    ]


@pytest.mark.parametrize("size", [(7, 13), (28, 28), (33, 65)])
def test_known_transforms_do_to_a_batch_what_they_do_to_samples(size: tuple[int, int]) -> None:
    images = torch.randint(0, 256, (70, 3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for transform in known_transforms():
        assert_batch_is_its_samples(InMemory(images, torch.arange(70), transform))


def test_random_and_unknown_transforms_run_by_sample() -> None:
    from torchvision import transforms as v1
    from torchvision.transforms import v2

    class MyNormalize(v1.Normalize):  # type: ignore[misc]
        pass

    to_float = v1.ConvertImageDtype(torch.float32)
    for transform in (
        v1.RandomCrop(4),
        v1.Compose([to_float, v1.RandomHorizontalFlip()]),
        v1.Compose([to_float, v1.Compose([v2.RandomHorizontalFlip()])]),
        v2.RandomApply([v2.CenterCrop(4)]),
        nn.Sequential(nn.Identity(), nn.Dropout()),
        Chain([ScaleAndNormalize(), v1.RandomErasing()]),
        MyNormalize([0.5], [0.5]),
        nn.BatchNorm2d(3),
        lambda image: image / 255,
    ):
        assert not runs_on_batches(transform), transform


def test_a_transform_may_say_that_it_is_batched() -> None:
    class Halve:
        batched = True

        def __call__(self, values: Tensor) -> Tensor:
            return values / 2

    assert_batch_is_its_samples(InMemory(torch.rand(9, 4), torch.arange(9), Halve()))
    Halve.batched = False
    assert not InMemory(torch.rand(9, 4), torch.arange(9), Halve()).batched


def test_transforms_written_for_pil_images_run_on_tensors() -> None:
    from torchvision import transforms as v1
    from torchvision.transforms import v2

    image = torch.randint(0, 256, (1, 28, 28), dtype=torch.uint8)
    pil = v1.ToPILImage()(image)
    normalize = v1.Normalize(MNIST_MEAN, MNIST_STD)
    for transform in (
        v1.ToTensor(),
        v1.Compose([v1.ToTensor(), normalize]),
        v1.Compose([v1.CenterCrop(20), v1.Compose([v1.ToTensor(), normalize])]),
        v1.Compose([v1.PILToTensor(), v1.ConvertImageDtype(torch.float32), normalize]),
        v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]),
    ):
        converted = for_tensors(transform)
        assert torch.equal(converted(image), transform(pil)), transform
        assert runs_on_batches(converted)
    there_and_back = for_tensors([v1.ToPILImage(), v1.ToTensor()])
    assert torch.equal(there_and_back(image), v1.ToTensor()(pil))
    assert not runs_on_batches(there_and_back)


def test_transforms_from_config(tmp_path: Path) -> None:
    module = "torchvision.transforms"
    config: dict[str, Any] = {
        "_target_": "ddp_recipes.datasets.mnist",
        "root": str(write_mnist(tmp_path)),
        "transform": [
            {"_target_": f"{module}.ToTensor"},
            {"_target_": f"{module}.Normalize", "mean": MNIST_MEAN, "std": MNIST_STD},
        ],
    }
    dataset = make(config, "data.train")
    assert_batch_is_its_samples(dataset)
    everything = torch.arange(len(dataset))
    assert torch.equal(dataset.fetch(everything)[0], datasets.mnist(tmp_path).fetch(everything)[0])

    config["transform"].insert(0, {"_target_": f"{module}.RandomCrop", "size": 28, "padding": 4})
    dataset = make(config, "data.train")
    assert not dataset.batched
    assert dataset[0][0].shape == (1, 28, 28)


# --- tabular data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "num_train", "num_val", "num_features", "num_classes"),
    [(datasets.digits, 1437, 360, 64, 10), (datasets.breast_cancer, 455, 114, 30, 2)],
)
def test_tabular(
    make: Callable[..., InMemory], num_train: int, num_val: int, num_features: int, num_classes: int
) -> None:
    train, val = make("train"), make("val")
    assert train.inputs.shape == (num_train, num_features)
    assert val.inputs.shape == (num_val, num_features)
    assert train.inputs.dtype == torch.float32
    assert set(train.targets.tolist()) == set(val.targets.tolist()) == set(range(num_classes))
    assert train.targets.dtype == torch.int64

    # Statistics of the training part only; a constant column stays at zero.
    deviation = train.inputs.std(dim=0, correction=0)
    constant = train.inputs.amax(dim=0) == train.inputs.amin(dim=0)
    torch.testing.assert_close(train.inputs.mean(dim=0), torch.zeros(num_features), atol=1e-5, rtol=0)
    torch.testing.assert_close(deviation[~constant], torch.ones(int((~constant).sum())), atol=1e-5, rtol=0)
    assert not train.inputs[:, constant].any()
    assert val.inputs.mean(dim=0).abs().max() > 1e-3

    # The same seed cuts the same way, another one differently.
    assert torch.equal(make("train").inputs, train.inputs)
    assert not torch.equal(make("train", seed=1).targets, train.targets)


def test_train_and_val_are_the_whole_table() -> None:
    from sklearn.datasets import load_breast_cancer, load_digits

    assert torch.equal(datasets.digits("all").targets, torch.from_numpy(load_digits().target))
    whole, table = datasets.breast_cancer("all"), load_breast_cancer()
    assert torch.equal(whole.targets, torch.from_numpy(table.target))
    training = rows_of("train", len(table.data), val_fraction=0.2, seed=42)
    assert torch.equal(whole.inputs, standardize(torch.from_numpy(table.data), training))
    train, val = datasets.breast_cancer("train"), datasets.breast_cancer("val")
    assert not {tuple(row) for row in train.inputs.tolist()} & {tuple(row) for row in val.inputs.tolist()}
    assert len(datasets.breast_cancer("all")) == 569


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "vall"}, "split=vall is not known. Allowed: all, train, val. Did you mean 'val'"),
        ({"val_fraction": 1.5}, "val_fraction=1.5 is not a fraction"),
        ({"val_fraction": 0, "split": "val"}, "leaves none for split 'val'.*data.val=null"),
        ({"val_fraction": 0.999}, "leaves none for split 'train'"),
    ],
)
def test_bad_split(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        datasets.breast_cancer(**arguments)


# --- synthetic data --------------------------------------------------------------------------------------------------


def test_random_regression_splits_share_the_map() -> None:
    train, val = datasets.random_regression(), datasets.random_regression(split="val")
    assert train.inputs.shape == (2048, 10)
    assert train.targets.shape == (2048, 5)
    solution = torch.linalg.lstsq(train.inputs, train.targets).solution
    assert (val.inputs @ solution - val.targets).square().mean() < 0.012
    assert not torch.equal(train.inputs, val.inputs)
    assert torch.equal(datasets.random_regression().targets, train.targets)
    assert not torch.equal(datasets.random_regression(seed=1).targets, train.targets)
    assert datasets.random_regression(7, 3, 2).targets.shape == (7, 2)


@pytest.mark.parametrize("num_classes", [7, 10, 256, 1000])
def test_fake_images(num_classes: int) -> None:
    train = datasets.fake_images(3 * num_classes, 8, num_classes=num_classes)
    val = datasets.fake_images(3 * num_classes, 8, num_classes=num_classes, split="val")
    inputs, targets = train.fetch(torch.arange(len(train)))
    assert inputs.shape == (3 * num_classes, 3, 8, 8)
    assert inputs.dtype == torch.float32
    assert 0 <= inputs.min() < 0.1 < 0.9 < inputs.max() <= 1
    assert targets.bincount().tolist() == [3] * num_classes
    assert train.inputs.dtype == torch.uint8
    assert len(train.inputs) <= 256
    assert not torch.equal(train.inputs, val.inputs)
    if num_classes <= 256:  # then images tell classes apart: the pattern of a class is the same in both splits
        assert train.rows is not None
        assert torch.equal(train.targets, train.rows % num_classes)


@pytest.mark.parametrize("make", [datasets.random_regression, datasets.fake_images])
def test_bad_synthetic(make: Callable[..., InMemory]) -> None:
    with pytest.raises(RequestError, match="num_samples=0 is too small"):
        make(num_samples=0)
    with pytest.raises(RequestError, match=r"split=tets is not known.*Did you mean 'test'"):
        make(split="tets")


# --- image files -----------------------------------------------------------------------------------------------------


def test_missing_mnist(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        datasets.mnist(tmp_path)
    message = str(caught.value)
    assert f"data.root={tmp_path}: there is no MNIST in {tmp_path / 'MNIST' / 'raw'}" in message
    assert "data.root=<the folder that holds MNIST/raw>, or data.download=true" in message
    assert not list(tmp_path.iterdir())


def test_damaged_mnist(tmp_path: Path) -> None:
    root = write_mnist(tmp_path)
    images = root / "MNIST" / "raw" / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:1000])
    with pytest.raises(RequestError, match="incomplete or damaged"):
        datasets.mnist(root)
    images.unlink()
    with pytest.raises(RequestError, match="incomplete or damaged"):
        datasets.mnist(root)


def test_failed_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import FashionMNIST

    monkeypatch.setattr(FashionMNIST, "mirrors", [(tmp_path / "nowhere").as_uri() + "/"])
    with pytest.raises(RequestError, match="FashionMNIST could not be downloaded to"):
        datasets.fashion_mnist(tmp_path, download=True)


def test_unknown_split_of_mnist(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"split=val is not known\. Allowed: test, train"):
        datasets.mnist(tmp_path, "val")


def write_images(root: Path, *classes: str, count: int = 2) -> None:
    from PIL import Image

    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (50, 40), (number * 40, index, 0)).save(root / name / f"{index}.png")


def test_image_folder(tmp_path: Path) -> None:
    write_images(tmp_path / "train", "ant", "bee", "cat")
    write_images(tmp_path / "val", "bee", "cat")
    train = datasets.image_folder(tmp_path, "train", image_size=32, num_classes=3)
    val = datasets.image_folder(tmp_path, "val", image_size=32)
    assert [train[i][1] for i in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [val[i][1] for i in range(4)] == [1, 1, 2, 2]
    assert train[0][0].shape == (3, 32, 32)
    assert train[0][0].dtype == torch.float32


def test_a_pipe_among_images_is_no_image_and_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "train" / "cats").mkdir(parents=True)
    os.mkfifo(tmp_path / "train" / "cats" / "pipe.png")
    with pytest.raises(RequestError, match=r"pipe\.png is no regular file"):
        datasets.image_folder(tmp_path, image_size=32)[0]


def test_images_of_more_than_eight_bits_are_refused(tmp_path: Path) -> None:
    from PIL import Image

    folder = tmp_path / "train" / "depths"
    folder.mkdir(parents=True)
    for name, most in (("dark", 255), ("far", 256)):
        Image.fromarray(numpy.full((40, 40), most, dtype="uint16")).save(folder / f"{name}.png")
    found = datasets.image_folder(tmp_path, image_size=32, transform=numpy.asarray)
    assert found[0][0].tolist() == numpy.full((40, 40, 3), 255).tolist()
    with pytest.raises(RequestError, match=r"far\.png: images are read in RGB, .* mode I.*\. Give its array by"):
        found[1]


def test_image_folder_with_random_transforms(tmp_path: Path) -> None:
    from torchvision.transforms import RandomCrop, ToTensor

    write_images(tmp_path / "train", "ant")
    assert datasets.image_folder(tmp_path, transform=[RandomCrop(8), ToTensor()])[0][0].shape == (3, 8, 8)


def test_bad_image_folder(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=f"data.root={tmp_path}: there is no folder {tmp_path / 'train'}"):
        datasets.image_folder(tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(RequestError, match=r"Expected are images in <root>/train/<class>/"):
        datasets.image_folder(tmp_path)
    write_images(tmp_path / "train", "ant", "bee")
    with pytest.raises(RequestError, match=r"2 classes .* data.out_features=1 is too small"):
        datasets.image_folder(tmp_path, num_classes=1)
    write_images(tmp_path / "val", "bees")
    with pytest.raises(RequestError, match=r"class 'bees'.* Did you mean 'bee'\? Classes are: ant, bee"):
        datasets.image_folder(tmp_path, "val")


# --- csv tables ------------------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Twenty rows, with a byte order mark and blanks as spreadsheets and people write them."""
    path = tmp_path / "flowers.csv"
    rows = [f"{i}, {i * i}, {'iris' if i % 2 else 'rose'}, {i / 4}, {i}.png" for i in range(20)]
    path.write_text("\ufeff" + "\n".join(["width, height, kind, price, photo", *rows]) + "\n\n", encoding="utf-8")
    return path


def everything(dataset: Any) -> tuple[Tensor, Tensor]:
    inputs, targets = dataset.fetch(torch.arange(len(dataset)))
    return inputs, targets


def test_csv_of_numbers(table: Path) -> None:
    dataset = csv_table(table, ["height", "width"], "price", "all")
    assert isinstance(dataset, InMemory)
    assert_batch_is_its_samples(dataset)
    inputs, targets = everything(dataset)
    assert torch.equal(inputs, torch.tensor([[i * i, i] for i in range(20)], dtype=torch.float32))
    assert torch.equal(targets, torch.tensor([[i / 4] for i in range(20)]))


def test_csv_of_classes(table: Path) -> None:
    _, targets = everything(csv_table(table, ["width"], "kind", "all", classes=["rose", "iris"]))
    assert targets.tolist() == [0, 1] * 10
    assert targets.dtype == torch.int64
    _, targets = everything(csv_table(table, ["height"], "width", "all", classes=list(range(20))))
    assert targets.tolist() == list(range(20))


def test_csv_splits(table: Path) -> None:
    splits = [
        everything(csv_table(table, ["width"], "price", split))[0].flatten().tolist() for split in ("train", "val")
    ]
    assert [len(split) for split in splits] == [16, 4]
    assert sorted(splits[0] + splits[1]) == list(range(20))
    other = everything(csv_table(table, ["width"], "price", "val", seed=1))[0].flatten().tolist()
    assert other != splits[1]


def test_csv_standardized(table: Path) -> None:
    train, _ = everything(csv_table(table, ["width", "height"], "price", standardized=True))
    assert train.dtype == torch.float32
    torch.testing.assert_close(train.mean(dim=0), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(train.std(dim=0, correction=0), torch.ones(2))


def test_csv_from_config(table: Path) -> None:
    config = {
        "_target_": "ddp_recipes.datasets.csv_table",
        "path": str(table),
        "inputs": ["width", "height"],
        "target": "kind",
        "classes": ["rose", "iris"],
        "split": "val",
    }
    dataset = make(config, "data.val")
    assert everything(dataset)[0].shape == (4, 2)


def test_csv_of_images(table: Path) -> None:
    from PIL import Image

    for i in range(20):
        Image.new("L", (20, 10), i).save(table.parent / f"{i}.png")
    dataset = csv_table(
        table, [], "kind", "all", classes=["rose", "iris"], image_column="photo", root=table.parent, image_size=8
    )
    assert len(dataset) == 20  # type: ignore[arg-type]
    image, target = dataset[3]
    assert image.shape == (3, 8, 8)
    assert target == 1
    raw = csv_table(table, [], "price", "all", image_column="photo", root=table.parent, transform=lambda image: image)
    assert raw[3][0].getpixel((0, 0)) == (3, 3, 3)  # type: ignore[attr-defined]
    assert raw[3][1].tolist() == [0.75]

    (table.parent / "5.png").unlink()
    with pytest.raises(RequestError, match=r"line 7, column 'photo': there is no file .*5.png"):
        csv_table(table, [], "price", image_column="photo", root=table.parent)
    with pytest.raises(RequestError, match="leave one out"):
        csv_table(table, ["width"], "price", image_column="photo", root=table.parent)


@pytest.fixture(scope="module")
def csv_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path for all examples of a property."""
    return tmp_path_factory.mktemp("csv") / "table.csv"


def names(least: int) -> st.SearchStrategy[list[str]]:
    """Names of columns, with what a csv file has to quote."""
    text = st.text("ab ,;'\"é\n", min_size=1, max_size=4).map(lambda name: f"c{name}c")
    return st.lists(text, min_size=least, max_size=4, unique=True)


@given(names(2), st.data(), st.sampled_from(",;\t|"), st.sampled_from(["\r\n", "\n"]), st.booleans())
def test_what_is_written_as_csv_is_read_the_same(
    csv_file: Path, header: list[str], data: st.DataObject, delimiter: str, ends: str, marked: bool
) -> None:
    """Numbers to the bit of float32, and classes; with blank lines, blanks around fields and a byte order mark."""
    numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)
    count = data.draw(st.integers(1, 6))
    *inputs, target = header
    columns = [data.draw(st.lists(numbers, min_size=count, max_size=count)) for _ in inputs]
    kinds = data.draw(names(1))
    labels = data.draw(st.lists(st.sampled_from(kinds), min_size=count, max_size=count))
    table = [[*header], *(list(row) for row in zip(*columns, labels, strict=True))]
    with csv_file.open("w", newline="", encoding="utf-8-sig" if marked else "utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator=data.draw(st.sampled_from([ends, ends * 2])))
        writer.writerows(table)
    chosen = data.draw(st.permutations(range(len(inputs))))
    found, targets = everything(
        csv_table(csv_file, [inputs[at] for at in chosen], target, "all", classes=kinds, delimiter=delimiter)
    )
    assert torch.equal(found, torch.tensor([columns[at] for at in chosen], dtype=torch.float32).T)
    assert targets.tolist() == [kinds.index(label) for label in labels]
    absent = "".join(header)
    for wanted, aim in (([absent], target), ([inputs[0]], absent)):
        with pytest.raises(RequestError, match=re.escape(f"has no column '{absent}'")):
            csv_table(csv_file, wanted, aim, "all", classes=kinds, delimiter=delimiter)
    with pytest.raises(RequestError, match=re.escape(f"column '{target}': '{labels[0]}' is not a finite number")):
        csv_table(csv_file, inputs[:1], target, "all", delimiter=delimiter)
    with pytest.raises(RequestError, match=re.escape(f"'{labels[0]}' is not among the classes other")):
        csv_table(csv_file, inputs[:1], target, "all", classes=["other"], delimiter=delimiter)


@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=9), st.sampled_from(["", "x", "nan", "inf", "1e999"]), st.data()
)
def test_a_row_of_a_csv_that_does_not_fit_is_named(
    csv_file: Path, values: list[int], wrong: str, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(values) - 1))
    rows = [f"{value},1" for value in values]
    for bad, said in (
        (f"{wrong},1", f"line {place + 2}, column 'a': '{wrong}' is not a finite number"),
        ("1,2,3", f"line {place + 2}: 3 fields where the first line names 2 columns"),
        ("1", f"line {place + 2}: 1 fields where the first line names 2 columns"),
    ):
        csv_file.write_text("\n".join(["a,b", *rows[:place], bad, *rows[place + 1 :]]))
        with pytest.raises(RequestError, match=re.escape(said)):
            csv_table(csv_file, ["a"], "b")


def test_bad_csv_request(table: Path) -> None:
    for inputs, target, classes, message in (
        (["widht"], "price", None, r"no column 'widht'. Did you mean 'width'\? Columns are: width, height, kind"),
        (["width"], "prize", None, r"no column 'prize'. Did you mean 'price'\?"),
        (["width"], "kind", ["rose", "irys"], r"line 3, column 'kind': 'iris' is not among .* Did you mean 'irys'\?"),
        (["width", "price"], "price", None, "give one column or more, and not the target"),
        ([], "price", None, "give one column or more"),
    ):
        with pytest.raises(RequestError, match=message):
            csv_table(table, inputs, target, classes=classes)


def test_bad_csv_file(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    for text, message in (
        (None, r"table.csv cannot be read as a csv file: No such file or directory"),
        ("", "has no rows"),
        ("a,b\n", "has no rows"),
        ('a,b\n1,2\n"3,4\n', "cannot be read as a csv file"),
        (b"a,b\n\xff,2\n", "cannot be read as a csv file"),
    ):
        if text is not None:
            path.write_bytes(text.encode() if isinstance(text, str) else text)
        with pytest.raises(RequestError, match=message):
            csv_table(path, ["a"], "b")


WORDS = st.lists(st.text("ab ,", min_size=1, max_size=3).map(lambda text: f"x{text}x"), min_size=1, max_size=5)
LOSSES = st.sampled_from(
    ["torch.nn.CrossEntropyLoss", "torch.nn.NLLLoss", "torch.nn.MSELoss", "torch.nn.L1Loss", "mine"]
)


@given(WORDS | st.lists(st.integers(-20, 20), min_size=1) | st.lists(st.sampled_from([1.5, 2, 3]), min_size=1), LOSSES)
def test_classes_of_a_column_are_its_texts_in_their_order(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str | float], loss: str
) -> None:
    """Texts in that of letters, whole numbers in theirs where the loss is one of classes."""
    path = tmp_path_factory.mktemp("classes", numbered=True) / "t.csv"  # what was read is kept by path and time
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=";").writerows([["x", " y "], *([1, text] for text in texts)])
    of_values, of_classes = "MSE" in loss or "L1" in loss, "CrossEntropy" in loss or "NLL" in loss
    words, whole = isinstance(texts[0], str), all(isinstance(text, int) for text in texts)
    known = not of_values and (words or (whole and of_classes))
    found = column_classes(str(path), "y", ";", loss)
    assert found == ([str(text) for text in sorted(set(texts))] if known else None)


@pytest.mark.parametrize(
    ("texts", "task", "classes"),
    [(["no", "yes", "no"], "classification", ["no", "yes"]), (["10", "9", "9"], "regression", None)],
)
def test_classes_of_a_table_are_found(texts: list[str], task: str, classes: list[str] | None, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("x; y \n" + "".join(f"1;{text}\n" for text in texts))
    table = ["data=csv", f"data.path={path}", "data.inputs=[x]", "data.target=y", "data.delimiter=';'"]
    data = make_job([f"task={task}", *table]).config["data"]
    assert data["classes"] == data["train"]["classes"] == classes
    assert data["out_features"] == len(classes or "1")
    if classes:
        chosen = make_job([*table, "data.classes=[a,b,c]"]).config["data"]
        assert (chosen["classes"], chosen["out_features"]) == (["a", "b", "c"], 3)


def test_classes_of_folders_are_found(tiny_data: Path, tmp_path: Path) -> None:
    assert make_job(["data=image_folder", f"data.root={tiny_data}"]).config["data"]["out_features"] == 3
    with pytest.raises(RequestError, match="there is no folder"):
        make(make_job(["data=image_folder", f"data.root={tmp_path}"]).config["data"]["train"], "data.train")
