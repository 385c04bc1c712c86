"""``ddp-recipes index`` and ``ddp-recipes pack``."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ddp_recipes.data.order import BatchPlan
from ddp_recipes.errors import RequestError
from ddp_recipes.streams.dataset import cache_of
from ddp_recipes.streams.index import IN_ORDER_OF, Index, local_path, make
from ddp_recipes.streams.order import Windowed, cost, quality
from ddp_recipes.streams.pack import Packing, by_name


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message}. {self.format_usage().strip()}")


def index(arguments: Sequence[str]) -> None:
    """Write the index of a set in shards, and print how well some windows shuffle it.

    Raises:
        RequestError: the arguments, or a shard, are wrong.
    """
    parser = _Parser("ddp-recipes index", description="Index a set in shards: data=stream data.path=PATH.")
    parser.add_argument("path", help="folder of shards, or its address in a store")
    parser.add_argument(
        "options", nargs="*", default=[], metavar="key=value", help="of the store, as data.options has them"
    )
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes that read")
    parser.add_argument("--cache", help="folder for shards from stores and compressed ones")
    parser.add_argument("--batch", type=int, default=256, help="samples of a global batch, for the table")
    given = parser.parse_intermixed_args(arguments)
    cache, _ = cache_of({"folder": given.cache}, by_name(given.options))
    made = make(local_path(given.path).rstrip("/"), cache, max(1, given.workers), show)
    print(facts(made))
    for line in windows(made, given.batch):
        print(f"  {line}")


def windows(index: Index, batch: int) -> list[str]:
    """Return a table of how well some windows shuffle a set, and what they cost."""
    rows, kept = sum(index.rows), [shard for shard in index.shards if shard.rows]
    lines = [f"{'window':>12}  {'interleave':>10}  {'displacement':>12}  {'correlation':>11}  {'variance':>8}  memory"]
    for window in (1024, 16384, 262144):
        for interleave in (1, 8):
            order = Windowed(tuple(shard.rows for shard in kept), 0, window, interleave)
            found, takes = quality(order, batch), cost(order, kept, BatchPlan(order, batch), 1 << 62)
            lines.append(
                f"{window:>12,}  {interleave:>10}  {found.displacement:>12.3f}  {found.correlation:>11.3f}  "
                f"{found.batch_variance:>8.2f}  {takes.memory / 1e6:,.1f} MB, {takes.files} files"
            )
        if window >= rows:
            break
    return [*lines, f"A full shuffle: displacement 1, correlation 0, variance of batches of {batch} 1."]


def pack(arguments: Sequence[str]) -> None:
    """Write a data set as shards, with their index.

    Raises:
        RequestError: the arguments are wrong, or the set cannot be packed.
    """
    parser = _Parser("ddp-recipes pack", description="Write a data set as shards: data=stream data.path=DEST.")
    source = (
        "folder of images (a folder a class), csv or jsonl file, folder of a Hugging Face set, or the dotted name of a "
        "function or class that makes a map-style data set"
    )
    parser.add_argument("source", help=source)
    parser.add_argument("dest", help="new folder, or one in which an earlier pack of the same was interrupted")
    parser.add_argument("arguments", nargs="*", default=[], metavar="key=value", help="of the function or class")
    parser.add_argument("--shard-mb", type=float, default=64.0, help="about so much a shard")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes that write")
    parser.add_argument(
        "--shuffle", type=int, metavar="SEED", help="write samples in a shuffled order, as images of folders are"
    )
    given = parser.parse_intermixed_args(arguments)
    if not 0 < given.shard_mb < float("inf"):
        raise RequestError(f"--shard-mb {given.shard_mb:g} is not allowed. Allowed: a number above 0.")
    packing = Packing(
        given.source, tuple(given.arguments), Path(given.dest), round(given.shard_mb * 1e6), given.shuffle
    )
    made = packing.run(max(1, given.workers), show)
    print(facts(made))
    if names := made.more.get(IN_ORDER_OF):
        print(
            f"Rows are in the order of {', '.join(names)}: the last of them say little of the others. To train on it, "
            f"pack with --shuffle SEED."
        )


def facts(index: Index) -> str:
    """Return what an index says of a set."""
    size = sum(shard.bytes for shard in index.shards) / 1e6
    columns = "".join(f"\n  {name}: {kind}" for name, kind in index.columns.items())
    return f"{index.root}: {sum(index.rows):,} rows in {len(index.shards):,} shard(s), {size:,.3g} MB{columns}"


def show(done: int, total: int) -> None:
    """Show how many shards are done, where somebody looks."""
    if sys.stderr.isatty():
        print(f"\r{done:,} of {total:,} shards", end="\n" if done == total else "", file=sys.stderr)
