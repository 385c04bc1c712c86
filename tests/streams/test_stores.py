"""Shards in stores: fetched once, verified, fetched again after faults, and errors by name."""

import gzip
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.streams import Stream
from ddp_recipes.streams.cache import Cache
from ddp_recipes.streams.commands import index
from ddp_recipes.streams.index import make
from ddp_recipes.streams.reader import BadShard
from helpers.checkpoints import mounted
from helpers.patience import patience
from helpers.processes import until
from helpers.shards import ROWS, write_shards

pytest.importorskip("pyarrow")
pytest.importorskip("aiohttp")

Run = Callable[..., Summary]


class Store(ThreadingHTTPServer):
    """Serves a folder on loopback; the next answers for a file may be faults: ``faults[name] = ["500", "cut", …]``."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Answer, directory=str(folder)))
        self.faults: dict[str, list[str]] = {}
        self.asked: Counter[str] = Counter()
        self.tokens: set[str | None] = set()
        self.over = threading.Event()
        self.go = threading.Event()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(SimpleHTTPRequestHandler):
    """An answer, or a fault."""

    server: Store

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        self.server.asked[name] += 1
        self.server.tokens.add(self.headers["X-Token"])
        planned = self.server.faults.get(name, [])
        fault = planned.pop(0) if len(planned) > 1 or (planned and not planned[0].startswith("always ")) else None
        fault = planned[0].removeprefix("always ") if fault is None and planned else fault
        if fault is None:
            super().do_GET()
        elif fault == "held":
            self.server.go.wait(60)
            super().do_GET()
        elif fault == "hangs":
            self.server.over.wait(60)
        elif fault in ("403", "429", "500"):
            self.send_error(int(fault))
        else:
            content = (Path(self.directory) / name).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            if fault == "stalls":
                self.wfile.flush()
                self.server.over.wait(60)
        self.close_connection = True

    def do_HEAD(self) -> None:
        if "429" in "".join(self.server.faults.get(self.path.rpartition("/")[2], [])):
            self.send_error(429)
        else:
            super().do_HEAD()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def store(shards: Callable[..., Path]) -> Iterator[Store]:
    """A store of indexed shards."""
    folder = shards(".parquet")
    make(str(folder), Cache(folder / ".cache"), 1, lambda done, total: None)
    with Store(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


def stream_of(store: Store | str, folder: Path, path: str = "", **more: Any) -> Stream:
    cache = {"folder": str(folder), "ahead": 0, "retries": 1, "timeout_s": 20.0, **more}
    return Stream((store if isinstance(store, str) else store.address) + path, inputs="a", cache=cache)


def had(held: AbstractContextManager[Path]) -> Path:
    with held as file:
        return file


def file_of(stream: Stream, number: int) -> Path:
    return had(stream.file_of(number))


def test_shards_are_fetched_once_and_are_those_of_the_store(store: Store, tmp_path: Path) -> None:
    for _ in range(2):
        stream = stream_of(store, tmp_path / "cache")
        assert [stream[number] for number in range(61)] == [row["a"] for row in ROWS]
    assert [store.asked[f"part-{number}.parquet"] for number in range(4)] == [1, 1, 1, 1]
    assert not [*tmp_path.glob("cache/*/*.part")]


@pytest.mark.parametrize("has_index", [True, False])
def test_a_compressed_shard_is_fetched_and_decompressed_once(has_index: bool, store: Store, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "set.parquet" / "more", ".jsonl.gz", ROWS, (0, 61))
    if has_index:
        make(str(folder), Cache(folder / ".cache"), 1, lambda done, total: None)
    for _ in range(3):
        assert stream_of(store, tmp_path / "cache", "/more")[5] == 5
    assert store.asked["part-0.jsonl.gz"] == 1
    assert sorted(file.name for file in tmp_path.glob("cache/*/part*")) == ["part-0.jsonl", "part-0.jsonl.gz"]


def test_a_shard_is_read_where_a_store_does_not_say_what_it_has(store: Store, tmp_path: Path) -> None:
    store.faults = {"": ["always 500"], "index.json": ["always 403"]}
    stream = stream_of(store, tmp_path / "cache", "/part-2.parquet")
    assert [stream[number] for number in range(19)] == [row["a"] for row in ROWS[21:40]]
    assert [shard.bytes for shard in stream.index.shards] == [(tmp_path / "set.parquet/part-2.parquet").stat().st_size]
    assert store.asked[""] == 0
    for several in ("/part-{1..2}.parquet", "/part-{1,2}.parquet", "/{part-1,part-2}.parquet"):
        stream = stream_of(store, tmp_path / "cache", several)
        assert [stream[number] for number in range(20)] == [row["a"] for row in ROWS[20:40]]
    signed = stream_of(store, tmp_path / "cache", f"/part-2.parquet?Signature=a/b.c%2F{300 * 'd'}&Expires=1.5")
    assert [signed[number] for number in range(19)] == [row["a"] for row in ROWS[21:40]]
    assert store.asked[""] == 0
    with pytest.raises(RequestError, match=r"part-7.parquet cannot be had: it is missing: the store has no http"):
        stream_of(store, tmp_path / "cache", "/part-7.parquet")
    with pytest.raises(RequestError, match=r"cannot be had: it is missing: the store has no http.*part-4.parquet"):
        stream_of(store, tmp_path / "cache", "/part-{0..4}.parquet")


def test_a_store_that_is_busy_when_it_is_asked_for_a_size_is_asked_again(store: Store, tmp_path: Path) -> None:
    """For fsspec such a file is missing."""
    write_shards(tmp_path / "set.parquet" / "more", ".jsonl", ROWS, (0, 61))
    store.faults = {"part-0.jsonl": ["429"]}
    assert len(stream_of(store, tmp_path / "cache", "/more")) == 61
    store.faults = {"part-0.jsonl": ["always 429"]}
    for path in ("/more", "/more/part-0.jsonl"):
        with pytest.raises(RequestError, match=r"ClientResponseError: 429, .* \(2 tries, data.cache.retries=1\)"):
            stream_of(store, tmp_path / "other", path)


def test_a_set_without_an_index_is_the_one_that_the_store_has_now(store: Store, tmp_path: Path) -> None:
    for rows in (ROWS, ROWS[7:]):
        write_shards(tmp_path / "set.parquet" / "more", ".jsonl", rows, (0, len(rows)))
        stream = stream_of(store, tmp_path / "cache", "/more")
        assert [stream[number] for number in range(len(stream))] == [row["a"] for row in rows]
        rmtree(tmp_path / "set.parquet" / "more")


def test_a_shard_is_the_same_however_a_store_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 says more of a file that was listed, as a rank does, than of one that a data worker asks for."""
    told: dict[str, Any] = {}
    store = SimpleNamespace(info=lambda path: told, get_file=lambda path, to: Path(to).write_text("content"))
    monkeypatch.setattr(Cache, "_store", lambda self, path: (store, path))
    files = []
    for more in ({"StorageClass": "STANDARD", "LastModified": 1.25}, {"LastModified": 1, "ContentType": "text"}):
        told = {"ETag": "1", "size": 7, **more}
        files.append(had(Cache(tmp_path).stored("s3://bucket/0.txt", None)))
    told = {"ETag": "2", "size": 7}
    assert files[0] == files[1] != had(Cache(tmp_path).stored("s3://bucket/0.txt", None))


