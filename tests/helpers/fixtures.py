"""Fixtures of all tests: quick recipes on warm ranks, tiny data, and a watch over what a test leaves."""

import fcntl
import os
import pickle
import struct
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.testing import WarmRanks
from helpers.patience import patience
from helpers.ranks import RANKS, run_recipe
from helpers.recipes import QUICK
from helpers.warm import SERVERS, STAYS, warm

ROOT = Path(__file__).parents[2]
BOUND_S = 15  # for a process that was told to end

# Properties are tried on the same examples every time, which takes each of them a fraction of a second.
hypothesis.settings.register_profile("ddp_recipes", derandomize=True, deadline=None, database=None, max_examples=40)
hypothesis.settings.load_profile("ddp_recipes")
# A fork does not survive that torch has run on several threads. What tests start takes one as well, for more than one
# test runs at a time: threads that wait for each other's core would spin away most of the time.
torch.set_num_threads(1)
# Nor a first backward pass where torch sees GPUs, for which it starts threads, and after fake tensors on a GPU it does.
# One before them starts none. Where there are GPUs, no test may run a backward pass and then fork.
if not Path("/dev/nvidiactl").exists():
    torch.ones(1, requires_grad=True).backward()  # type: ignore[no-untyped-call]
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["DDP_RECIPES_TEST_PROCESS"] = MARK = str(os.getpid())  # processes inherit it, orphans as well


# --- what a test leaves behind ---------------------------------------------------------------------------------------


def everyone() -> set[int]:
    """Return the ids of all processes of the machine."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def processes(there: set[int]) -> dict[int, str]:
    """Return the running processes that this one started, or that those started, by id, but for those once there."""
    found = {}
    for pid in everyone() - there:
        folder = Path("/proc", str(pid))
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            marked = f"\0DDP_RECIPES_TEST_PROCESS={MARK}\0".encode() in b"\0" + (folder / "environ").read_bytes()
            if state != "Z" and (int(parent) == os.getpid() or marked) and pid != os.getpid():
                found[pid] = (folder / "cmdline").read_text().replace("\0", " ").strip()
        except OSError:
            continue  # it has ended meanwhile, or belongs to somebody else
    return found


def environment() -> dict[str, str]:
    """Return what tests must not change; pytest itself says where it is, and scikit-learn sets KMP_* at its import."""
    return {
        name: value
        for name, value in os.environ.items()
        if name != "PYTEST_CURRENT_TEST" and not name.startswith("KMP_")
    }


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves processes, or another environment or current folder."""
    there, environ, folder = everyone(), environment(), os.getcwd()
    yield
    deadline = time.monotonic() + patience(BOUND_S)
    while (left := processes(there | RANKS.processes | SERVERS)) and time.monotonic() < deadline:
        time.sleep(0.05)
    after, folder_after = environment(), os.getcwd()
    os.chdir(folder)
    for name in after.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)
    assert not left, f"the test left processes: {left}"
    assert after == environ, "the test changed os.environ"
    assert folder_after == folder, "the test changed the current folder"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test that is marked ``alone`` once no other one runs, what its module shares included."""
    alone = item.get_closest_marker("alone") is not None
    room = os.open(item.config.rootpath, os.O_RDONLY)  # a lock on it is shared, or exclusive
    try:
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        return (yield)
    finally:
        fcntl.flock(room, fcntl.LOCK_UN)  # also where a process that was forked meanwhile has it open
        os.close(room)


# --- ways to run -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Summary]:
    """Run a tiny recipe: ``run(*overrides, world_size=1, directory=None, warm=True, config_dir=None)``.

    It runs on ranks that stay for other tests. They are forked for it, with all that has changed in this very process,
    where ``warm`` is false or the test has patched something.
    """
    count = 0

    def quick(
        *overrides: str, world_size: int = 1, directory: Path | None = None, warm: bool = True, **options: Any
    ) -> Summary:
        nonlocal count
        count += 1
        directory = directory or tmp_path / f"run_{count}"
        measured = "coverage" in sys.modules  # what a rank ran is written when it ends, and ranks that stay are killed
        ranks = RANKS if warm and not measured and not has_patched(monkeypatch) else None
        return run_recipe([*QUICK, *overrides], world_size, directory, ranks=ranks, **options)

    return quick


def has_patched(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a test has changed more than environment and module path, which other processes do not see."""
    return bool(monkeypatch._setattr or any(mapping is not os.environ for mapping, *_ in monkeypatch._setitem))


@pytest.fixture(scope="session", autouse=True)
def ranks() -> Iterator[WarmRanks]:
    """The ranks that stay for all tests of this process."""
    with STAYS:
        yield RANKS
    RANKS.close()


@pytest.fixture(scope="session")
def python() -> str:
    """A program like ``python`` that has loaded torch already: for commands of which only the outcome is tested."""
    return warm()


# --- data ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def mnist_root() -> Path:
    """The folder that holds the real MNIST."""
    root = Path(os.environ.get("DDP_RECIPES_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not (root / "MNIST" / "raw").is_dir():
        pytest.skip(f"no MNIST in {root}; set DDP_RECIPES_TEST_DATA to the folder that holds MNIST/raw")
    return root


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few samples of everything that is read from disk, made up but in the real formats.

    It holds ``MNIST``, ``FashionMNIST``, ``cifar-10-batches-py``, ``train`` and ``val`` with one folder of images for
    each of three classes, and ``table.csv`` with the columns a, b, y, kind (no, yes) and file (the image's name).
    """
    root = tmp_path_factory.mktemp("data")
    generator = torch.Generator().manual_seed(3)
    for name in ("MNIST", "FashionMNIST"):
        _write_mnist(root / name / "raw", generator)
    _write_cifar10(root / "cifar-10-batches-py", generator)
    _write_images(root, generator)
    return root


def _bytes(generator: torch.Generator, *shape: int, high: int = 256) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=torch.uint8, generator=generator)


def _write_mnist(folder: Path, generator: torch.Generator) -> None:
    folder.mkdir(parents=True)
    for prefix, count in (("train", 40), ("t10k", 21)):
        content = {
            "images-idx3": _bytes(generator, count, 28, 28),
            "labels-idx1": _bytes(generator, count, high=10),
        }
        for kind, values in content.items():
            header = struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape)
            (folder / f"{prefix}-{kind}-ubyte").write_bytes(header + values.numpy().tobytes())


def _write_cifar10(folder: Path, generator: torch.Generator) -> None:
    folder.mkdir()
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        batch = {"data": _bytes(generator, 8, 3072).numpy(), "labels": _bytes(generator, 8, high=10).tolist()}
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(number) for number in range(10)]}))


def _write_images(root: Path, generator: torch.Generator) -> None:
    from PIL import Image

    rows = ["a,b,y,kind,file"]
    for split, count in (("train", 4), ("val", 2)):
        for number, kind in enumerate(("ant", "bee", "cat")):
            folder = root / split / kind
            folder.mkdir(parents=True)
            for image in range(count):
                Image.fromarray(_bytes(generator, 40, 40, 3).numpy()).save(folder / f"{image}.png")
                answer = ("no", "yes")[image % 2]
                rows.append(f"{image}.5,-{number},{number + image},{answer},{split}/{kind}/{image}.png")
    (root / "table.csv").write_text("\n".join(rows) + "\n")
