"""A set in shards as a map-style data set: samples by their number, read where they lie."""

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit
from typing import Annotated, Any

from torch.utils.data import Dataset

from ddp_recipes.config.keys import Count, Fraction, Natural, Range, require
from ddp_recipes.data.keyed import skip
from ddp_recipes.data.order import BatchPlan, Order, Sequential
from ddp_recipes.datasets.transforms import Transforms, in_order
from ddp_recipes.errors import RequestError, not_one_of
from ddp_recipes.streams.cache import Cache, sha256
from ddp_recipes.streams.columns import Groups
from ddp_recipes.streams.csv_table import TYPES
from ddp_recipes.streams.decoding import Decoder
from ddp_recipes.streams.formats import compression_of, format_of, opened
from ddp_recipes.streams.index import IN_ORDER_OF, Shard, is_remote, joined, load, of_kinds, other_columns
from ddp_recipes.streams.order import Windowed, cost, files_of_windows, held_bytes, quality
from ddp_recipes.streams.reader import BadRow, BadShard, Part, Reader, alike, span
from ddp_recipes.streams.records import Records

log = logging.getLogger(__name__)

OPEN = 32  # shards that a process has open, beside those of its windows
MOST_SKIPPED = 4096  # rows; with more the data are another case than a few bad rows
TRIES = 16  # rows that may take the place of one that cannot be decoded


