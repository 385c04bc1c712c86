"""One reader of a set that lies in files: from storage to batches, in a process of its own. See ``benchmarks.data``.

Each is what its documentation shows first, with the same decoding (Pillow), the same transforms and the same batches.
"""

import argparse
import gc
import io
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

LENGTH = 256  # bytes of a text that are used
BUFFER = 1000  # samples that are shuffled among each other, where that is how a reader shuffles


class Job(NamedTuple):
    """What is read: a kind of data in a folder of all formats, as one rank of several."""

    kind: str  # images or text
    folder: Path
    rank: int
    ranks: int
    batch: int

    def at(self, what: str) -> str:
        return str(self.folder / f"{self.kind}_{what}")


class Photo:
    """The usual augmentation for training on images."""

    def __init__(self) -> None:
        from torchvision import transforms

        self.steps = transforms.Compose(
            [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
        )

    def __call__(self, image: Any) -> Tensor:
        found: Tensor = self.steps(image.convert("RGB"))
        return found


def tokens(text: str | bytes) -> Tensor:
    """Return the first bytes of a text, uint8 [LENGTH], with zeros behind a shorter one."""
    content = (text.encode() if isinstance(text, str) else text)[:LENGTH].ljust(LENGTH, b"\0")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def opened(content: bytes) -> Any:
    return Image.open(io.BytesIO(content))


def prepared(kind: str) -> Callable[[Any], Tensor]:
    return Photo() if kind == "images" else tokens


# --- readers ---------------------------------------------------------------------------------------------------------


def ours(job: Job) -> Iterator[Any]:
    from ddp_recipes.data.loader import Loader
    from ddp_recipes.data.order import BatchPlan
    from ddp_recipes.streams import Stream

    columns: dict[str, Any] = {"inputs": "jpg", "targets": "cls"} if job.kind == "images" else {"inputs": "text"}
    stream = Stream(job.at("ours"), transform=prepared(job.kind), **columns)
    plan = BatchPlan(stream.sample_order(0, True), job.batch * job.ranks, job.ranks, 0, True, "strided")
    loader = Loader(stream, plan, torch.device("cpu"), shards=range(job.rank, job.rank + 1))
    for epoch in itertools.count():
        for batch in loader.batches(epoch):
            yield batch.data


class Texts:
    """What one writes who has a folder of jsonl and reads it into memory."""

    def __init__(self, folder: str) -> None:
        lines = [line for file in sorted(Path(folder).glob("*.jsonl")) for line in file.read_text().splitlines()]
        self.rows = lines

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return tokens(json.loads(self.rows[index])["text"])


def by_hand(job: Job) -> Iterator[Any]:
    """Read files with torchvision's ``ImageFolder``, or a list of lines, and torch's ``DataLoader``."""
    from torchvision.datasets import ImageFolder

    dataset: Any = ImageFolder(job.at("source"), Photo()) if job.kind == "images" else Texts(job.at("source"))
    sampler: Any = DistributedSampler(dataset, job.ranks, job.rank, shuffle=True) if job.ranks > 1 else None
    loader: Any = DataLoader(dataset, job.batch, shuffle=sampler is None, sampler=sampler, drop_last=True)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def webdataset(job: Job) -> Iterator[Any]:
    import webdataset as wds

    def of_rank(urls: Any) -> Any:
        return itertools.islice(urls, job.rank, None, job.ranks)

    urls = sorted(map(str, Path(job.at("tar")).glob("*.tar")))
    dataset = wds.WebDataset(urls, shardshuffle=100, nodesplitter=of_rank, seed=0).shuffle(BUFFER)
    prepare = prepared(job.kind)
    if job.kind == "images":
        dataset = dataset.decode("pil").to_tuple("jpg", "cls").map_tuple(prepare, int)
    else:
        dataset = dataset.to_tuple("txt").map_tuple(prepare)
    loader = wds.WebLoader(dataset.batched(job.batch, partial=False), batch_size=None)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def hugging_face(job: Job) -> Iterator[Any]:
    from datasets import load_dataset
    from datasets.distributed import split_dataset_by_node

    kind, files = ("webdataset", "tar/*.tar") if job.kind == "images" else ("parquet", "ours/*.parquet")
    where = {"train": f"{job.folder}/{job.kind}_{files}"}
    dataset = load_dataset(kind, data_files=where, split="train", streaming=True)
    dataset = split_dataset_by_node(dataset.shuffle(seed=0, buffer_size=BUFFER), job.rank, job.ranks)
    prepare = prepared(job.kind)

    def sample(row: Any) -> Any:
        return (prepare(row["jpg"]), row["cls"]) if job.kind == "images" else prepare(row["text"])

    def collated(rows: list[Any]) -> Any:
        return torch.utils.data.default_collate([sample(row) for row in rows])

    loader: Any = DataLoader(dataset, job.batch, collate_fn=collated, drop_last=True)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def mosaicml(job: Job) -> Iterator[Any]:
    from streaming import StreamingDataset

    prepare = prepared(job.kind)

    class Streamed(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            row = super().__getitem__(index)
            return (prepare(opened(row["image"])), row["label"]) if job.kind == "images" else prepare(row["text"])

    dataset = Streamed(local=job.at("mds"), shuffle=True, batch_size=job.batch, shuffle_seed=0)
    loader: Any = DataLoader(dataset, job.batch, drop_last=True)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def litdata(job: Job) -> Iterator[Any]:
    from litdata import StreamingDataLoader, StreamingDataset

    prepare = prepared(job.kind)

    class Streamed(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            row = super().__getitem__(index)
            return (prepare(opened(row["image"])), row["label"]) if job.kind == "images" else prepare(row)

    dataset = Streamed(job.at("litdata"), shuffle=True, seed=0, drop_last=True)
    loader: Any = StreamingDataLoader(dataset, batch_size=job.batch, drop_last=True, num_workers=0)
    return itertools.chain.from_iterable(itertools.repeat(loader))


READERS: dict[str, tuple[Callable[[Job], Iterator[Any]], str]] = {
    "ours": (ours, "ddp_recipes"),
    "by hand": (by_hand, "torchvision"),
    "webdataset": (webdataset, "webdataset"),
    "Hugging Face": (hugging_face, "datasets"),
    "MosaicML": (mosaicml, "streaming"),
    "LitData": (litdata, "litdata"),
}


# --- a process -------------------------------------------------------------------------------------------------------


def memory(field: str = "VmRSS") -> int:
    """Return the memory that this process has for itself and in files that it maps, in bytes; ``VmHWM``: at most."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


def gone_on(folder: Path) -> dict[str, float]:
    """Begin in the middle of the fourth epoch of ``folder/rows``; return seconds, and bytes that this takes."""
    import pyarrow.parquet  # noqa: F401 - not what is measured

    from ddp_recipes.data.loader import Loader
    from ddp_recipes.data.order import BatchPlan
    from ddp_recipes.streams import Stream

    before, began = memory(), time.perf_counter()
    stream = Stream(str(folder / "rows"), inputs="inputs")
    loader = Loader(stream, BatchPlan(stream.sample_order(0, True), 256, 1, 0), torch.device("cpu"))
    ready = time.perf_counter()
    next(loader.batches(3, len(loader) // 2))
    first_s = time.perf_counter() - ready
    return {"rows": len(stream), "index_s": ready - began, "first_s": first_s, "memory": memory() - before}


def main() -> None:
    """Read so many samples after the first batch, and print what that took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=READERS)
    parser.add_argument("kind", choices=["images", "text", "rows"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    given = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    random.seed(rank)
    if given.kind == "rows":
        print(json.dumps(gone_on(given.folder)))
        return
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    import torchvision.transforms  # noqa: F401 - not what is measured

    gc.freeze()  # nor is a collection that looks at all of torch, 0.2 s, in whichever reader it happens to come

    before, began = memory(), time.perf_counter()
    read, module = READERS[given.name]
    __import__(module)
    batches = read(Job(given.kind, given.folder, rank, ranks, given.batch))
    first = next(batches)
    inputs = first[0] if isinstance(first, (list, tuple)) else first
    assert len(inputs) == given.batch, f"{len(inputs)} samples"
    first_s, seen = time.perf_counter() - began, 0
    if ranks > 1:
        torch.distributed.barrier()
    began = time.perf_counter()
    while seen < given.samples:
        next(batches)
        seen += given.batch
    seconds = time.perf_counter() - began
    found = {"first_s": first_s, "per_second": seen / seconds, "memory": memory("VmHWM") - before}
    print(json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(0)  # some leave threads behind


if __name__ == "__main__":
    main()
