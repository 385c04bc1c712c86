"""Loaders: whole batches or sample by sample, the same samples on any number of ranks and workers."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from ddp_recipes._compat.torch_ import tree_leaves
from ddp_recipes.data.keyed import Draw, Form, collate, samples_in, skip, to_device
from ddp_recipes.data.loader import Batch, Loader, is_iterable, size_of
from ddp_recipes.data.one_by_one import KeyedDataset
from ddp_recipes.data.order import BatchPlan, Sequential, Shuffled
from ddp_recipes.datasets import InMemory, ScaleAndNormalize, digits, fake_images
from ddp_recipes.errors import RequestError, RunFailed
from helpers.marks import at_night

CPU = torch.device("cpu")


class OneByOne(Dataset[Any]):
    """Hides what allows a data set to be fetched by whole batches."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


class Noisy(Dataset[Any]):
    """Each sample is its number and what a random transform would draw, from all three generators."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


class SometimesNoisy(Noisy):
    """Few of the samples draw from some of them."""

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        drawn = [
            torch.rand(()).item() if index % 3 else 0.0,
            random.random() if index % 5 == 1 else 0.0,
            np.random.rand() if index % 7 == 2 else 0.0,
        ]
        return index, torch.tensor(drawn, dtype=torch.float64)


class Large(Dataset[Tensor]):
    """Samples of 4 MB, full of their number."""

    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((1 << 20,), float(index))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Pair(NamedTuple):
    inputs: Tensor
    name: str


def loader(dataset: Any, batch: int = 8, rank: int = 0, world: int = 1, workers: int = 0, **options: Any) -> Loader:
    plan = BatchPlan(Shuffled(len(dataset), 42), batch, world, seed=42, **options)
    return Loader(dataset, plan, CPU, shards=range(rank, rank + 1), num_workers=workers)


def assert_same(ones: list[Batch], others: list[Batch]) -> None:
    assert len(ones) == len(others) > 0
    for one, other in zip(ones, others, strict=True):
        assert one[1:] == other[1:]
        assert type(other.data[0]) is torch.Tensor
        assert all(map(torch.equal, one.data, other.data))


@pytest.mark.parametrize(
    "dataset",
    [
        digits("val"),
        fake_images(61, image_size=5),
        InMemory(torch.arange(60).reshape(10, 6).to(torch.uint8), torch.arange(10), ScaleAndNormalize()),
        TensorDataset(torch.randn(30, 4), torch.arange(30)),
    ],
    ids=["digits", "fake_images", "InMemory with a transform", "TensorDataset"],
)
def test_whole_batches_are_their_samples(dataset: Any) -> None:
    for rank in range(2):
        whole = loader(dataset, rank=rank, world=2)
        one_by_one = loader(OneByOne(dataset), rank=rank, world=2)
        assert whole.fetch is not None
        assert one_by_one.fetch is None
        for epoch in (0, 1):
            assert_same(list(one_by_one.batches(epoch)), list(whole.batches(epoch)))
        assert_same([Batch(one_by_one.sample(), 1)], [Batch(whole.sample(), 1)])


def drawn(world: int, workers: int, epoch: int = 0, batch: int = 4) -> dict[int, list[float]]:
    """Return what each sample drew, over all ranks."""
    found: dict[int, list[float]] = {}
    for rank in range(world):
        for shard in loader(Noisy(), batch, rank, world, workers).batches(epoch):
            numbers, values = shard.data
            if shard.num_samples:
                found.update(zip(numbers.tolist(), values.tolist(), strict=True))
    return found


@pytest.mark.parametrize("features", [1, 10, 16, 100])
@pytest.mark.parametrize("batch", [1, 7, 20, 64])
def test_prefetched_batches_begin_where_torch_has_tensors_begin(features: int, batch: int) -> None:
    samples = torch.randn(1000, features)
    seen = [each.data for each in loader(TensorDataset(samples, torch.arange(1000)), batch).batches(0)]
    assert len({inputs.untyped_storage().data_ptr() for inputs, _ in seen}) <= len(seen) / 4, "many in one go"
    assert all(tensor.data_ptr() % 64 == 0 and tensor.is_contiguous() for rows in seen for tensor in rows)
    numbers = torch.cat([targets for _, targets in seen])
    assert sorted(numbers.tolist()) == list(range(1000))
    assert torch.equal(torch.cat([inputs for inputs, _ in seen]), samples[numbers])


class Tripling:
    """A user's transform: nobody knows what else it does."""

    batched = True

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def __call__(self, inputs: Tensor) -> Tensor:
        self.threads.add(threading.current_thread().name)
        return inputs * 3