class Stream(Dataset[Any]):
    """Samples of a set in shards: parquet, arrow, jsonl, csv, text or tar files, also compressed, local or in a store.

    The order of training follows from the seed and the epoch (:class:`Windowed`), so a run resumes anywhere and on any
    number of ranks. A process reads samples as they are asked for; it keeps row groups of parquet files in memory, the
    last ones used. Rows of other formats are read one by one.

    Args:
        path: a folder of shards, a shard, or a pattern of their names; a path, or an address that fsspec knows.
        split: ``train``, ``val`` or ``all``: all rows but the last ``val_fraction``, those, or all.
        val_path: of another set, all of which is ``val``; all of ``path`` is ``train`` then.
        inputs: the column that the model takes, or several of numbers; ``None``: a sample is the row, a dict.
        targets: likewise of what it is to give; ``None``: a sample is the inputs alone.
        transform: of the inputs, one or several; an image comes as one of PIL's, in RGB. Without one it is uint8
            ``[3, h, w]``.
        image_size: without a transform images are resized, cropped to this and normalised as ImageNet's are.
        window: rows that are permuted among each other.
        interleave: parts of the set that are read side by side.
        memory_mb: of row groups in memory, in each process that reads, at most; of a shuffled set two windows of them.
        on_error: of a row that cannot be decoded: ``raise``, or ``skip``, which takes the next one of split and shard.
        cache: of shards from stores and compressed ones: ``folder``, ``limit_gb``, ``ahead`` (shards fetched before
            they are needed), ``retries``, ``timeout_s``.
        options: of the store, as fsspec takes them.

    Raises:
        RequestError: there is no such set, it does not fit its index, or what reads it is not installed.
    """

    def __init__(  # noqa: PLR0913 - the keys of data=stream
        self,
        path: str,
        split: str = "all",
        *,
        val_path: str | None = None,
        inputs: str | Sequence[str] | None = None,
        targets: str | Sequence[str] | None = None,
        transform: Transforms | None = None,
        image_size: int | None = None,
        val_fraction: float = 0.0,
        window: int = 16384,
        interleave: int = 8,
        memory_mb: float = 256,
        on_error: str = "raise",
        cache: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise not_one_of("data.on_error", on_error, ("raise", "skip"))
        for name, value in {"window": window, "interleave": interleave}.items():
            require(f"data.{name}", value, Count)
        require("data.memory_mb", memory_mb, Annotated[float, Range(0)])
        require("data.val_fraction", val_fraction, Fraction)
        if not isinstance(path, (str, os.PathLike)):
            raise RequestError(
                f"data.path={path} is no path. Allowed: one folder, shard or pattern, such as {{a,b}}/*.tar; several "
                f"sets are a mixture (data=mixture)."
            )
        if options is not None and not isinstance(options, Mapping):
            raise RequestError(f"data.options={options} is not allowed. Allowed: options by name, as {{anon: true}}.")
        of_training = path if val_path is not None and split == "val" else None
        if val_path is not None:
            path, split = (val_path if split == "val" else path), "all"
        self.cache, self.ahead = cache_of(dict(cache or {}), dict(options or {}))
        self.cache.clean()
        self.index = load(str(path), self.cache)
        if of_training is not None:
            with suppress(RequestError):  # to evaluate takes no such set
                self.index = of_kinds(self.index, str(of_training), self.cache)
        self.window, self.interleave, self.on_error = window, interleave, on_error
        self.memory = round(min(memory_mb, 1e9) * 1e6)
        self._range = _rows_of(split, sum(self.index.rows), val_fraction, str(path))
        self._ends = list(accumulate(self.index.rows))
        self.decoder = Decoder(inputs, targets, None if transform is None else in_order(transform), image_size)
        self.decoder.check(self.index.columns, str(path))
        if all(format_of(shard.name) == ".csv" for shard in self.index.shards):
            self.decoder.numbers = {name for name, kind in self.index.columns.items() if kind in TYPES[1:3]}
        if len(self) < sum(self.index.rows):
            _refuse_last_classes(self.decoder, self.index.more, str(path))
        self._left_out: set[str] = set()  # by this process
        self._process: _Process | None = None
        self._epoch, self._pieces = 0, list[int]()
        self._order: Windowed | None = None

    def __len__(self) -> int:
        return len(self._range)

    def sample_order(self, seed: int, shuffle: bool) -> Order:
        """Return the order of samples, shuffled by shards and windows or not at all."""
        if not shuffle:
            return Sequential(len(self))
        first, last = self._range.start, self._range.stop
        ends = [0, *self._ends]
        rows = [max(0, min(end, last) - max(start, first)) for start, end in pairwise(ends)]
        self._pieces = [number for number, count in enumerate(rows) if count]
        self._order = Windowed(tuple(rows[number] for number in self._pieces), seed, self.window, self.interleave)
        return self._order

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next samples are of: shards are fetched ahead in its order."""
        self._epoch = epoch

    def __getitem__(self, index: int) -> Any:
        number = self._range[index]
        shard, first, end = span(self._ends, number)
        # Of this split: the shard may have rows of the other one, too.
        begin, rows = max(first, self._range.start), min(end, self._range.stop) - max(first, self._range.start)
        for other in range(min(TRIES, rows)):
            row = begin - first + (number - begin + other) % rows
            try:
                part = self._here().part(shard, row, self)
                return self.decoder(part.row(row - part.first))
            except BadShard as error:
                raise _named(error, shard, self) from error
            except BadRow as error:
                path = joined(self.index.root, self.index.shards[shard].name)
                if self.on_error == "raise":
                    raise ValueError(
                        f"Row {row} of {path} cannot be decoded: {error}. Mend it, or leave such rows out: "
                        f"data.on_error=skip"
                    ) from error
                self._leave_out(f"row {row} of {path}", error)
        path = joined(self.index.root, self.index.shards[shard].name)
        raise ValueError(
            f"Row {number - first} of {path} and the {min(TRIES, rows) - 1} after it cannot be decoded: none takes its "
            f"place (data.on_error=skip)."
        )

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return samples at once, which is for those that draw no random numbers: place by place, and thus quicker."""
        samples: list[Any] = [None] * len(indices)
        numbers = [self._range[index] for index in indices]
        first = end = 0
        here = self._here()
        try:
            for position in sorted(range(len(numbers)), key=numbers.__getitem__):
                number = numbers[position]
                if number >= end:
                    shard, of_shard, _ = span(self._ends, number)
                    part = here.part(shard, number - of_shard, self)
                    first, end = of_shard + part.first, of_shard + part.end
                samples[position] = self.decoder(part.row(number - first))
        except (BadRow, BadShard):
            return [self[index] for index in indices]  # one by one: it is named, or another one takes its place
        return samples

    @property
    def skips(self) -> bool:
        """Whether rows that cannot be decoded are left out."""
        return self.on_error == "skip"

    def _leave_out(self, row: str, error: BadRow) -> None:
        skip(row)
        if row in self._left_out:
            return
        if len(self._left_out) == MOST_SKIPPED:
            raise ValueError(f"More than {MOST_SKIPPED} rows cannot be decoded (data.on_error=skip).")
        self._left_out.add(row)
        log.warning("%s cannot be decoded and is left out: %s", f"R{row[1:]}", error)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None}  # open files are those of a process

    def _here(self) -> "_Process":
        """Return what this process has open."""
        if self._process is None or self._process.pid != os.getpid():
            order, limit = self._order, self.memory
            groups = Groups(limit if order is None else held_bytes(order, self._shuffled(), limit))
            files = OPEN + (0 if order is None else files_of_windows(order))
            self._process = _Process(groups, min(files, getrlimit(RLIMIT_NOFILE)[0] // 4), limit)
        return self._process

    def _shuffled(self) -> list[Shard]:
        return [self.index.shards[number] for number in self._pieces]

    def upcoming(self, shard: int) -> list[int]:
        """Return the shards that are needed next after one, in the order of the epoch."""
        if self._order is None or shard not in self._pieces:
            return []
        turn = self._order.layout(self._epoch).shards.tolist()
        at = turn.index(self._pieces.index(shard))
        return [self._pieces[number] for number in turn[at + 1 : at + 1 + self.ahead]]

    @contextmanager
    def file_of(self, number: int) -> Iterator[Path]:
        """Have the local, uncompressed file of a shard, and see that it is the one that was indexed.

        Raises:
            BadShard: it is not, or cannot be had.
        """
        shard = self.index.shards[number]
        path = joined(self.index.root, shard.name)
        with self.cache.stored(path, shard.sha256, shard.bytes) as stored:
            if not is_remote(path):
                _verify(stored, shard)
            with self.cache.plain(stored, path) as file:
                yield file

    def plan_rows(self, plan: BatchPlan) -> list[tuple[str, str]]:
        """Return what a dry run says of the order: how well it shuffles, and what that costs a process that reads."""
        if not isinstance(order := plan.order, Windowed):
            return []
        found = quality(order, plan.global_batch_size)
        return [
            (
                "shuffle",
                f"displacement {found.displacement:.3f}, correlation of neighbours {found.correlation:.3f}, variance "
                f"of batches {found.batch_variance:.2f} (a full shuffle: 1, 0, 1)",
            ),
            ("reading", str(cost(order, self._shuffled(), plan, self.memory))),
        ]


class _Process:
    """What one process has open, by shard; those used last.

    Args:
        most: files that are open.
        limit: bytes that may be kept of where the rows of files are that were closed: to find that out takes to read
            all of a file.
    """

    def __init__(self, groups: Groups, most: int, limit: int) -> None:
        self.pid, self.groups, self.most, self.limit = os.getpid(), groups, most, limit
        self._open: OrderedDict[int, Reader] = OrderedDict()
        self._closed: OrderedDict[int, Records] = OrderedDict()
        self._kept = 0  # bytes of those
        self._fetching: set[int] = set()

    def part(self, shard: int, row: int, stream: Stream) -> Part:
        """Return what holds a row of a shard."""
        reader = self._open.get(shard)
        if reader is None:
            reader = self._opened(shard, stream)
        else:
            self._open.move_to_end(shard)
        try:
            return reader.part(row)
        except BadShard as error:
            raise _named(error, shard, stream) from error

    def _opened(self, shard: int, stream: Stream) -> Reader:
        entry, columns = stream.index.shards[shard], stream.index.columns
        suffix = format_of(entry.name)
        assert suffix is not None
        self._fetch_ahead(shard, stream)
        try:
            with stream.file_of(shard) as file:
                reader = self._reader(shard, suffix, stream, file)
            path = joined(stream.index.root, entry.name)
            if isinstance(reader, Records):
                reader.typed(columns)
            if not alike(reader.columns, columns):
                raise RuntimeError(other_columns(path, reader.columns, columns, "its index"))
            if len(reader) != entry.rows:
                raise BadShard(f"it has {len(reader):,} rows, and had {entry.rows:,} when it was indexed")
        except (BadShard, OSError) as error:
            raise _named(error, shard, stream) from error
        self._open[shard] = reader
        if len(self._open) > self.most:
            self._close(*self._open.popitem(last=False))
        return reader

    def _reader(self, shard: int, suffix: str, stream: Stream, file: Path) -> Reader:
        if (known := self._closed.get(shard)) is None:
            return opened(file, suffix, self.groups, stream.decoder.columns)
        known.open(file)
        self._kept -= known.offsets.nbytes
        return self._closed.pop(shard)

    def _close(self, shard: int, reader: Reader) -> None:
        reader.close()
        if isinstance(reader, Records):
            self._closed[shard] = reader
            self._kept += reader.offsets.nbytes
            while self._kept > self.limit:
                self._kept -= self._closed.popitem(last=False)[1].offsets.nbytes

    def _fetch_ahead(self, shard: int, stream: Stream) -> None:
        """Have a thread fetch the shards that follow, if they have to be fetched."""
        missing = [each for each in stream.upcoming(shard) if each not in self._fetching and needs_cache(stream, each)]
        if not missing:
            return
        self._fetching.update(missing)

        def fetch() -> None:
            for each in missing:
                try:
                    with stream.file_of(each):
                        pass
                except Exception:  # who needs it meets the error again
                    log.debug("A shard could not be fetched ahead.", exc_info=True)
                finally:
                    self._fetching.discard(each)

        threading.Thread(target=fetch, name="fetch ahead", daemon=True).start()


def needs_cache(stream: Stream, shard: int) -> bool:
    """Whether a shard has to be fetched or decompressed before it is read."""
    name = stream.index.shards[shard].name
    return is_remote(stream.index.root) or bool(compression_of(name))


def _named(error: Exception, shard: int, stream: Stream) -> RuntimeError:
    path = joined(stream.index.root, stream.index.shards[shard].name)
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return RuntimeError(f"The shard {path} cannot be read: {reason}.")


def _verify(file: Path, shard: Shard) -> None:
    """See that a local file is what was indexed; where it has another date, by its checksum, if one is known."""
    try:
        status = file.stat()
    except FileNotFoundError as error:
        raise BadShard("it is missing") from error
    if status.st_size != shard.bytes:
        how = "cut short" if status.st_size < shard.bytes else "changed"
        raise BadShard(f"it is {how}: it has {status.st_size:,} bytes, and had {shard.bytes:,} when it was indexed")
    if status.st_mtime_ns == shard.mtime_ns:
        return
    if shard.sha256 is None:
        raise BadShard("it was written since this run indexed it, without a checksum. Leave a set as it is, or copy it")
    if _checksum(file, status.st_size, status.st_mtime_ns) != shard.sha256:
        raise BadShard("it has changed since it was indexed: its checksum is another one")


@lru_cache(maxsize=1 << 16)
def _checksum(file: Path, size: int, mtime_ns: int) -> str:
    """Return the checksum of a file, which is computed once as long as it has this size and date."""
    return sha256(file)


def _rows_of(split: str, rows: int, val_fraction: float, path: str) -> range:
    at = rows - int(rows * val_fraction)
    parts = {"train": range(at), "val": range(at, rows), "all": range(rows)}
    if split not in parts:
        raise not_one_of("split", split, parts)
    if not parts[split]:
        raise RequestError(
            f"data.path={path} has {rows:,} rows, of which {split} gets none with data.val_fraction={val_fraction}. "
            f"Give another data.val_fraction, data.val_path, or data.val=null."
        )
    return parts[split]


def _refuse_last_classes(decoder: Decoder, more: Mapping[str, Any], path: str) -> None:
    """Refuse to cut the last rows off for validation where they are of the last classes alone."""
    for name in more.get(IN_ORDER_OF, ()):
        if name in decoder.of_targets:
            raise RequestError(
                f"data.path={path} was packed in the order of '{name}': the last data.val_fraction of its rows, for "
                f"validation, has the last values of '{name}' alone, and training the others. Pack it with "
                f"--shuffle SEED, or give data.val_path, or data.val_fraction=0 data.val=null."
            )


def cache_of(given: dict[str, Any], options: dict[str, Any]) -> tuple[Cache, int]:
    """Return the cache, and how many shards are fetched ahead.

    Raises:
        RequestError: it has other keys, or a value is not allowed.
    """
    allowed = {"limit_gb": 64, "ahead": 2, "retries": 4, "timeout_s": 60.0}
    if others := given.keys() - {"folder", *allowed}:
        raise RequestError(f"data.cache.{min(others)} is not known. Allowed: folder, {', '.join(allowed)}.")
    values = {name: given.get(name, value) for name, value in allowed.items()}
    for name, value in values.items():
        require(f"data.cache.{name}", value, Natural if name in ("ahead", "retries") else Annotated[float, Range(0)])
    folder = Path(given.get("folder") or Path.home() / ".cache" / "ddp_recipes" / "streams").expanduser()
    limit = round(min(values["limit_gb"], 1e9) * 1e9)
    cache = Cache(folder, limit, int(values["retries"]), values["timeout_s"], tuple(options.items()))
    return cache, int(values["ahead"])
