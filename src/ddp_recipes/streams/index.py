"""The index of a set in shards: which shards there are, how many rows each has, and what they have to be."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from heapq import heappop, heappush
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from ddp_recipes.data.one_by_one import follow_rank
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.files import write_aside
from ddp_recipes.streams.cache import Cache, sha256, without_query
from ddp_recipes.streams.columns import Groups
from ddp_recipes.streams.formats import RECORDS, SUFFIXES, compression_of, format_of, opened
from ddp_recipes.streams.reader import BadShard
from ddp_recipes.streams.records import Records, Tar, Text

NAME = "index.json"
FORMAT = 1
IN_ORDER_OF = "in_order_of"  # of `Index.more`: columns by which the rows are sorted
SMALL = 256 << 20  # bytes of a set that is indexed without being asked to
Columns = Mapping[str, str]
T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """A shard as it was when it was indexed.

    Attributes:
        name: relative to the set's folder.
        bytes: of the file as it is stored.
        groups: of rows that are read together, of a parquet file; else 0.
        memory: bytes that all of them take.
        mtime_ns: of a local file; while it is the same nobody computes the checksum again.
        sha256: of the file as it is stored; None: it was indexed on the fly.
    """

    name: str
    rows: int
    bytes: int
    groups: int = 0
    memory: int = 0
    mtime_ns: int | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Index:
    """A set in shards.

    Attributes:
        root: folder or address that names of shards are relative to.
        columns: names and types of the columns, where the format has them.
        more: what whoever made the set says of it, such as ``classes``.
    """

    root: str
    shards: tuple[Shard, ...]
    columns: Columns = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each shard."""
        return tuple(shard.rows for shard in self.shards)

    def as_json(self) -> str:
        """Return the index as it is written: a line a shard."""
        shards = ",\n".join(f"    {json.dumps(asdict(shard))}" for shard in self.shards)
        head = {"ddp_recipes_stream": FORMAT, "columns": dict(self.columns), "more": dict(self.more)}
        return f'{json.dumps(head)[:-1]}, "shards": [\n{shards}\n]}}\n'

    @classmethod
    def parsed(cls, root: str, text: str) -> "Index":
        """Return the index in a text.

        Raises:
            RequestError: it is none.
        """
        try:
            found = json.loads(text)
            if found["ddp_recipes_stream"] != FORMAT:
                raise ValueError(f"it is of format {found['ddp_recipes_stream']}, known is {FORMAT}")
            shards = tuple(Shard(**shard) for shard in found["shards"])
            return cls(root, shards, found["columns"], found["more"])
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(
                f"{joined(root, NAME)} is no index of a stream: {error}. Make it anew: ddp-recipes index {root}"
            ) from error


def is_remote(path: str) -> bool:
    """Whether a path is an address of a store, not of a local file."""
    return "://" in path and not path.startswith(("file://", "local://"))


def local_path(path: str) -> str:
    """Return a path without what says that it is a local one."""
    return path if is_remote(path) else path.removeprefix("file://").removeprefix("local://")


def joined(root: str, name: str) -> str:
    """Return the path of a shard."""
    return f"{root.rstrip('/')}/{name}" if is_remote(root) else str(Path(root) / name)


def load(path: str, cache: Cache) -> Index:
    """Return the index of the shards at a path: a folder, a shard, or a pattern of them, local or in a store.

    Where there is none it is made, if the set is small.

    Raises:
        RequestError: there is nothing, or what there is does not fit the index.
    """
    if not path.strip():
        raise RequestError("data.path is empty. Give a folder of shards, a shard, or a pattern of them.")
    if "://" in path.partition("::")[0] and "::" in path:
        raise RequestError(f"data.path={path} lies within an archive. Unpack that, and give the folder of the shards.")
    path = path if is_remote(path) else str(Path(local_path(path)).expanduser())
    root, chosen = located(path)
    index = indexed(root, cache) if path == without_query(path) else None  # a signature is for the one file
    if index is None:
        return made_on_the_fly(root, listed(root, cache, chosen), path, cache)
    shards = tuple(shard for shard in index.shards if shard.name in chosen)
    missing = chosen.names - {shard.name for shard in shards}
    if missing or not shards:
        which = f"shard {min(missing)}" if missing else "such shard"
        raise RequestError(f"data.path={path}: {joined(root, NAME)} has no {which}.")
    index = Index(root, shards, index.columns, index.more)
    if not is_remote(root):
        refuse_other_shards(index, listed(root, cache, chosen), root)
    return index


