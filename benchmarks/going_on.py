"""What a run that goes on is given: of each library the samples of one epoch, whole, after a stop, and on other ranks.

``python -m benchmarks.going_on`` writes 47 numbered rows in 8 shards, and has each library of ``benchmarks.readers``
give them to ranks in global batches of 12, shuffled: an epoch at one go, and one that stops after two global batches
and goes on from the state that the library saves, on as many ranks and on another number. Each row should come once,
and in the batches that the epoch at one go has.
"""

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.data import pack
from benchmarks.samples import ROOT

ROWS, GLOBAL_BATCH, STOP = 47, 12, 2
SHARDS = 8
BUFFER = 10
Batches = Iterator[tuple[list[int], Any]]  # rows of this rank, and the state after them


# --- libraries -------------------------------------------------------------------------------------------------------


def ours(folder: Path, rank: int, ranks: int, state: Any) -> Batches:
    import torch

    from ddp_recipes.data.loader import Loader
    from ddp_recipes.data.order import BatchPlan
    from ddp_recipes.streams import Stream

    stream = Stream(str(folder / "ours"), inputs="number")
    plan = BatchPlan(stream.sample_order(0, True), GLOBAL_BATCH, ranks, 0)
    loader = Loader(stream, plan, torch.device("cpu"), shards=range(rank, rank + 1))
    for batch in loader.batches(0, state or 0):
        yield [int(each) for each in batch.data.flatten()[: batch.num_samples]], batch.number + 1