def test_a_users_transform_runs_when_its_batch_is_due() -> None:
    transform = Tripling()
    list(loader(InMemory(torch.randn(100, 4), torch.arange(100), transform)).batches(0))
    assert transform.threads == {threading.current_thread().name}


class Color(Enum):
    """Members refer to their class, and that to them."""

    RED = "red"


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(3, 2), 3),
        (torch.zeros(()), 1),
        ((["a", "b"], torch.zeros(3, 2)), 3),
        ({"name": ["a", "b"], "place": [(1, 2)], "pair": (torch.zeros(4), torch.zeros(5))}, 4),
        (SimpleNamespace(name="a", inputs={"a": torch.zeros(2)}), 2),
        ((Color.RED, SimpleNamespace(inputs=torch.zeros(5))), 5),
        ({"name": ["a", "b"]}, 1),
        ([], 1),
    ],
)
def test_the_first_tensor_says_how_many_samples_a_batch_has(batch: Any, expected: int) -> None:
    assert samples_in(batch) == expected


def test_prefetch_errors_come_out() -> None:
    dataset = InMemory(torch.randn(100, 16), torch.arange(100))
    batches = loader(dataset).batches(0)
    next(batches)
    dataset.targets = torch.zeros(3)
    with pytest.raises(IndexError):
        list(batches)


def test_random_transforms_draw_the_same_whoever_loads_a_sample() -> None:
    expected = drawn(world=1, workers=0)
    assert sorted(expected) == list(range(23))
    assert len({value for values in expected.values() for value in values}) == 3 * 23, "each sample draws its own"
    for world, workers in [(1, 2), (2, 0), (2, 2), (3, 0)]:
        assert drawn(world, workers) == expected
    assert drawn(world=2, workers=0, batch=16) == expected
    other = drawn(world=1, workers=0, epoch=1)
    assert all(other[number] != values for number, values in expected.items()), "another epoch draws anew"


def test_samples_that_are_the_first_to_draw_draw_the_same() -> None:
    dataset = KeyedDataset(SometimesNoisy(), 42, "data", collate)
    order = [Draw(number, 1, number) for number in range(23)]
    expected = dataset.__getitems__([*order, *order]).data[1][23:]  # by then all generators have been drawn from
    for number in range(23):
        again = KeyedDataset(SometimesNoisy(), 42, "data", collate)
        before = random.getstate()
        assert torch.equal(again.__getitems__(order[number:]).data[1], expected[number:])
        assert random.getstate() == before


def test_large_batches_take_memory_that_nobody_has_any_more() -> None:
    plan = BatchPlan(Shuffled(45, 42), 9)
    held: dict[int, Any] = {}
    places = []
    for number, batch in enumerate(Loader(Large(), plan, CPU).batches(0)):
        assert batch.data.is_contiguous()
        assert torch.equal(batch.data, plan.indices(0, number).float()[:, None].expand(-1, 1 << 20))
        places.append(batch.data.data_ptr())
        if number < 2:
            held[number] = batch.data[3].numpy()
    for number, values in held.items():
        assert (values == float(plan.indices(0, number)[3])).all(), "whoever has a part of a batch keeps it"
    assert len({*places}) < 5, "the others take turns"
    assert all(place % 64 == 0 for place in places)


ON_FOUR_THREADS = """
import torch
from ddp_recipes.data.order import BatchPlan
from ddp_recipes.data.loader import Loader
from ddp_recipes.data.order import Sequential

class Sums(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(1 << 20, generator=torch.Generator().manual_seed(index)).sum()

torch.set_num_threads(4)
for workers in (0, 1):
    loader = Loader(Sums(), BatchPlan(Sequential(8), 8), torch.device("cpu"), num_workers=workers)
    print([batch.data.tolist() for batch in loader.batches(0)], torch.get_num_threads())
    loader.close()
"""


@pytest.mark.slow
def test_samples_that_sum_are_the_same_in_a_worker_and_in_the_rank() -> None:
    output = subprocess.run([sys.executable, "-c", ON_FOUR_THREADS], check=True, capture_output=True, text=True).stdout
    in_rank, in_worker = output.splitlines()
    assert in_rank == in_worker
    assert in_rank.endswith("]] 4"), "the rank's own threads are as they were"


def test_loading_leaves_the_generators_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    list(loader(Noisy()).batches(0))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_go_on_in_the_middle_of_an_epoch(workers: int) -> None:
    dataset = Noisy()
    whole = list(loader(dataset, 4).batches(1))
    again = loader(dataset, 4, workers=workers)
    assert_same(whole[3:], list(again.batches(1, start=3)))
    assert_same(whole, list(again.batches(1)))
    assert list(again.batches(1, start=len(again))) == []