def test_processes_that_need_a_shard_fetch_it_once(store: Store, tmp_path: Path) -> None:
    stream = stream_of(store, tmp_path / "cache")
    with ThreadPoolExecutor(4) as pool:
        files = [*pool.map(partial(file_of, stream), [2] * 8)]
    assert len({*files}) == 1
    assert store.asked["part-2.parquet"] == 1
    context = get_context("fork")
    workers = [context.Process(target=file_of, args=(stream, 3)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert store.asked["part-3.parquet"] == 1


def test_data_workers_forked_while_a_shard_is_fetched_keep_nobody_from_it(store: Store, tmp_path: Path) -> None:
    store.faults = {f"part-{number}.parquet": ["held"] for number in range(4)}
    stream = stream_of(store, tmp_path / "cache", ahead=0)
    fetching = threading.Thread(target=file_of, args=(stream, 1))
    fetching.start()
    until(lambda: store.asked["part-1.parquet"] == 1, 60, "nobody asks for the shard")
    context = get_context("fork")
    worker = context.Process(target=file_of, args=(stream, 1), daemon=True)
    idle = context.Process(target=store.over.wait, args=(60,), daemon=True)  # has what its parent had open
    worker.start()
    idle.start()
    store.go.set()
    worker.join(patience(20))
    idle.kill()
    fetching.join()
    assert worker.exitcode == 0
    assert store.asked["part-1.parquet"] == 1


@pytest.mark.slow
def test_faults_that_pass_are_survived(store: Store, tmp_path: Path) -> None:
    store.faults = {"index.json": ["500"], "part-0.parquet": ["500"], "part-1.parquet": ["cut"]}
    store.faults |= {"part-2.parquet": ["stalls"], "part-3.parquet": ["hangs"]}
    stream = stream_of(store, tmp_path / "cache", timeout_s=0.5)
    assert [stream[number] for number in range(61)] == [row["a"] for row in ROWS]
    assert {store.asked[f"part-{number}.parquet"] for number in range(4)} == {2}


@pytest.mark.parametrize(
    ("fault", "message"),
    {
        "500": "ClientResponseError: 500.*2 tries, data.cache.retries=1",
        "cut": "part-2.parquet cannot be read: ",
        "hangs": r"TimeoutError: the store brought nothing for data.cache.timeout_s=0.5 seconds \(2 tries",
    }.items(),
    ids=["500", "cut", "hangs"],
)
def test_faults_that_stay_name_the_shard(fault: str, message: str, store: Store, tmp_path: Path) -> None:
    store.faults["part-2.parquet"] = [f"always {fault}"]
    stream = stream_of(store, tmp_path / "cache", timeout_s=0.5)
    assert stream[0] == 0
    with pytest.raises(RuntimeError, match=message) as raised:
        stream[30]
    assert "part-2.parquet" in str(raised.value)
    assert store.asked["part-2.parquet"] == 2
    assert not [*tmp_path.glob("cache/*/*.part")]


def test_a_shard_that_is_missing_or_another_one_is_named(
    store: Store, shards: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "set.parquet"
    stream = stream_of(store, tmp_path / "cache", retries=0)
    content = (folder / "part-2.parquet").read_bytes()
    (folder / "part-2.parquet").write_bytes(content[:-1] + b"x")
    with pytest.raises(RuntimeError, match=r"part-2.parquet cannot be read: it has changed since it was indexed"):
        stream[30]
    (folder / "part-2.parquet").write_bytes(content[:-9])
    with pytest.raises(RuntimeError, match=r"part-2.parquet cannot be read: it is cut short: it came with"):
        stream[30]
    (folder / "part-2.parquet").unlink()
    with pytest.raises(RuntimeError, match=r"part-2.parquet cannot be read: it is missing"):
        stream[30]
    (folder / "part-2.parquet").write_bytes(content)
    assert stream[30] == 30


def test_what_dead_processes_left_is_removed_and_the_cache_keeps_its_limit(store: Store, tmp_path: Path) -> None:
    stream = stream_of(store, tmp_path / "cache")
    kept = file_of(stream, 0)
    left = kept.with_name("part-0.parquet.99999.part")
    left.write_bytes(b"half")
    stream_of(store, tmp_path / "cache")
    assert (left.exists(), kept.exists()) == (False, True)
    small = stream_of(store, tmp_path / "cache", limit_gb=kept.stat().st_size * 2.2 / 1e9)
    assert [small[number] for number in range(61)] == [row["a"] for row in ROWS]
    there = sorted(file.name for file in (tmp_path / "cache").glob("*/*.parquet"))
    assert there == ["part-2.parquet", "part-3.parquet"], "those used longest ago are removed"
    assert len([*(tmp_path / "cache").iterdir()]) == 2, "with their folders"


def test_nothing_is_left_of_a_shard_that_cannot_be_had(store: Store, tmp_path: Path) -> None:
    store.faults = {"part-2.parquet": ["always 403"]}
    stream = stream_of(store, tmp_path / "cache", retries=0)
    with pytest.raises(RuntimeError, match=r"part-2\.parquet cannot be read"):
        stream[30]
    assert [*(tmp_path / "cache").iterdir()] == []


def test_what_else_is_in_the_folder_of_the_cache_stays(store: Store, tmp_path: Path) -> None:
    mine = [tmp_path / "mine" / name for name in ("thesis.tex", "half.part", "lock")]
    for file in mine:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"x" * 9999)
    small = stream_of(store, tmp_path, limit_gb=1e-9)
    assert [small[number] for number in (0, 20, 30)] == [0, 20, 30]
    assert all(file.exists() for file in mine)


def use_often(cache: Cache, which: list[Path]) -> bool:
    for number in range(400):
        path = which[number % len(which)]
        with cache.plain(path, str(path)) as file:
            if file.read_text() != path.name:
                return False
    return True


@pytest.mark.slow
def test_processes_remove_each_others_shards_and_none_fails(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.txt.gz" for number in range(3)]
    for path in paths:
        path.write_bytes(gzip.compress(path.name.encode()))
    cache = Cache(tmp_path / "cache", limit=1)
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        assert [*pool.map(partial(use_often, cache), [paths, paths[::-1]] * 2)] == [True] * 4
    assert len([*(tmp_path / "cache").iterdir()]) <= 4, "one for each process that opened one"


def wrong_rows(make: Callable[[], Stream], rows: list[int]) -> list[int]:
    return [row for _ in range(4) for stream in [make()] for row in rows if stream[row] != row]


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["", ".gz"])
def test_a_cache_smaller_than_a_shard_serves_processes_that_remove_each_others(
    compression: str, store: Store, tmp_path: Path
) -> None:
    path = ""
    if compression:
        write_shards(tmp_path / "set.parquet" / "more", ".jsonl.gz", ROWS, (0, 20, 40, 61))
        path = "/more/part-{0..2}.jsonl.gz"
    make = partial(stream_of, store.address, tmp_path / "cache", path, limit_gb=1e-9)
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        found = pool.map(partial(wrong_rows, make), [[0, 21, 41, 60], [60, 22, 1, 42]] * 2)
        assert [*found] == [[]] * 4


def test_shards_are_fetched_ahead_in_the_order_of_the_epoch(store: Store, tmp_path: Path) -> None:
    stream = stream_of(store, tmp_path / "cache", ahead=2)
    order = stream.sample_order(3, True)
    assert order is not None
    stream.set_epoch(1)
    turn = order.shards(1).tolist()  # type: ignore[attr-defined]
    first = sum(stream.index.rows[: turn[0]])
    assert stream[first] == first
    deadline = time.monotonic() + 60
    while len([*tmp_path.glob("cache/*/*.parquet")]) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    there = {int(file.stem[-1]) for file in tmp_path.glob("cache/*/*.parquet")}
    assert there == {*turn[:3]}


@pytest.mark.slow
def test_a_run_on_a_store_has_the_weights_of_one_on_disk(run: Run, store: Store, tmp_path: Path) -> None:
    own = ("strategy=ddp_exact", "data.global_batch_size=12")
    expected = run(tmp_path / "set.parquet", *own)["weights_sha256"]
    assert run(store.address, *own, world_size=2)["weights_sha256"] == expected
    assert {store.asked[f"part-{number}.parquet"] for number in range(4)} == {1}, "once for both ranks"


@pytest.mark.slow
def test_options_of_a_store_are_those_of_the_run(run: Run, store: Store, tmp_path: Path) -> None:
    given = "data.options={client_kwargs: {headers: {X-Token: mine}}}"
    run(store.address, given, "trainer.max_steps=1", directory=tmp_path / "given")
    assert store.tokens == {"mine"}


def test_a_cache_in_a_link_to_nowhere_is_named(shards: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "scratch").symlink_to("unmounted")
    (tmp_path / "file").touch()
    folder = str(shards(".jsonl.gz"))
    for cache, reason in {"scratch/cache": "there is a file or a link to nowhere", "file": "Not a directory"}.items():
        with pytest.raises(RequestError, match=f"cannot be kept in data.cache.folder={tmp_path / cache}: {reason}"):
            Stream(folder, cache={"folder": str(tmp_path / cache)})


def test_a_full_cache_disk_is_said(store: Store, tmp_path: Path) -> None:
    """A folder of so small a file system that a shard does not fit, where one may be mounted."""
    with mounted(tmp_path / "small", "4k") as folder:
        (tmp_path / "set.parquet" / "large.txt").write_bytes(bytes(99_999))
        with pytest.raises(BadShard, match=r"there is no space left for it in data.cache.folder=.*small. Give"):
            had(Cache(folder, retries=0).stored(f"{store.address}/large.txt", None))
        assert not [*folder.glob("*/*.part")]


@pytest.mark.nightly
def test_a_set_in_s3_is_that_on_disk(
    tmp_path: Path, shards: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = {"endpoint_url": f"http://{host}:{port}", "key": "of_nobody", "secret": "of_nobody"}
        store = pytest.importorskip("fsspec").filesystem("s3", **options)
        store.mkdir("bucket")
        store.put(str(shards(".parquet")), "bucket/set", recursive=True)
        given = [f"{key}={value}" for key, value in options.items()]
        index(["s3://bucket/set", *given, "--workers=1", f"--cache={tmp_path / 'cache'}"])
        stream = Stream("s3://bucket/set", inputs="a", cache={"folder": str(tmp_path / "cache")}, options=options)
        assert [stream[number] for number in range(61)] == [row["a"] for row in ROWS]
        assert all(shard.sha256 for shard in stream.index.shards)
        store.rm("bucket/set/part-2.parquet")
        elsewhere = {"folder": str(tmp_path / "other"), "retries": 0}
        gone = Stream("s3://bucket/set", inputs="a", cache=elsewhere, options=options)
        assert gone[0] == 0
        with pytest.raises(RuntimeError, match=r"set/part-2.parquet cannot be read: it is missing"):
            gone[30]
    finally:
        server.stop()
