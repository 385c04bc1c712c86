"""Everything that needs a GPU, in one command of under ten minutes: ``make gpu``.

It runs the tests of ``tests/gpu``, tries whole runs on all devices (:mod:`benchmarks.gpu_runs`), compares the memory
that a dry run names with what a run takes, profiles a few steps, measures what pinned memory saves, and takes a short
turn of ``make bench ARGS=device=cuda``. What it found is in ``results/<name of the GPU>.json`` and, to be read, in
``.md``. Without a GPU it says so and writes nothing.

``--rehearse openreg`` (with ``OPENREG=1`` in the environment) tries the whole runs on simulated devices, with NCCL's
habits, and writes nothing: so this very program is tried where there is no GPU.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # the folder of this script, which would hide installed packages

import torch  # noqa: E402

from benchmarks.competitor import Failed  # noqa: E402
from benchmarks.competitors import ours  # noqa: E402
from benchmarks.gpu_runs import try_all  # noqa: E402
from benchmarks.player import Seat  # noqa: E402
from benchmarks.results import Row, machine, table  # noqa: E402
from benchmarks.samples import DATA, python_path  # noqa: E402
from benchmarks.steps import ratio, step_time  # noqa: E402
from benchmarks.turns import Entry, session  # noqa: E402
from ddp_recipes.callbacks import Callback  # noqa: E402

LIMIT_S = 570.0  # for all parts together
TESTS_S = 240.0  # for the tests, one of which may hang
SHARED = 4  # ranks on one GPU
CLOSE = 0.1  # a dry run's memory against the real one: workspaces of libraries are not in it

QUIET = ("strategy=single", "launcher.device=cuda", "logger=none", "checkpoint=none", "trainer.progress=false")
IMAGES = ("data=fake_images", "data.num_samples=128", "data.val_samples=64", "data.image_size=224", "model=resnet50")
MEMORY = {
    "ResNet-50, batch of 32": (*IMAGES, "data.batch_size=32"),
    "ResNet-50, bf16-mixed, AdamW": (*IMAGES, "data.batch_size=32", "trainer.precision=bf16-mixed", "optimizer=adamw"),
    "perceptron of 135 million weights, AdamW": (
        "data=random",
        "data.num_samples=256",
        "data.val_samples=32",
        "model=mlp",
        "model.hidden_features=[8192,8192,8192]",
        "optimizer=adamw",
    ),
}
PROFILED = ("data=fake_images", "data.num_samples=1024", "data.image_size=64", "data.batch_size=64", "model=resnet18")
PHASE = re.compile(r"^  (\S.*?) +([\d.]+) ms +\d+% +GPU ([\d.]+) ms$", re.MULTILINE)
# Batches of 64 images of 64×64, as they come from memory: 3 MB each.
PREFETCHED_STEPS, PREFETCHED_ROUNDS = 100, 5
PREFETCHED = ("launcher.device=cuda", "data.batch_size=64", "data.num_samples=6400", *QUIET[2:])


class Peak(Callback):
    """Writes down the most memory that the allocator gave to tensors at a time."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_end(self) -> None:
        """Write."""
        self.path.write_text(str(torch.cuda.max_memory_allocated()))