def test_rank_without_a_sample_has_one_that_does_not_count() -> None:
    for dataset in (digits("val"), OneByOne(digits("val"))):
        plan = BatchPlan(Sequential(3), 2, num_shards=2, seed=42)
        batches = list(Loader(dataset, plan, CPU, shards=range(1, 2)).batches(0))
        assert [batch.num_samples for batch in batches] == [1, 0]
        assert [len(batch.data[1]) for batch in batches] == [1, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_come_one_after_the_other_in_each_group_of_batches(workers: int) -> None:
    plan = BatchPlan(Shuffled(23, 42), 6, num_shards=3, seed=42)
    expected = [(0, 1), (1, 1), (0, 2), (1, 2), (2, 1), (3, 1), (2, 2), (3, 2)]
    for dataset in (Noisy(), TensorDataset(torch.arange(23), torch.arange(23))):
        batches = list(Loader(dataset, plan, CPU, shards=range(1, 3), num_workers=workers).batches(1, 0, group=2))
        assert [(batch.number, batch.shard) for batch in batches] == expected
        for batch in batches:
            assert torch.equal(batch.data[0], plan.indices(1, batch.number, batch.shard))
            assert batch.num_samples == len(batch.data[0])
        rest = list(Loader(dataset, plan, CPU, shards=range(1, 3), num_workers=workers).batches(1, 3, group=2))
        assert [(batch.number, batch.shard) for batch in rest] == [(3, 1), (3, 2)]


def test_limited_is_the_beginning() -> None:
    full = loader(digits("val"))
    assert len(full) == 45
    assert_same(list(full.batches(0))[:2], list(full.limited(2).batches(0)))
    assert len(full.limited(99)) == 45


def test_no_batch_is_refused() -> None:
    with pytest.raises(
        RequestError, match=r"23 samples, a global batch of 32, the rest dropped.*data\.drop_last=false"
    ):
        loader(Noisy(), batch=32, drop_last=True)
    with pytest.raises(RequestError, match=r"at most 0 batches.*trainer\.limit_\*_batches"):
        loader(Noisy(), max_batches=0)


def test_data_sets_without_an_order_are_refused() -> None:
    assert size_of(Noisy()) == 23
    assert is_iterable(Stream())
    assert not is_iterable(Noisy())
    with pytest.raises(RequestError, match=r"object is no data set\. Give one that has .* or __iter__"):
        size_of(object())
    with pytest.raises(RequestError, match="TensorDataset is empty"):
        size_of(TensorDataset(torch.zeros(0, 2)))
    with pytest.raises(RequestError, match=r"dict is no data set, but holds 2 by name: train, test. Give one of them"):
        size_of({"train": Noisy(), "test": Noisy()})
    assert size_of({0: "one", 1: "two"}) == 2
    pandas = pytest.importorskip("pandas")
    with pytest.raises(RequestError, match=r"DataFrame is no data set: its \[index\] is a column. Give its rows"):
        size_of(pandas.DataFrame({"a": [1, 2]}))


def test_to_device_goes_into_everything_and_keeps_its_kind() -> None:
    x = torch.ones(2)
    data = {"a": [x, (x, 3)], "pair": Pair(x, "name")}
    moved = to_device(data, torch.device("meta"))
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == "meta"
    assert moved["a"][1][1] == 3
    assert type(moved["pair"]) is Pair
    assert moved["pair"].inputs.device.type == "meta"
    assert moved["pair"].name == "name"
    assert to_device(x, CPU) is x


@dataclass
class Row:
    inputs: Tensor
    score: float
    also: tuple[Tensor, str]
    twice: Any = field(init=False)

    def __post_init__(self) -> None:
        self.twice = 2 * self.inputs


def test_samples_of_any_kind_become_batches_and_move() -> None:
    batch = collate([Row(torch.ones(2) * i, i / 2, (torch.zeros(1), "name")) for i in range(3)])
    assert batch.twice.tolist() == [[0, 0], [2, 2], [4, 4]]
    assert type(batch) is Row
    assert torch.equal(batch.score, torch.tensor([0, 0.5, 1]))
    assert batch.also[1] == ["name"] * 3
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is Row
    assert moved.inputs.device.type == moved.also[0].device.type == "meta"
    pair = collate([{"pair": Pair(torch.ones(1), "a")}, {"pair": Pair(torch.ones(1), "b")}])["pair"]
    assert type(pair) is Pair
    assert pair.name == ["a", "b"]
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert type(to_device(packed, torch.device("meta"))) is type(packed), "what has a `to` moves itself"


class Named(dict[str, Any]):
    """A mapping whose values are attributes, too, as of easydict, munch or transformers."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


@dataclass
class Doubled:
    inputs: Tensor
    factor: InitVar[int]

    def __post_init__(self, factor: int) -> None:
        self.inputs = factor * self.inputs
        self.mask = self.inputs > 0


class MovesItself:
    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs

    def to(self, device: torch.device) -> None:
        self.inputs = self.inputs.to(device)


def test_batches_stay_what_they_are_on_another_device_and_in_another_form() -> None:
    meta, half = torch.device("meta"), Form(torch.float16)
    named = collate([Named(inputs=torch.ones(2)), Named(inputs=torch.ones(2))])
    assert (type(named), named.inputs.shape) == (Named, (2, 2))
    assert to_device(named, meta).inputs.is_meta
    assert (half.of(named).inputs.dtype, named.inputs.dtype) == (torch.float16, torch.float32)
    doubled = Doubled(torch.ones(2), 2)
    assert half.of(doubled).inputs.tolist() == [2, 2], "it is not made anew"
    moved = to_device(doubled, meta)
    assert moved.inputs.is_meta
    assert moved.mask.is_meta
    assert not doubled.mask.is_meta
    assert to_device(MovesItself(torch.ones(2)), meta).inputs.is_meta


def test_float64_by_default_becomes_float32() -> None:
    by_default = collate([(np.ones(2), 1.5, np.float64(2))])
    assert [each.dtype for each in by_default] == [torch.float32] * 3
    chosen = collate([(torch.ones(2, dtype=torch.float64), np.ones(2, np.float16), 3)])
    assert [each.dtype for each in chosen] == [torch.float64, torch.float16, torch.int64]


def test_samples_that_make_no_batch_name_the_key() -> None:
    ragged = [{"tokens": [1, 2]}, {"tokens": [1, 2, 3]}]
    for samples in ([torch.ones(1), torch.ones(2)], [object(), object()], ragged, [{"a": 1}, {}]):
        with pytest.raises((RuntimeError, TypeError, ValueError, KeyError)) as raised:
            collate(samples)
        assert "data.collate_fn=my_module.my_function" in raised.value.__notes__[0]


class AtOnce(Noisy):
    """Fetches a batch at once, as rows of Hugging Face do; it draws where it is random."""

    def __init__(self, random: bool) -> None:
        self.random = random
        self.batches = self.singles = 0

    def __getitem__(self, index: int) -> Any:
        self.singles += 1
        return super().__getitem__(index) if self.random else (index, torch.tensor([index] * 3, dtype=torch.float64))

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.batches += 1
        singles, samples = self.singles, [self[index] for index in indices]
        self.singles = singles
        return samples


def test_batches_are_fetched_at_once_where_nothing_is_drawn() -> None:
    plain = AtOnce(random=False)
    one_by_one = OneByOne(plain)
    assert_same(list(loader(one_by_one).batches(0)), list(loader(plain).batches(0)))
    assert (plain.batches, plain.singles) == (3, 23)
    drawing = AtOnce(random=True)
    for world in (1, 2):
        for rank in range(world):
            ours = list(loader(drawing, rank=rank, world=world).batches(0))
            assert_same(list(loader(Noisy(), rank=rank, world=world).batches(0)), ours)
    assert drawing.batches == 3, "the first batch of each loader told"


class Passing:
    """A user's wrapper, which makes its samples of another set's, and passes on what it lacks."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> int:
        return -int(self.dataset[index][0])


class Negated(InMemory):
    """Makes other samples than the class that it derives from."""

    def __getitem__(self, index: int) -> Any:
        return -super().__getitem__(index)[0]


class Holes(InMemory):
    """Leaves out a sample, and says so."""

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        for number in indices.tolist():
            if number % 10 == 0:
                skip(f"number {number}")
        return super().fetch(indices.clamp(min=1))


NUMBERS = torch.arange(23), torch.arange(23)


def test_samples_left_out_of_whole_batches_are_counted() -> None:
    whole = loader(Holes(*NUMBERS), batch=5)
    list(whole.batches(0))
    assert whole.skipped == {"number 0", "number 10", "number 20"}


@pytest.mark.parametrize("dataset", [Passing(AtOnce(random=False)), Passing(InMemory(*NUMBERS)), Negated(*NUMBERS)])
def test_samples_are_those_of_the_sets_own_getitem(dataset: Any) -> None:
    found = torch.cat([batch.data for batch in loader(dataset).batches(0)])
    assert sorted(found.tolist()) == list(range(-22, 1)), "not those of what is within"


class Broken(Noisy):
    def __getitem__(self, index: int) -> Any:
        if index == 17:
            raise ValueError("no such picture")
        return super().__getitem__(index)


class BrokenAtOnce(Broken):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize(("dataset", "workers"), [(Broken(), 0), (Broken(), 1), (BrokenAtOnce(), 0)])
def test_a_sample_that_fails_is_named(dataset: Any, workers: int) -> None:
    batches = loader(dataset, workers=workers)
    with pytest.raises(ValueError, match="no such picture") as raised:
        list(batches.batches(0))
    batches.close()
    told = "".join(traceback.format_exception(raised.value)).strip().splitlines()[-1]
    assert told == f"ValueError of sample 17 of data, a {type(dataset).__name__} of 23: no such picture"


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [*at_night(0), 1])  # while they are in an epoch, and before they begin one
def test_data_workers_may_be_slow_and_may_not_hang(epochs: int) -> None:
    """Longer than the looks at the time in between, not as long as the timeout; also while they begin a new epoch."""
    found = Loader(OneByOne(digits("val")), BatchPlan(Sequential(60), 2), CPU, num_workers=1, timeout_s=4.0)
    for epoch in range(epochs):
        list(found.batches(epoch))
    batches = found.batches(epochs)
    first = [] if epochs else [next(batches)]
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    threading.Timer(2.5, os.kill, [worker.pid, signal.SIGCONT]).start()
    assert len([*first, *batches]) == 30
    list(zip(range(3), found.batches(2), strict=False))
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(RunFailed, match=r"ata worker .*of data gave no batch within launcher.timeout_s=4 seconds"):
        list(found.batches(3))
    found.close()