@dataclass(frozen=True)
class Chosen:
    """Which shards of a folder are meant: those of these names and patterns; without any, all.

    A pattern is as in a shell: a ``*`` is within a folder, a ``**`` stands for any folders.
    """

    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()

    def __contains__(self, name: str) -> bool:
        fits = name in self.names or any(_match(name.split("/"), pattern.split("/")) for pattern in self.patterns)
        return fits or not (self.names or self.patterns)


ALL = Chosen()


def located(path: str) -> tuple[str, Chosen]:
    """Return the folder of a set, and which of its shards are meant."""
    if not is_remote(path) and Path(path).is_dir():
        return path, ALL
    if not is_remote(path) and Path(path).is_file():
        return str(Path(path).parent), Chosen(frozenset({Path(path).name}))
    bare = without_query(path)
    query = path.removeprefix(bare)
    paths = [each.split("/") for each in expanded(bare)]
    alike = sum(1 for _ in takewhile(lambda parts: len({*parts}) == 1, zip(*paths, strict=False)))
    first = min(alike, *(len(parts) - 1 for parts in paths))
    while any(map(is_pattern, paths[0][:first])) and (is_remote(bare) or not Path("/".join(paths[0][:first])).is_dir()):
        first -= 1  # a folder may have letters of patterns in its name
    if len(paths) == 1 and format_of(paths[0][-1]) is None and first == len(paths[0]) - 1 and not is_pattern(bare):
        return path, ALL
    names = ["/".join(parts[first:]) for parts in paths]
    patterns = tuple(filter(is_pattern, names))
    named = frozenset(f"{name}{query}" for name in names if not is_pattern(name))
    return "/".join(paths[0][:first]) or ("/" if first else "."), Chosen(named, patterns)


def is_pattern(name: str) -> bool:
    """Whether a name stands for several."""
    return any(letter in name for letter in "*?[")


def expanded(name: str) -> list[str]:
    """Return the names that braces stand for, as a shell has it: ``{a,b}``, or ``{000..127}`` with zeros as given."""
    for found in re.finditer(r"\{([^{}]*)\}", name):
        before, inside, after = name[: found.start()], found[1], name[found.end() :]
        one, dots, other = inside.partition("..")
        if dots and one.isdecimal() and other.isdecimal():
            first, last = int(one), int(other)
            step = 1 if first <= last else -1
            each = [str(number).zfill(len(one)) for number in range(first, last + step, step)]
        elif "," in inside:
            each = inside.split(",")
        else:
            continue
        return [name for middle in each for name in expanded(f"{before}{middle}{after}")]
    return [name]


def _match(names: Sequence[str], parts: Sequence[str]) -> bool:
    if not parts:
        return not names
    if parts[0] == "**":
        return any(_match(names[first:], parts[1:]) for first in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], parts[0]) and _match(names[1:], parts[1:])


def indexed(root: str, cache: Cache) -> Index | None:
    """Return the index that lies in a folder, if there is one."""
    if is_remote(root):
        content = cache.small_file(joined(root, NAME))
        return None if content is None else Index.parsed(root, content.decode())
    file = Path(root) / NAME
    return Index.parsed(root, file.read_text()) if file.is_file() else None


def listed(root: str, cache: Cache, chosen: Chosen = ALL) -> dict[str, int]:
    """Return the shards in a folder, those that are meant, and their sizes in bytes, by name.

    Shards that are named are not looked for: some stores cannot say what is in a folder, and there may be much in it.

    Raises:
        RequestError: there is no such folder, or no such shard.
    """
    named = [] if chosen.patterns else sorted(chosen.names)
    if is_remote(root):
        sizes = cache.listing(root, named)
    elif not Path(root).is_dir():
        raise RequestError(f"data.path={root}: there is no folder {Path(root).absolute()}. Give that of the shards.")
    else:
        try:
            sizes = dict(files_in(root)) if not named else {}
        except OSError as error:
            raise RequestError(f"data.path={root} cannot be read: {error.filename}: {error.strerror}.") from error
        for name in named:
            if not (file := Path(root, name)).is_file():
                raise RequestError(
                    f"data.path={file}: there is no file {file.absolute()}. Give a shard, or their folder."
                )
            sizes[name] = file.stat().st_size
    # Names with a dot, and what a job of Spark has not finished, or has left.
    hidden = {name for name in sizes if any(part[0] == "." or part == "_temporary" for part in name.split("/") if part)}
    return {name: sizes[name] for name in sorted({*sizes} - hidden) if format_of(name) and name in chosen}


