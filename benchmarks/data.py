"""Data from storage to batches: this package's streams beside what one would pick instead, in one run.

``python -m benchmarks.data`` makes images and texts, has each library write them in its own format, and starts the
readers of ``benchmarks.readers`` in turns, on one rank and on two: samples a second, seconds to the first batch, also
of a set in a thousand shards, and memory. Peers that are not installed are left out, and named.
"""

import argparse
import json
import os
import platform
import random
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.readers import READERS
from benchmarks.samples import ROOT

CLASSES = 10
SHARD_MB = 16
MANY = 1000  # shards of a set that is begun
RESUMED = 10**9  # rows of a set that is gone on with in its middle
PACKAGES = ("torch", "torchvision", "pillow", "pyarrow", "webdataset", "datasets", "mosaicml-streaming", "litdata")
Found = dict[str, list[dict[str, float]]]  # of each reader what its rounds gave


# --- what is read ----------------------------------------------------------------------------------------------------


def image(number: int) -> Image.Image:
    """Return a smooth picture with some noise, 320 x 256: some 20 kB as JPEG."""
    draw = np.random.default_rng(number)
    small = Image.fromarray(draw.integers(0, 256, (10, 12, 3), dtype=np.uint8))
    large = np.asarray(small.resize((320, 256), Image.Resampling.BICUBIC), dtype=np.int16)
    noise = draw.integers(-12, 13, large.shape, dtype=np.int16)
    return Image.fromarray(np.clip(large + noise, 0, 255).astype(np.uint8))


def write_images(folder: Path, numbers: range) -> None:
    """Write images, a folder a class."""
    for number in numbers:
        path = folder / f"class_{number % CLASSES}" / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image(number).save(path, quality=85)


def write_texts(folder: Path, count: int) -> None:
    """Write texts of 20 to 400 words as lines of JSON."""
    folder.mkdir(parents=True)
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(1, 10))) for _ in range(5000)]
    with (folder / "texts.jsonl").open("w") as file:
        for _ in range(count):
            file.write(json.dumps({"text": " ".join(draw.choices(words, k=draw.randint(20, 400)))}) + "\n")


def rows_of(kind: str, source: Path) -> Iterator[dict[str, Any]]:
    """Yield what was made."""
    if kind == "images":
        for path in sorted(source.rglob("*.jpg")):
            yield {"image": path.read_bytes(), "label": int(path.parent.name.removeprefix("class_"))}
    else:
        for line in (source / "texts.jsonl").read_text().splitlines():
            yield json.loads(line)