class Lost:
    """A sample whose data worker is killed as its rank reads it, which then finds the connection broken."""

    def __reduce__(self) -> Any:
        return cut_off, (os.getpid(),)


def cut_off(worker: int) -> None:
    os.kill(worker, signal.SIGKILL)
    raise ConnectionResetError(104, "Connection reset by peer")


def test_a_data_worker_that_dies_as_its_batch_is_read_is_named() -> None:
    found = Loader(
        OneByOne(range(8)), BatchPlan(Sequential(8), 2), CPU, num_workers=1, collate_fn=lambda samples: Lost()
    )
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid \d+\) (exited unexpectedly|is killed)"):
        list(found.batches(0))
    found.close()


COLLATES: dict[str, tuple[Callable[[list[Tensor]], Any], bool]] = {  # and whether all takes the memory of one sample
    "rows": (torch.stack, True),
    "padded": (lambda samples: {"x": pad_sequence(samples, True), "pad": 0}, True),
    "lists": (lambda samples: [each.clone() for each in samples], False),
    "one after the other": (lambda samples: [torch.cat(samples), [len(each) for each in samples]], False),
    "of its own type": (lambda samples: SimpleNamespace(x=torch.stack(samples)), False),
    "turned": (lambda samples: torch.stack(samples, 1), False),
}


