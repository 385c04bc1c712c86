"""Small states, savers and disks for the tests of checkpoints."""

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_recipes.checkpointing.files import content_of, step_files
from ddp_recipes.checkpointing.manager import FileCheckpointer
from ddp_recipes.checkpointing.writing import StagingWriter, size_of, unwritable
from ddp_recipes.config.settings import CheckpointSettings
from ddp_recipes.runtime.files import write_aside


def state_of(step: int, size: int = 4) -> dict[str, Any]:
    """Return a state as the loop gathers it, with weights that only this step has."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"weight": torch.randn(size, 3, generator=generator), "half": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "cursor": {"epoch": 0, "batch": step, "step": step, "samples_seen": 8 * step},
        "metrics": {"val/loss": 0.5},
        "nothing": None,
    }


def write(path: Path, state: dict[str, Any]) -> None:
    """Write a state as a checkpointer does, but no other names."""
    content = content_of(state)
    with unwritable(path, size_of(content)):
        write_aside(path, StagingWriter().stage(content, snapshot=False))


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state that was saved from one that was loaded."""
    return {name: value for name, value in state.items() if name not in ("format", "checksum")}


def settings(**changes: Any) -> CheckpointSettings:
    """Return the default settings, but for what is given."""
    defaults: dict[str, Any] = {
        "enabled": True,
        "every_n_steps": None,
        "every_n_epochs": None,
        "monitor": "val/loss",
        "mode": "min",
        "save_top_k": 1,
        "save_last": True,
        "async_save": False,
    }
    return CheckpointSettings(**defaults | changes)


def checkpointer(folder: Path, *, background: bool = False, **changes: Any) -> FileCheckpointer:
    """Return a saver with the default settings, but for what is given."""
    return FileCheckpointer(folder, settings(**changes), background)


def steps_in(folder: Path) -> list[int]:
    """Return the steps whose files are there."""
    return sorted(step_files(folder))


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """Make a folder that is a file system of its own, of so many bytes (``256k``)."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk takes root's rights")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


BROKEN = {  # and what is then said, as a pattern
    "full": "No space left on device",
    "inodes": "No space left on device",
    "read-only": "(Read-only file system|Input/output error)",  # the latter of a write that was under way
}


@contextmanager
def broken_disk(folder: Path, what: str) -> Iterator[Callable[[], None]]:
    """Make a folder that is a small disk; yield what fills it, takes its inodes, or has Linux find it damaged."""
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(8 << 20)
    folder.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-N", "128", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(folder)], capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk takes root's rights, and loop devices")

    def fail() -> None:
        if what == "read-only":
            subprocess.run(["mount", "-o", "remount,abort", str(folder)], check=True)
            return
        for size in (1 << 20, 1 << 10) if what == "full" else (0,):
            with suppress(OSError):
                for number in itertools.count():
                    with (folder / f"filler_{size}_{number}").open("wb", buffering=0) as file:
                        while size:
                            file.write(bytes(size))

    try:
        yield fail
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
