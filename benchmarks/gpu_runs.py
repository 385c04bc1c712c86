"""Whole runs on as many devices as there are, by command: all strategies, precision, resume, and how runs end."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

from benchmarks.samples import python_path

ROOT = Path(__file__).resolve().parents[1]
CORES = 4  # for each run that is under way
TINY = (
    *("data=random", "data.num_samples=640", "data.val_samples=32", "data.batch_size=8", "trainer.max_epochs=2"),
    *("trainer.progress=false", "logger=none", "launcher.timeout_s=60"),
)
SINGLE = ("strategy=single", "model=toy")
STRATEGIES = {
    "ddp": ("strategy=ddp", "model=toy"),
    "ddp_exact": ("strategy=ddp_exact", "model=toy"),
    "fsdp": ("strategy=fsdp", "strategy.wrap=[net1,net2]", "model=toy"),
    "ddp_pipeline": ("strategy=ddp_pipeline", "model=toy"),
}
DISTURBING = """
import os
from pathlib import Path

from ddp_recipes import Callback


class Disturbing(Callback):
    def __init__(self, rank, how):
        self.mine, self.how = rank == int(os.environ.get("RANK", 0)), how

    def on_step(self, step):
        if self.mine and step == 2 and not Path("done").exists():
            Path("done").touch()
            if self.how == 0:
                raise ValueError("the cat sat on the keyboard")
            os.kill(os.getpid(), self.how)