def webdataset(folder: Path, rank: int, ranks: int, state: Any) -> Batches:
    import webdataset as wds

    urls = sorted(map(str, (folder / "tar").glob("*.tar")))
    dataset = wds.WebDataset(
        urls, shardshuffle=100, seed=0, nodesplitter=lambda urls: itertools.islice(urls, rank, None, ranks)
    )
    numbers = (int(row["txt"]) for row in dataset.shuffle(BUFFER, seed=0))
    while batch := list(itertools.islice(numbers, GLOBAL_BATCH // ranks)):
        yield batch, None  # it has no state


def hugging_face(folder: Path, rank: int, ranks: int, state: Any) -> Batches:
    from datasets import load_dataset
    from datasets.distributed import split_dataset_by_node

    where = {"train": f"{folder}/ours/*.parquet"}
    dataset = load_dataset("parquet", data_files=where, split="train", streaming=True)
    dataset = split_dataset_by_node(dataset.shuffle(seed=0, buffer_size=BUFFER), rank, ranks)
    if state is not None:
        dataset.load_state_dict(state)
    for batch in dataset.iter(GLOBAL_BATCH // ranks):
        yield batch["number"], dataset.state_dict()


def mosaicml(folder: Path, rank: int, ranks: int, state: Any) -> Batches:
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    size = GLOBAL_BATCH // ranks
    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=size, shuffle_seed=0)
    if state is not None:
        dataset.load_state_dict(state)
    done = state["sample_in_epoch"] if state is not None else 0
    for batch in DataLoader(dataset, size):
        done += size * ranks
        yield batch["number"].tolist(), dataset.state_dict(done, from_beginning=True)


def litdata(folder: Path, rank: int, ranks: int, state: Any) -> Batches:
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(str(folder / "litdata"), shuffle=True, seed=0, drop_last=False)
    loader = StreamingDataLoader(dataset, batch_size=GLOBAL_BATCH // ranks, num_workers=0)
    if state is not None:
        loader.load_state_dict(state)
    for batch in loader:
        yield batch.tolist(), loader.state_dict()


LIBRARIES: dict[str, tuple[Callable[[Path, int, int, Any], Batches], str]] = {
    "ours": (ours, "ddp_recipes"),
    "webdataset": (webdataset, "webdataset"),
    "Hugging Face": (hugging_face, "datasets"),
    "MosaicML": (mosaicml, "streaming"),
    "LitData": (litdata, "litdata"),
}


def write(folder: Path) -> None:
    """Write the rows in each library's format."""
    import io
    import tarfile

    source = folder / "rows.jsonl"
    source.write_text("".join(f"{json.dumps({'number': number})}\n" for number in range(ROWS)))
    pack(source, folder / "ours", 1e-5 * ROWS / SHARDS)
    (folder / "tar").mkdir()
    for shard in range(SHARDS):
        with tarfile.open(folder / "tar" / f"part-{shard}.tar", "w") as tar:
            for number in range(ROWS * shard // SHARDS, ROWS * (shard + 1) // SHARDS):
                member = tarfile.TarInfo(f"{number:03}.txt")
                member.size = len(str(number))
                tar.addfile(member, io.BytesIO(str(number).encode()))
    if find_spec("streaming"):
        from streaming import MDSWriter

        with MDSWriter(out=str(folder / "mds"), columns={"number": "int"}, size_limit=120) as out:
            for number in range(ROWS):
                out.write({"number": number})
    if find_spec("litdata"):
        from litdata.streaming.writer import BinaryWriter

        (folder / "litdata").mkdir()
        writer = BinaryWriter(str(folder / "litdata"), chunk_size=ROWS // SHARDS + 1)
        for number in range(ROWS):
            writer[number] = number
        writer.done()
        writer.merge()


# --- runs ------------------------------------------------------------------------------------------------------------


def rank_main(name: str, folder: Path, stop: int | None, state: Path | None, out: Path) -> None:
    """Give one rank its batches, up to ``stop``; write them, and the state after them."""
    import torch

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    saved = None if state is None else torch.load(state, weights_only=False)
    given = list(itertools.islice(LIBRARIES[name][0](folder, rank, ranks, saved), stop))
    torch.save(given[-1][1], f"{out}.{rank}.state")
    Path(f"{out}.{rank}.json").write_text(json.dumps([batch for batch, _ in given]))
    os._exit(0)  # some leave threads behind


def run(name: str, folder: Path, ranks: int, *, stop: int | None = None, before: Path | None = None) -> Path | str:
    """Start ranks; return where they have written, or the last line of what they failed with.

    Each goes on from its own state of the run before, or from rank 0's where it has none.
    """
    out = Path(tempfile.mkdtemp(dir=folder)) / "rank"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(ranks):
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "benchmarks.going_on",
            "--rank-of",
            name,
            str(folder),
            str(out),
        ]
        if stop is not None:
            command += ["--stop", str(stop)]
        if before is not None:
            own = Path(f"{before}.{rank}.state")
            command += ["--state", str(own if own.exists() else f"{before}.0.state")]
        environ = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_PORT": port,
        }
        environ |= {"MASTER_ADDR": "127.0.0.1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        processes.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {key: str(value) for key, value in environ.items()},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    errors = [process.communicate(timeout=120)[1] for process in processes]
    failed = [error for process, error in zip(processes, errors, strict=True) if process.returncode]
    return failed[0].strip().splitlines()[-1] if failed else out


def rows_of(out: Path) -> list[list[int]]:
    """Return the rows of each global batch."""
    ranks = [json.loads(path.read_text()) for path in sorted(out.parent.glob("rank.*.json"))]
    return [[row for batch in batches for row in batch] for batches in itertools.zip_longest(*ranks, fillvalue=[])]


def judged(batches: list[list[int]], whole: list[list[int]]) -> str:
    """Say whether each row came once, and in the batches of the epoch at one go."""
    counts = Counter(row for batch in batches for row in batch)
    lost, again = ROWS - len(counts), sum(count - 1 for count in counts.values())
    same = [sorted(batch) for batch in batches] == [sorted(batch) for batch in whole]
    flaws = [f"{lost} lost"] * bool(lost) + [f"{again} again"] * bool(again)
    return ", ".join(flaws or ["each once"]) + (", same batches" if same else ", other batches")


def row(name: str, folder: Path) -> str:
    """Return what came of a library, as a row."""
    cells, at_once = [], {ranks: run(name, folder, ranks) for ranks in (2, 3)}
    for out in at_once.values():
        counts = Counter(itertools.chain.from_iterable(rows_of(out))) if isinstance(out, Path) else Counter[int]()
        lost, again = ROWS - len(counts), sum(count - 1 for count in counts.values())
        cells.append(f"{lost} lost, {again} again" if isinstance(out, Path) else out)
    two = at_once[2]
    for ranks in (2, 3):
        begun = run(name, folder, 2, stop=STOP)
        if not (isinstance(begun, Path) and isinstance(two, Path)):
            cells.append(str(begun))
            continue
        rest = run(name, folder, ranks, before=begun)
        cells.append(judged(rows_of(begun) + rows_of(rest), rows_of(two)) if isinstance(rest, Path) else rest[:120])
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Print a row a library."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank-of", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--stop", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of is not None:
        name, folder, out = given.rank_of
        rank_main(name, Path(folder), given.stop, given.state, Path(out))
    names = [name for name, (_, module) in LIBRARIES.items() if find_spec(module)]
    with tempfile.TemporaryDirectory() as made:
        write(Path(made))
        print("| | an epoch on 2 ranks | on 3 | 2 ranks, stopped, 2 ranks | 2 ranks, stopped, 3 ranks |")
        print("| --- | --- | --- | --- | --- |")
        for name in names:
            print(row(name, Path(made)), flush=True)
    if missing := [name for name in LIBRARIES if name not in names]:
        print(f"Not installed: {', '.join(missing)}.")


if __name__ == "__main__":
    main()