def pack(source: Path, dest: Path, shard_mb: float) -> None:
    """Write shards by ``ddp-recipes pack``."""
    command = [sys.executable, "-m", "ddp_recipes", "pack", str(source), str(dest), "--shard-mb", f"{shard_mb:g}"]
    subprocess.run([*command, "--shuffle", "0"], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


def write_tar(kind: str, source: Path, dest: Path, ours: Path, shards: int) -> None:
    """Write tar files as webdataset has them; of images they are those of ``ddp-recipes pack``."""
    import io
    import tarfile

    if kind == "images":
        dest.symlink_to(ours)
        return
    dest.mkdir()
    rows = list(rows_of(kind, source))
    for shard in range(shards):
        with tarfile.open(dest / f"part-{shard:05}.tar", "w") as tar:
            for number in range(len(rows) * shard // shards, len(rows) * (shard + 1) // shards):
                content = rows[number]["text"].encode()
                member = tarfile.TarInfo(f"{number:09}.txt")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def write_mds(kind: str, source: Path, dest: Path, shard_bytes: int) -> None:
    """Write what MosaicML's streaming reads."""
    from streaming import MDSWriter

    columns = {"image": "bytes", "label": "int"} if kind == "images" else {"text": "str"}
    with MDSWriter(out=str(dest), columns=columns, size_limit=shard_bytes) as out:
        for row in rows_of(kind, source):
            out.write(row)


def write_litdata(kind: str, source: Path, dest: Path, shard_bytes: int) -> None:
    """Write what LitData reads."""
    from litdata.streaming.writer import BinaryWriter

    dest.mkdir()
    writer = BinaryWriter(str(dest), chunk_bytes=shard_bytes)
    for number, row in enumerate(rows_of(kind, source)):
        writer[number] = row if kind == "images" else row["text"]
    writer.done()
    writer.merge()


def prepare(folder: Path, kind: str, shards: int | None = None) -> None:
    """Write what was made in each format whose library is there, in so many shards or in some of 16 MB."""
    source, ours = folder / f"{kind}_source", folder / f"{kind}_ours"
    if (folder / f"{kind}_done").exists():
        return
    for what in ("ours", "tar", "mds", "litdata"):
        shutil.rmtree(folder / f"{kind}_{what}", ignore_errors=True)
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    shard_mb = SHARD_MB if shards is None else size / shards / 1e6
    pack(source if kind == "images" else source / "texts.jsonl", ours, shard_mb)
    number = len([*ours.glob("*.parquet"), *ours.glob("*.tar")])
    write_tar(kind, source, folder / f"{kind}_tar", ours, number)
    if find_spec("streaming"):
        write_mds(kind, source, folder / f"{kind}_mds", round(shard_mb * 1e6))
    if find_spec("litdata"):
        write_litdata(kind, source, folder / f"{kind}_litdata", round(shard_mb * 1e6))
    print(f"{kind}: {size / 1e6:,.0f} MB in {number:,} shards of ours", flush=True)
    (folder / f"{kind}_done").touch()


# --- measuring -------------------------------------------------------------------------------------------------------


def read(name: str, kind: str, folder: Path, ranks: int, samples: int) -> dict[str, float]:
    """Have a reader read, on so many ranks; samples a second are of all of them.

    Raises:
        RuntimeError: it fails; the message ends with what it printed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.readers", name, kind, str(folder)]
    command += ["--samples", str(samples // ranks)]
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common = {**os.environ, **world, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    printed = [process.communicate(timeout=600) for process in processes]
    if failed := [err for process, (_, err) in zip(processes, printed, strict=True) if process.returncode]:
        raise RuntimeError(f"{name}, {kind}, {ranks} rank(s): {failed[0][-2000:]}")
    every = [json.loads(out.strip().splitlines()[-1]) for out, _ in printed]
    return {
        "first_s": max(each["first_s"] for each in every),
        "per_second": sum(each["per_second"] for each in every),
        "memory": max(each["memory"] for each in every),
    }


def in_turns(names: Sequence[str], rounds: int, measure: Callable[[str], dict[str, float]]) -> Found:
    """Measure each in turn, so often; who fails is left out, and said."""
    found: Found = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            try:
                found[name].append(measure(name))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"{name} fails: {error}", flush=True)
    return {name: each for name, each in found.items() if each}


def middle(found: Found, what: str) -> dict[str, float]:
    return {name: statistics.median(each[what] for each in rounds) for name, rounds in found.items()}


def resumed(folder: Path) -> dict[str, float]:
    """Go on in the middle of 10^9 rows, a thousand names of one file: seconds and memory to the first batch."""
    made = folder / "rows"
    if not (made / "index.json").exists():
        import pyarrow as pa
        import pyarrow.parquet as pq

        made.mkdir(parents=True, exist_ok=True)
        rows = RESUMED // MANY
        numbers = pa.array(np.arange(rows, dtype=np.int64))
        pq.write_table(pa.table({"inputs": numbers}), made / "part-00000.parquet", row_group_size=10_000)
        for number in range(1, MANY):
            os.link(made / "part-00000.parquet", made / f"part-{number:05}.parquet")
        subprocess.run([sys.executable, "-m", "ddp_recipes", "index", str(made)], check=True, stdout=subprocess.DEVNULL)
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.readers", "ours", "rows", str(folder)]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


# --- what was found --------------------------------------------------------------------------------------------------


def table(title: str, found: Found, what: str, unit: str, smaller: bool, scale: float = 1.0) -> list[str]:
    """Return a table, the best of the peers first."""
    middles = middle(found, what)
    peers = [value for name, value in middles.items() if name != "ours"]
    best = (min if smaller else max)(peers) if peers else float("nan")
    rows = sorted(middles.items(), key=lambda row: row[1], reverse=not smaller)
    lines = [f"### {title}", "", f"| | {unit} | of the best peer's |", "| --- | ---: | ---: |"]
    for name, value in rows:
        rounds = [each[what] * scale for each in found[name]]
        spread = f"{value * scale:,.3g} ({min(rounds):,.3g} to {max(rounds):,.3g})"
        lines.append(f"| {'**ours**' if name == 'ours' else name} | {spread} | {value / best:.2f} |")
    return [*lines, ""]


def report(raw: dict[str, Any]) -> str:
    """Return the results as a page."""
    lines = ["# Data: from storage to batches", "", f"`{raw['command']}`, {raw['date']}, {raw['machine']}.", ""]
    lines += [f"Packages: {', '.join(f'{name} {version}' for name, version in raw['packages'].items())}."]
    if raw["missing"]:
        lines += [f"Not installed: {', '.join(raw['missing'])}."]
    lines += ["", "Medians of rounds in turns, and the least and the most. One process a rank, no data workers.", ""]
    for title, found in raw["read"].items():
        lines += table(f"{title}: samples a second", found, "per_second", "samples / s", smaller=False)
        lines += table(f"{title}: memory of a rank", found, "memory", "MB above what it had loaded", True, 1e-6)
    lines += table(f"Start to first batch, {MANY:,} shards", raw["start"], "first_s", "s", smaller=True)
    resume = raw["resume"]
    lines += [
        f"### Going on in the middle of {resume['rows']:,} rows",
        "",
        f"{resume['first_s']:.3f} s to the first batch, {resume['index_s']:.3f} s before that for the set with its "
        f"index; {resume['memory'] / 1e6:.0f} MB for all of it.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Make data, measure, and write tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--folder", type=Path, default=Path("/tmp/ddp_recipes_data"), help="for the data (default: %(default)s)")
    add("--images", type=int, default=20_000, help="JPEG files (default: %(default)s)")
    add("--texts", type=int, default=100_000, help="(default: %(default)s)")
    add("--rounds", type=int, default=5, help="(default: %(default)s)")
    add("--read", type=int, nargs=2, default=(2_560, 50_000), help="images and texts that are read in a round")
    add("--out", type=Path, help="where to write PATH.md and PATH.json")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else readers of this tree alone are compiled at each start
    folder: Path = options.folder
    began, names = time.strftime("%Y-%m-%d"), [name for name, (_, module) in READERS.items() if find_spec(module)]
    if not (folder / "images_source").exists():
        parts = [range(first, options.images, 8) for first in range(8)]
        with ProcessPoolExecutor() as pool:
            list(pool.map(write_images, [folder / "images_source"] * len(parts), parts))
    if not (folder / "text_source").exists():
        write_texts(folder / "text_source", options.texts)
    many = folder / "many"
    if not (many / "text_source").exists():
        write_texts(many / "text_source", 20 * MANY)
    prepare(folder, "images")
    prepare(folder, "text")
    prepare(many, "text", MANY)

    found: dict[str, Found] = {}
    for kind, samples in zip(("images", "text"), options.read, strict=True):
        for ranks in (1, 2):
            measured = in_turns(names, options.rounds, lambda name: read(name, kind, folder, ranks, samples))  # noqa: B023
            found[f"{kind.capitalize()}, {ranks} rank{'s' * (ranks > 1)}"] = measured
    start = in_turns(names, options.rounds, lambda name: read(name, "text", many, 1, 64))
    raw = {
        "command": shlex.join(["python", "-m", "benchmarks.data", *sys.argv[1:]]),
        "date": began,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "packages": {name: metadata.version(name) for name in PACKAGES if installed(name)},
        "missing": [name for name in READERS if name not in names],
        "read": found,
        "start": start,
        "resume": resumed(folder),
    }
    page = report(raw)
    print(page)
    if options.out is not None:
        options.out.with_suffix(".md").write_text(page)
        options.out.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n")


def installed(name: str) -> bool:
    """Whether a distribution is there."""
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