def files_in(root: str) -> Iterator[tuple[str, int]]:
    """Yield the names of the files in a folder and those below it, and their sizes.

    Links to folders are followed last, where nothing else has led there: one may be the ``latest`` of those beside it.
    A link to nowhere is an error where a shard should be.
    """
    folders, links, seen = [""], list[str](), set[tuple[int, int]]()
    while folders or links:
        within = folders.pop() if folders else heappop(links)
        status = os.stat(os.path.join(root, within))
        if (here := (status.st_dev, status.st_ino)) in seen:
            continue
        seen.add(here)
        with os.scandir(os.path.join(root, within)) as entries:
            for entry in entries:
                name, is_link = f"{within}{entry.name}", entry.is_symlink()
                if entry.is_dir():
                    heappush(links, f"{name}/") if is_link else folders.append(f"{name}/")
                elif entry.is_file() or (is_link and format_of(entry.name) and entry.name[0] != "."):
                    yield name, entry.stat().st_size


def refuse_other_shards(index: Index, sizes: Mapping[str, int], root: str) -> None:
    """Refuse a folder whose shards are not those of its index.

    Raises:
        RequestError: names the first one that is missing, of another size, or new.
    """
    again = f"If that is as it should be, index it again: ddp-recipes index {root}"
    for shard in index.shards:
        if shard.name not in sizes:
            raise RequestError(f"data.path={root}: the shard {shard.name} is missing. Put it back. {again}")
        if (size := sizes[shard.name]) != shard.bytes:
            how = "cut short" if size < shard.bytes else "changed"
            raise RequestError(
                f"data.path={root}: the shard {shard.name} is {how}: it has {size:,} bytes, and had {shard.bytes:,} "
                f"when it was indexed. {again}"
            )
    known = {shard.name for shard in index.shards}
    if new := [name for name in sizes if name not in known]:
        raise RequestError(f"data.path={root}: the shard {new[0]} is not in {NAME}. {again}")


def made_on_the_fly(root: str, sizes: Mapping[str, int], path: str, cache: Cache) -> Index:
    """Return the index of a small set, which is not written.

    Raises:
        RequestError: it is not small, or there is no shard.
    """
    if not sizes:
        raise RequestError(f"data.path={path} has no shard. Allowed are files {', '.join(SUFFIXES)}, also .gz, .zst.")
    footers = all(format_of(name) == ".parquet" and not is_remote(root) for name in sizes)
    if (total := sum(sizes.values())) > SMALL and not footers:
        raise RequestError(
            f"data.path={path} has {total:,} bytes in {len(sizes):,} shards and no index, which takes to read all of "
            f"it. Make one once: ddp-recipes index {root}"
        )
    return assembled(root, (described(root, name, cache, checksum=False) for name in sizes), {})


def make(root: str, cache: Cache, workers: int, show: Callable[[int, int], None]) -> Index:
    """Read all shards of a folder, in parallel, and write its index.

    Args:
        show: is called with how many are done, and of how many.

    Raises:
        RequestError: a shard cannot be read, has other columns, or the index cannot be written.
    """
    if not (sizes := listed(root, cache)):
        raise RequestError(f"{root} has no shard. Allowed are files {', '.join(SUFFIXES)}, also .gz and .zst.")
    found: dict[str, tuple[Shard, Columns]] = {}
    for number, (at, part) in enumerate(in_parallel(described, [(root, name, cache) for name in sizes], workers), 1):
        found[[*sizes][at]] = part
        show(number, len(sizes))
    more: Mapping[str, Any] = {}
    with suppress(RequestError):  # an index that is none is written anew
        more = old.more if (old := indexed(root, cache)) is not None else {}
    index = assembled(root, (found[name] for name in sizes), more)
    write(index, cache)
    return index


