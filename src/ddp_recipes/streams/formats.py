"""The formats that shards may have, by the suffixes of their files, and what they are compressed with."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ddp_recipes.errors import not_one_of
from ddp_recipes.streams.columns import Arrow, Groups, Parquet
from ddp_recipes.streams.csv_table import Csv
from ddp_recipes.streams.json_lines import JsonLines
from ddp_recipes.streams.reader import BadShard, Reader, needed
from ddp_recipes.streams.records import Records, Tar, Text

COMPRESSIONS = (".gz", ".zst")


RECORDS: dict[str, type[Records]] = {
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".csv": Csv,
    ".txt": Text,
    ".tar": Tar,
}
SUFFIXES = (".parquet", ".arrow", *RECORDS)


def compression_of(name: str) -> str:
    """Return the suffix that says what a file is compressed with; empty where it is not."""
    suffix = os.path.splitext(name)[1].lower()
    return suffix if suffix in COMPRESSIONS else ""


def format_of(name: str) -> str | None:
    """Return the suffix that says a file's format, without that of its compression; None for any other file.

    After it there may be what a signed address has: ``a.parquet?Signature=…``.
    """
    for each in (name, name.partition("?")[0]):
        suffix = os.path.splitext(each[: len(each) - len(compression_of(each))])[1].lower()
        if suffix in SUFFIXES:
            return suffix
    return None


def opened(path: Path, suffix: str, groups: Groups, only: Sequence[str] | None = None) -> Reader:
    """Return the reader of a file that is not compressed.

    Raises:
        BadShard: it is not of that format.
        RequestError: there is no such format, or its library is missing.
    """
    if suffix == ".parquet":
        return Parquet(path, groups, only)
    if suffix == ".arrow":
        return Arrow(path, only)
    if suffix not in RECORDS:
        raise not_one_of("the suffix of a shard", suffix, SUFFIXES)
    return RECORDS[suffix](path)


def decompressed(source: Any, suffix: str) -> Iterator[bytes]:
    """Yield the content of an open file that is compressed as its suffix says, in chunks.

    Raises:
        BadShard: it is damaged or cut short.
    """
    import gzip
    import zlib

    if suffix == ".zst":
        yield from _of_zstandard(source)
        return
    try:
        with gzip.GzipFile(fileobj=source, mode="rb") as reader:
            while chunk := reader.read(1 << 20):
                yield chunk
    except (OSError, EOFError, zlib.error) as error:
        raise BadShard(f"it cannot be decompressed: {error}") from error


def _of_zstandard(source: Any) -> Iterator[bytes]:
    """Yield the content of frames, one after the other. The library's own reader takes a cut for the end."""
    zstandard = needed("zstandard")
    frame = None
    try:
        while content := source.read(1 << 16):
            while content:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(content)
                content = frame.unused_data
                if frame.eof:
                    frame = None
    except zstandard.ZstdError as error:
        raise BadShard(f"it cannot be decompressed: {error}") from error
    if frame is not None:
        raise BadShard("it cannot be decompressed: it is cut short")