@dataclass
class Part:
    """What one part found.

    Attributes:
        lines: for a reader.
        found: the same and more, for programs.
        failures: what is not as it should be.
    """

    lines: list[str]
    found: Any
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """Where a part works, and until when.

    Attributes:
        folder: of its own, which is gone afterwards.
        until: as ``time.monotonic`` has it.
    """

    folder: Path
    until: float

    def run(self, *command: str, check: bool = True, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Run a Python program to its end.

        Raises:
            Failed: it ended with another exit code than 0, or not in time; with its last lines.
        """
        limit_s = min(limit_s, max(1.0, self.until - time.monotonic()))
        try:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": python_path()},
                capture_output=True,
                text=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired as stopped:
            last = "".join(each.decode()[-2000:] for each in (stopped.stdout, stopped.stderr) if each)
            raise Failed(f"{' '.join(command)}: not within {limit_s:.0f} s.\n{last}") from None
        if check and done.returncode != 0:
            raise Failed(f"{' '.join(command)} ended with {done.returncode}.\n{tail(done)}")
        return done

    def train(self, name: str, *overrides: str) -> Path:
        """Run ``train.py`` and return its run directory."""
        self.run(str(ROOT / "train.py"), *overrides, f"hydra.run.dir={self.folder / name}")
        return self.folder / name


def tail(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last lines that a program printed."""
    return done.stdout[-2000:] + done.stderr[-2000:]


def tests(place: Place) -> Part:
    """Run the tests that are skipped without a GPU."""
    report = place.folder / "tests.xml"
    options = (
        *("-v", f"-c{ROOT / 'pyproject.toml'}", f"--junitxml={report}"),
        *("-p", "no:cacheprovider", "-p", "no:benchmark", "-o", "faulthandler_timeout=60"),
    )
    done = place.run("-m", "pytest", str(ROOT / "tests" / "gpu"), *options, check=False, limit_s=TESTS_S)
    if not report.exists():
        raise Failed(f"pytest ended with {done.returncode}.\n{tail(done)}")
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [each.tag for each in case if each.tag in ("failure", "error", "skipped")]
        found[case.get("name", "")] = {"outcome": bad[0] if bad else "passed", "seconds": float(case.get("time", 0))}
    count = {name: sum(each["outcome"] == name for each in found.values()) for name in ("passed", "skipped")}
    failures = [f"{name}: {each['outcome']}" for name, each in found.items() if each["outcome"] in ("failure", "error")]
    if failures:
        print(done.stdout, file=sys.stderr)
    line = f"{count['passed']} passed, {count['skipped']} skipped, {len(failures)} failed. Some need a second GPU."
    return Part([line, *(f"- {failure}" for failure in failures)], found, failures)


def runs(place: Place) -> Part:
    """Try whole runs on 1, 2 or 4 GPUs: all strategies, resume, precision and ends."""
    return runs_on("cuda", place, {}, "trainer.deterministic=true")  # which has the same bits again


def shared_runs(place: Place) -> Part:
    """Try runs of two and of four ranks on one GPU, where there is no other one: see :mod:`benchmarks.one_gpu`."""
    if torch.cuda.device_count() > 1:
        return Part(["There are others."], {})
    folder = ROOT / "benchmarks" / "one_gpu"
    environ = {"ONE_GPU_RANKS": str(SHARED), "PYTHONPATH": os.pathsep.join([str(folder), python_path()])}
    return runs_on("cuda", place, environ, "trainer.deterministic=true", shared=SHARED)


def runs_on(device: str, place: Place, environ: Mapping[str, str], *common: str, shared: int = 0) -> Part:
    """Do the same on another type of device, or on one that is as good as ``shared`` of them."""
    devices = shared or max(count for count in (1, 2, 4) if count <= torch.accelerator.device_count())
    rows = try_all(place.folder, device, devices, place.until, environ, *common, shared=shared > 0).rows
    failures = [f"{name}: {row['wrong']}" for name, row in rows.items() if row["wrong"]]
    what = f"{shared} ranks' share of one" if shared else f"{devices} of the devices"
    lines = [f"{len(rows) - len(failures)} of {len(rows)} runs on {what} ended as they should."]
    lines += [f"- {name}" for name, row in rows.items() if row["wrong"]]
    return Part(lines, rows, failures)


HABITS = dict.fromkeys(("STAGED_COLLECTIVE_SHUTDOWN", "STAGED_SILENT", "STAGED_REFUSES_CPU"), "1")


def rehearse(device: str, limit_s: float) -> int:
    """Try whole runs on another type of device, all within so many seconds; return the exit status."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != device:
        print(f"make gpu: torch sees no {device} here, so there is nothing to rehearse on.")
        return 0
    with tempfile.TemporaryDirectory(prefix="ddp_recipes_gpu_") as folder:
        part = runs_on(device, Place(Path(folder), time.monotonic() + limit_s), HABITS)
    print("\n".join([*part.lines, *part.failures]))
    return 1 if part.failures else 0


def memory(place: Place) -> Part:
    """Compare the memory that a dry run names with the most that a run takes."""
    rows = []
    failures = []
    for number, (name, overrides) in enumerate(MEMORY.items()):
        common = (*overrides, *QUIET, "trainer.max_epochs=1")
        planned = place.train(f"plan_{number}", *common, "plan=true")
        (devices,) = json.loads((planned / "plan.json").read_text())["memory"]
        noted = place.folder / f"peak_{number}"
        place.train(f"run_{number}", *common, f"+callbacks.peak={{_target_: benchmarks.gpu.Peak, path: {noted}}}")
        row = {"recipe": name, "planned": devices["peak"], "real": int(noted.read_text())}
        rows.append(row)
        if abs(row["planned"] / row["real"] - 1) > CLOSE:
            failures.append(f"{name}: the dry run names {row['planned'] / row['real']:.2f} times the memory of a run")
    lines = ["| recipe | dry run | run | dry run / run |", "| --- | ---: | ---: | ---: |"]
    lines += [
        f"| {row['recipe']} | {row['planned'] / 1e6:,.0f} MB | {row['real'] / 1e6:,.0f} MB "
        f"| {row['planned'] / row['real']:.3f} |"
        for row in rows
    ]
    return Part(lines, rows, failures)


def profile(place: Place) -> Part:
    """Profile a few steps: time of the host and of kernels by phase."""
    directory = place.train("profile", *PROFILED, *QUIET, "debug=profiler", "data.val=null", "trainer.max_epochs=1")
    phases = [
        {"phase": name, "host_ms": float(host), "kernels_ms": float(kernels)}
        for name, host, kernels in PHASE.findall((directory / "train.log").read_text())
    ]
    busy = {phase["phase"]: phase["kernels_ms"] for phase in phases}
    idle = [name for name in ("forward", "backward", "optimizer") if not busy.get(name)]
    lines = ["ResNet-18, batches of 64 images of 64×64.", "", "| phase | host | kernels |", "| --- | ---: | ---: |"]
    lines += [f"| {each['phase']} | {each['host_ms']:.3f} ms | {each['kernels_ms']:.3f} ms |" for each in phases]
    return Part(lines, phases, [f"the profiler shows no kernels of {name}" for name in idle])


def prefetch(place: Place) -> Part:
    """Measure a step from pinned memory against one from memory that is not."""

    def command(pin: str) -> Callable[[Seat], list[str]]:
        return ours.with_overrides(*PREFETCHED, f"data.pin_memory={pin}")

    # A seat on the CPU gets its samples from memory; on a GPU they would be there already.
    turns = session(
        [
            Entry(Seat("pinned", workload="resnet18"), command("true"), joins=False),
            Entry(Seat("pageable", workload="resnet18"), command("false"), joins=False),
        ],
        PREFETCHED_STEPS,
        PREFETCHED_ROUNDS,
        warm_up=PREFETCHED_STEPS,
    )
    title = "resnet18 step"
    rows = [Row(title, "pinned / pageable", ratio([turns], "pinned", "pageable"))]
    rows += [Row(title, name, step_time([turns], name), unit="µs") for name in turns]
    return Part(["```text", table(rows), "```"], [asdict(row) for row in rows])


def bench(place: Place) -> Part:
    """Take a short turn of ``make bench ARGS=device=cuda``, without the peers."""
    options = ("--device=cuda", "--quick", f"--out={place.folder}", "--only=toy,mnist,resnet,transformer")
    done = place.run(str(ROOT / "benchmarks" / "run.py"), *options, check=False)
    results = place.folder / "cuda.json"
    if not results.exists():
        raise Failed(f"benchmarks/run.py ended with {done.returncode}.\n{tail(done)}")
    found = {name: group["rows"] for name, group in json.loads(results.read_text()).items()}
    tables = re.findall(r"^what .*?(?=^$|\Z)", done.stdout, re.MULTILINE | re.DOTALL)[: len(found)]
    return Part(
        ["```text", "\n".join(tables).rstrip(), "```"], found, [] if done.returncode == 0 else [done.stderr.strip()]
    )


PARTS: dict[str, Callable[[Place], Part]] = {
    "Tests": tests,
    "Runs": runs,
    "Runs of several ranks on one GPU": shared_runs,
    "Memory of a dry run": memory,
    "Profile": profile,
    "Pinned memory": prefetch,
    "Benchmark": bench,
}


def page(gpu: str, there: dict[str, Any], parts: dict[str, Part]) -> str:
    """Return what was found as Markdown."""
    about = f"{there['date']}, commit {there['commit']}, torch {there['torch']}, Python {there['python']}"
    sections = [f"## {title}\n\n" + "\n".join(part.lines) for title, part in parts.items()]
    return "\n\n".join([f"# {gpu}", f"`make gpu`, {about}.", *sections]) + "\n"


def main(out: Path = ROOT / "benchmarks" / "results", parts: Sequence[str] = tuple(PARTS)) -> int:
    """Run all parts, print and write what they found; return the exit status."""
    if not torch.cuda.is_available():
        print("make gpu: torch sees no GPU here, so there is nothing to measure, and nothing is written.")
        return 0
    gpu = torch.cuda.get_device_name()
    began = time.monotonic()
    there = machine("cuda")
    found: dict[str, Part] = {}
    for title in parts:
        with tempfile.TemporaryDirectory(prefix="ddp_recipes_gpu_") as folder:
            os.environ[DATA] = folder  # for made-up samples
            try:
                found[title] = PARTS[title](Place(Path(folder), began + LIMIT_S))
            except Failed as error:  # the other parts have their say
                found[title] = Part(["It failed."], None, [f"{title}: {error}"])
        print(f"\n{title}, {time.monotonic() - began:.0f} s so far\n" + "\n".join(found[title].lines), flush=True)
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    results = {title: {"found": part.found, "failures": part.failures} for title, part in found.items()}
    text = json.dumps({"machine": there, "parts": results}, ensure_ascii=False, indent=1)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{slug}.json").write_text(text + "\n", encoding="utf-8")
    (out / f"{slug}.md").write_text(page(gpu, there, found), encoding="utf-8")
    print(f"\nWritten: {out / slug}.json and .md")
    failures = [failure for part in found.values() for failure in part.failures]
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rehearse", metavar="TYPE", help="try whole runs on this type of device, and write nothing")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="of the rehearsal")
    asked = parser.parse_args()
    raise SystemExit(main() if asked.rehearse is None else rehearse(asked.rehearse, asked.limit))