def in_parallel(work: Callable[..., T], arguments: Sequence[tuple[Any, ...]], workers: int) -> Iterator[tuple[int, T]]:
    """Yield what a function returns for each of some arguments, and for which, as it comes; of one process in order."""
    if workers < 2 or len(arguments) < 2:
        yield from ((number, work(*given)) for number, given in enumerate(arguments))
        return
    from concurrent.futures import ProcessPoolExecutor, as_completed  # which takes longer than all else of a start
    from multiprocessing import active_children, get_context

    others, count = {*active_children()}, min(workers, len(arguments))
    with ProcessPoolExecutor(count, get_context("spawn"), follow_rank, (0,)) as pool:  # here the command for the rank
        jobs = {pool.submit(work, *given): number for number, given in enumerate(arguments)}
        try:
            for job in as_completed(jobs):
                yield jobs[job], job.result()
        except BaseException:  # nobody waits for what is still to be done
            for worker in {*active_children()} - others:
                worker.kill()
            raise


def write(index: Index, cache: Cache) -> None:
    """Write an index beside its shards.

    Raises:
        RequestError: it cannot be written there.
    """
    if is_remote(index.root):
        cache.put(joined(index.root, NAME), index.as_json().encode())
        return
    try:
        write_aside(Path(index.root) / NAME, lambda file: file.write(index.as_json().encode()))
    except OSError as error:
        raise RequestError(f"{Path(index.root) / NAME} cannot be written: {error.strerror}.") from error


def described(root: str, name: str, cache: Cache, checksum: bool = True) -> tuple[Shard, Columns]:
    """Read a shard; return what an index says of it.

    Raises:
        RequestError: it cannot be read.
    """
    suffix, path = format_of(name), joined(root, name)
    assert suffix is not None
    try:
        with cache.stored(path, None) as stored, cache.plain(stored, path) as file:
            status = os.stat(stored)
            with closing(opened(file, suffix, Groups(0))) as reader:
                groups, memory = getattr(reader, "in_memory", (0, 0))
                shard = Shard(
                    name,
                    len(reader),
                    status.st_size,
                    groups,
                    memory,
                    None if is_remote(root) else status.st_mtime_ns,
                    sha256(stored) if checksum else None,
                )
                return shard, reader.found_types() if isinstance(reader, Records) else dict(reader.columns)
    except (BadShard, OSError) as error:
        raise RequestError(f"The shard {path} cannot be read: {error}") from error


def assembled(root: str, parts: Iterator[tuple[Shard, Columns]], more: Mapping[str, Any]) -> Index:
    """Return the index of shards whose columns are the same.

    Raises:
        RequestError: one has others, or there is no row.
    """
    shards: list[Shard] = []
    columns: Columns = {}
    for shard, own in parts:
        if shards:
            kinds = {RECORDS.get(format_of(each.name) or "", Records) for each in (shards[0], shard)}
            together = (kinds.pop() if len(kinds) == 1 else Records).together(columns, own)
            if kinds == {Tar, Text}:  # neither of which has columns
                together = None
            if together is None:
                raise RequestError(other_columns(joined(root, shard.name), own, columns, joined(root, shards[0].name)))
            own = together
        shards.append(shard)
        columns = own
    names = {shard.name for shard in shards}
    if twice := [name for name in names if compression_of(name) and os.path.splitext(name)[0] in names]:
        raise RequestError(
            f"{joined(root, twice[0])} is there decompressed, too: its rows would come twice. Remove one of both."
        )
    if not any(shard.rows for shard in shards):
        raise RequestError(f"data.path={root} has no row in {len(shards):,} shard(s).")
    return Index(root, tuple(shards), columns, more)


def of_kinds(index: Index, path: str, cache: Cache) -> Index:
    """Return an index whose numbers are of the kinds that they have in another set of its format: 1 is 1.0 with 1.5.

    That set is looked at only where kinds follow from the rows of a shard, as in jsonl and csv.

    Raises:
        RequestError: that set cannot be read.
    """
    formats = {RECORDS.get(format_of(shard.name) or "", Records) for shard in index.shards}
    if all(each.together is Records.together for each in formats):
        return index
    other = load(path, cache)
    formats |= {RECORDS.get(format_of(shard.name) or "", Records) for shard in other.shards}
    both = formats.pop().together(index.columns, other.columns) if len(formats) == 1 else None
    return index if both is None else replace(index, columns={name: both[name] for name in index.columns})


def other_columns(path: str, own: Columns, columns: Columns, other: str) -> str:
    """Return the message on a shard with another schema than the rest of its set."""
    differing = [name for name in {**own, **columns} if own.get(name) != columns.get(name)]
    described = ", ".join(
        f"{name} ({own.get(name, 'missing')}, not {columns.get(name, 'there')})" for name in differing
    )
    more = "another order of columns" if own else "another format"
    return f"The shard {path} has another schema than {other}: {described or more}."