"""


@dataclass(frozen=True)
class Case:
    """A run, and how it is to end.

    Attributes:
        name: for a reader; runs of ``same`` names have the same weights.
        ranks: of one device each, or of two where the model is split.
        status: exit code.
        says: what stderr holds.
        same: weights are those of all cases with this word.
        again: whether it is started once more, and then finishes.
    """

    name: str
    ranks: int
    overrides: tuple[str, ...]
    status: int = 0
    says: str = ""
    same: str = ""
    again: bool = False


def disturbed(rank: int, how: int) -> str:
    """Return the override by which a rank raises (0), or sends itself a signal, after its second step."""
    return f"+callbacks.disturbing={{_target_: disturbing.Disturbing, rank: {rank}, how: {how}}}"


def cases(devices: int, device: str, *, shared: bool = False) -> Iterator[Case]:
    """Yield what can be tried on so many devices of a type; ``shared``: which are one, so that no replica has two."""
    yield Case("single", 1, SINGLE, same="single")
    yield Case("single, stopped and resumed", 1, (*SINGLE, disturbed(0, SIGTERM)), 75, same="single", again=True)
    yield Case("single, exception", 1, (*SINGLE, disturbed(0, 0)), 1, "the cat sat on the keyboard")
    for precision in ("bf16-mixed", "16-mixed"):
        yield Case(f"ddp, one rank, {precision}", 1, (*STRATEGIES["ddp"], f"trainer.precision={precision}"))
    for name in ("ddp_exact", "fsdp"):
        yield Case(f"{name}, one rank", 1, STRATEGIES[name], same=name if name == "ddp_exact" else "")
    dp = ("strategy=dp", "model=toy")  # one process with all devices
    yield Case("dp", 1, dp) if device == "cuda" else Case("dp", 1, dp, 2, "deals batches to GPUs alone")
    more = "launcher.nproc_per_node"
    yield Case("more ranks than devices", devices + 1, STRATEGIES["ddp"], 2, more)
    if devices < 2:
        yield Case("a replica of two devices", 1, ("strategy=single", "model=toy_mp"), 2, "model.num_devices")
        return
    if not shared:
        yield Case("split over two devices", 1, ("strategy=single", "model=toy_mp"), same="single")
    for name, own in STRATEGIES.items():
        common = name if name == "ddp_exact" else f"{name} on two"
        yield Case(f"{name}, two ranks", 2, own, same=common)
        raises = (*own, disturbed(1, 0))
        yield Case(f"{name}, exception on rank 1", 2, raises, 1, "the cat sat on the keyboard")
        yield Case(f"{name}, rank 1 killed", 2, (*own, disturbed(1, SIGKILL)), 1, "Rank 1", same=common, again=True)
        yield Case(f"{name}, stopped", 2, (*own, disturbed(0, SIGTERM)), 75, same=common, again=True)
    workers = "ddp on two" if devices > 2 else "single"  # what as many workers come to; another rank serves
    yield Case("parameter_server", min(devices, 3), ("strategy=parameter_server", "model=toy"), same=workers)
    yield Case("ddp, bf16-mixed", 2, (*STRATEGIES["ddp"], "trainer.precision=bf16-mixed"))
    replaced = (*STRATEGIES["ddp_exact"], disturbed(1, SIGKILL), "launcher.replace_ranks=1")
    yield Case("ddp_exact, rank 1 replaced", 2, replaced, same="ddp_exact")
    if devices < 4:
        return
    if not shared:
        yield Case("two ranks of two devices", 2, ("strategy=ddp", "model=toy_mp"), same="ddp on two")
    yield Case("ddp_exact, four ranks", 4, STRATEGIES["ddp_exact"], same="ddp_exact")
    yield Case("two pipelines", 4, STRATEGIES["ddp_pipeline"])
    yield Case("fsdp, two replicas", 4, (*STRATEGIES["fsdp"], "strategy.replicas=2"))


@dataclass
class Tried:
    """What became of cases.

    Attributes:
        rows: by name: seconds, and what was wrong, if anything was.
        weights: hashes by the word that cases have in common.
    """

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)

    def check(self, case: Case, run: Callable[..., subprocess.CompletedProcess[str]], folder: Path) -> str:
        """Run a case; return what is wrong, or nothing."""
        ended = run()
        if ended.returncode != case.status or case.says not in ended.stderr:
            return f"ended with {ended.returncode}, expected {case.status} {case.says}: {ended.stderr[-1500:]}"
        if case.again and (ended := run()).returncode != 0:
            return f"started again it ended with {ended.returncode}: {ended.stderr[-1500:]}"
        if not case.same or (case.status != 0 and not case.again):
            return ""
        found = json.loads((folder / "run" / "summary.json").read_text())["weights_sha256"]
        expected = self.weights.setdefault(case.same, found)
        return "" if found == expected else f"its weights are not those of other runs of {case.same}"


def try_all(
    folder: Path,
    device: str,
    devices: int,
    until: float,
    environ: Mapping[str, str],
    *common: str,
    shared: bool = False,
) -> Tried:
    """Run what can be tried on so many devices, several runs at a time where there are cores for it.

    Args:
        device: their type.
        until: as ``time.monotonic`` has it; what is left then is not tried, and said to be.
        environ: beside the environment.
        shared: whether they are one, which several ranks share.
        common: overrides of all runs.
    """
    tried = Tried()

    def attempt(number: int, case: Case) -> None:
        own, began = folder / str(number), time.monotonic()
        own.mkdir()
        (own / "disturbing.py").write_text(DISTURBING)
        path = os.pathsep.join(map(str, (ROOT / "src", own, environ.get("PYTHONPATH", python_path()))))
        overrides = [
            *TINY,
            *common,
            *case.overrides,
            f"launcher.device={device}",
            f"launcher.nproc_per_node={case.ranks}",
        ]

        def run() -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, str(ROOT / "train.py"), *overrides, "hydra.run.dir=run", "ckpt_path=auto"],
                cwd=own,
                env={**os.environ, **environ, "PYTHONPATH": path},
                capture_output=True,
                text=True,
                timeout=max(0.1, until - time.monotonic()),
            )

        try:
            wrong = tried.check(case, run, own)
        except subprocess.TimeoutExpired:
            wrong = "not within the time that all parts have"
        tried.rows[case.name] = {"seconds": time.monotonic() - began, "wrong": wrong}
        print(f"{case.name}: {wrong or 'as expected'}, {time.monotonic() - began:.1f} s", flush=True)

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // CORES)) as runs:
        found = cases(devices, device, shared=shared)
        for ended in [runs.submit(attempt, number, case) for number, case in enumerate(found)]:
            ended.result()
    return tried