@pytest.mark.parametrize("form", COLLATES)
def test_a_sample_is_a_batch_of_any_size(form: str) -> None:
    """So that a dry run has what the run will have, whatever a collate function makes of samples."""
    collate_fn, is_small = COLLATES[form]
    rows = torch.randn(23, 5, 2)
    found = Loader(OneByOne(rows), BatchPlan(Sequential(23), 4), CPU, collate_fn=collate_fn)
    for size in (1, 2, 3, 50):
        batch, expected = found.sample(size), collate_fn([rows[0]] * size)
        if isinstance(batch, SimpleNamespace):
            batch, expected = batch.x, expected.x
        torch.testing.assert_close(batch, expected, rtol=0, atol=0)
        if is_small:
            assert {each.untyped_storage().nbytes() for each in tree_leaves(batch) if isinstance(each, Tensor)} == {40}


def test_a_collate_function_is_called_or_refused() -> None:
    plan = BatchPlan(Sequential(23), 4)
    pad = {"collate_fn": lambda samples: [len(samples)]}
    assert [batch.data for batch in Loader(Noisy(), plan, CPU, **pad).limited(2).batches(0)] == [[4], [4]]
    assert Loader(Noisy(), plan, CPU, **pad).sample() == [1]
    assert [each.data for each in Loader(TensorDataset(torch.ones(23)), plan, CPU, **pad).batches(0)][4:] == [[4], [3]]
    with pytest.raises(RequestError, match=r"data.collate_fn makes .* data.val, a InMemory, gives whole batches"):
        Loader(InMemory(torch.ones(23), torch.ones(23)), plan, CPU, name="data.val", **pad)
