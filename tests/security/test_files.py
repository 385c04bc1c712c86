"""Files of others are read without running anything; ours are ours alone, whole after a power failure, and in place."""

import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import ddp_recipes
from ddp_recipes import RequestError
from ddp_recipes.checkpointing.export import export
from ddp_recipes.checkpointing.reading import load
from ddp_recipes.launchers import environment
from ddp_recipes.reporting.run_directory import Summary, read_summary
from helpers import security_files
from helpers.marks import slow_but
from helpers.processes import SMALL, ran
from helpers.recipes import QUICK

Run = Callable[..., Summary]
STRANGER = 65534
SINGLE = "strategy=single"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes a second user, which only root can be")


# --- checkpoints of others -------------------------------------------------------------------------------------------


def poisoned(kind: str, whole: Path, witness: Path) -> bytes:
    """Return a file that is no checkpoint, though it may look like one."""
    weights = {"net.weight": torch.zeros(2)}
    memory = whole.with_name("made.pt")
    contents = {
        "cursor of text": {"format": 2, "model": weights, "cursor": {"step": "1; rm -rf ~"}},
        "cursor of lists": {"format": 2, "model": weights, "cursor": [1]},
        "optimizer of text": {"format": 2, "model": weights, "optimizer": "none"},
        "weights of numbers": {"format": 2, "model": {"net.weight": 1}},
        "later format": {"format": 10**9, "model": {}},
    }
    if kind in contents:
        torch.save(contents[kind], memory)
        return memory.read_bytes()
    header = {"net.weight": {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 1 << 60]}}
    made: dict[str, Callable[[], bytes]] = {
        "pickle": lambda: security_files.pickled(witness),
        "pickle in a zip file": lambda: security_files.checkpoint(witness),
        "zip bomb": lambda: security_files.bomb(1 << 28),
        "records that overlap": lambda: _overlapping(whole.read_bytes()),
        "cut": lambda: whole.read_bytes()[:-100],
        "empty": lambda: b"",
        "safetensors with a false header": lambda: security_files.safetensors(header, bytes(8)),
        "safetensors with a long header": lambda: security_files.safetensors({}, length=1 << 62),
        "index": lambda: json.dumps({"weight_map": {"net.weight": "../../../../etc/passwd"}}).encode(),
    }
    return made[kind]()


def _overlapping(content: bytes) -> bytes:
    """Return a zip file whose central directory names each record a thousand times."""
    end = content.rindex(b"PK\5\6")
    count, size, start = struct.unpack_from("<HII", content, end + 10)
    entries = content[start : start + size] * 50
    return (
        content[:start]
        + entries
        + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count * 50, count * 50, len(entries), start, 0)
    )


KINDS = [
    *("pickle", "pickle in a zip file", "zip bomb", "records that overlap", "cut", "empty", "cursor of text"),
    *("cursor of lists", "optimizer of text", "weights of numbers", "later format", "index"),
    *("safetensors with a false header", "safetensors with a long header"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a run."""
    from helpers.ranks import run_recipe

    folder = tmp_path_factory.mktemp("whole")
    return Path(run_recipe([*QUICK, SINGLE], 1, folder / "run")["last_checkpoint"])


@pytest.mark.parametrize("kind", slow_but(KINDS[:6], KINDS))
def test_a_poisoned_checkpoint_is_refused_in_one_message(kind: str, whole: Path, tmp_path: Path, run: Run) -> None:
    witness, folder = tmp_path / "witness", tmp_path / "theirs" / "checkpoints"
    folder.mkdir(parents=True)
    content, weights = poisoned(kind, whole, witness), ("weights.safetensors", "model.safetensors.index.json")
    for name in ("step_00000001.pt", "last.pt", "lightning.ckpt", *weights):
        (folder / name).write_bytes(content)
    for path in (folder / "step_00000001.pt", folder.parent):
        with pytest.raises(RequestError) as refused:
            export(path, tmp_path / "out.safetensors")
        assert "\n" not in str(refused.value) or "Every checkpoint" in str(refused.value)
    if kind in ("pickle in a zip file", "zip bomb", "index") or kind.startswith("safetensors"):
        name = "weights.safetensors" if kind.startswith("safetensors") else "lightning.ckpt"
        with pytest.raises(RequestError, match=r"weights_from=|is damaged or no|has format"):
            run(SINGLE, f"weights_from={folder / name}", directory=tmp_path / "run")
    assert not witness.exists()
    assert not (tmp_path / "run").exists()


NO_FILES: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "link to a device": partial(os.symlink, "/dev/zero"),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_no_summary_no_key_and_no_table(
    kind: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    NO_FILES[kind](tmp_path / "summary.json")
    assert read_summary(tmp_path) is None
    monkeypatch.setenv("HOME", str(tmp_path))
    NO_FILES[kind](Path(environment.KEY_FILE).expanduser())
    assert environment.find_key({}) == b""
    run(*QUICK, SINGLE, "logger=csv", directory=tmp_path / "run")
    (table := tmp_path / "run" / "csv" / "metrics.csv").unlink()
    NO_FILES[kind](table)
    with pytest.raises(RequestError, match=r"it is no regular file: .*metrics.csv"):
        run(*QUICK, SINGLE, "logger=csv", "ckpt_path=auto", "trainer.max_epochs=3", directory=tmp_path / "run")


def test_a_record_that_is_marked_as_a_folder_is_refused(whole: Path, tmp_path: Path) -> None:
    """One bit, which no checksum covers: torch would read the tensor as whatever is in memory."""
    content = whole.read_bytes()
    with zipfile.ZipFile(whole) as archive:
        at, records = archive.start_dir, archive.infolist()
    assert any("/data/" in record.filename for record in records)
    for record in records:
        sizes = struct.unpack_from("<HHH", content, at + 28)  # of its name and what follows that
        marked = bytearray(content)
        marked[at + 38] |= 0x10
        (copy := tmp_path / "copy.pt").write_bytes(marked)
        with pytest.raises(RequestError, match=f"{record.filename} is marked as a folder"):
            load(copy)
        at += 46 + sum(sizes)


@pytest.mark.parametrize("name", ["last.pt", "best.pt"])
def test_a_folder_where_checkpoints_are_named_is_refused_before_the_run_goes_on(
    name: str, run: Run, tmp_path: Path
) -> None:
    run(*QUICK, SINGLE, "checkpoint.every_n_steps=1", directory=tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / name).unlink()
    (tmp_path / "run" / "checkpoints" / name).mkdir()
    before = (tmp_path / "run" / "summary.json").read_text()
    with pytest.raises(RequestError, match=rf"{name} is a folder, in whose place checkpoints are named. Move it away."):
        run(*QUICK, SINGLE, "ckpt_path=auto", "trainer.max_epochs=3", directory=tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").read_text() == before


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "step_00000001.pt"
    path.parent.mkdir()
    NO_FILES[kind](path)
    for given in (path, tmp_path):
        with pytest.raises(RequestError, match=r"no regular file|without a checkpoint|there is no"):
            export(given, tmp_path / "out.safetensors")


@pytest.mark.slow
def test_names_in_a_file_reach_a_terminal_spelled_out(whole: Path, tmp_path: Path) -> None:
    state = torch.load(whole, weights_only=True)
    state["model"]["\x1b]0;owned\x07\x1b[2J\u202e"] = torch.zeros(1)
    torch.save(state, tmp_path / "theirs.pt")
    ended = ran(tmp_path, *QUICK, SINGLE, f"ckpt_path={tmp_path / 'theirs.pt'}")
    assert ended.status == 2
    assert r"\x1b]0;owned\x07\x1b[2J\u202e: not in the model" in ended.err
    assert "\x1b" not in ended.err + ended.out


# --- our own files ---------------------------------------------------------------------------------------------------


def test_nobody_else_may_write_what_a_run_leaves(run: Run, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        run(SINGLE, "logger=[tensorboard,csv]", directory=tmp_path / "run")
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]}
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o027} == {}
    assert len(modes) > 8


@as_root
@pytest.mark.slow
def test_what_another_user_has_planted_is_not_written_through(run: Run, tmp_path: Path) -> None:
    """In a folder that all may write to: a run directory, a link to one, and links inside one."""
    shared, victim = tmp_path / "shared", tmp_path / "victim"
    for folder in (shared, victim):
        folder.mkdir()
    shared.chmod(0o1777)
    (victim / "profile").write_text("mine\n")
    (shared / "folder").mkdir(mode=0o777)
    (shared / "link").symlink_to(victim)
    (shared / "run").symlink_to(victim / "new")
    for name in ("folder", "link", "run"):
        os.chown(shared / name, STRANGER, STRANGER, follow_symlinks=False)
    for name in ("folder", "run", "link/run"):
        with pytest.raises(RequestError, match=rf"shared/{name.split('/')[0]}, which another user \(number 65534\)"):
            ddp_recipes.run([*QUICK, SINGLE, f"hydra.run.dir={shared / name}"])
    theirs = tmp_path / "theirs"
    run(SINGLE, directory=theirs)
    for name in ("train.log", "sub"):
        (theirs / name).unlink(missing_ok=True)
        (theirs / name).symlink_to(victim / "profile")
        os.chown(theirs / name, *((0, 0) if name == "train.log" else (STRANGER, STRANGER)), follow_symlinks=False)
        with pytest.raises(RequestError, match=f"theirs/{name} is a symbolic link to"):
            run(SINGLE, "ckpt_path=auto", "trainer.max_epochs=3", directory=theirs)
        (theirs / name).unlink()
    for name in ("config.yaml", "summary.json", "checkpoints/step_00000024.pt"):
        path = theirs / name
        path.with_name(f".{path.name}.part").symlink_to(victim / "profile")
    assert run(SINGLE, "ckpt_path=auto", "trainer.max_epochs=3", directory=theirs)["status"] == "finished"
    assert {path.name: path.read_text() for path in victim.iterdir()} == {"profile": "mine\n"}


HOSTILE = ["../../../out", "$(touch out)", "`touch out`", ";touch out 2;", "a\nb", "\x1b[2J", "<script>a(1)</script>"]


@pytest.mark.slow
def test_hostile_names_stay_in_the_folder_and_off_the_terminal(tmp_path: Path) -> None:
    """Of classes and metrics, with a picture of each: nothing but the run directory is there afterwards."""
    here = tmp_path / "deep" / "er"
    (here / "conf" / "experiment").mkdir(parents=True)
    rows = "".join(f'{number},"{name}"\n' for number, name in enumerate(HOSTILE * 4))
    (here / "table.csv").write_text(f"a,b\n{rows}")
    matrix = f"{{_target_: torchmetrics.ConfusionMatrix, task: multiclass, num_classes: {len(HOSTILE)}}}"
    metrics = ", ".join(f"{json.dumps(name)}: {matrix}" for name in HOSTILE)
    (here / "conf" / "experiment" / "hostile.yaml").write_text(
        f"# @package _global_\ntask:\n  metrics: {{accuracy: {{_target_: ddp_recipes.tasks.Accuracy}}, {metrics}}}\n"
    )
    data = ["data=csv", "data.path=table.csv", "data.inputs=[a]", "data.target=b", f"data.out_features={len(HOSTILE)}"]
    small = ["trainer.max_epochs=1", "trainer.progress=lines", "logger=[tensorboard,csv]", "model=linear", SINGLE]
    ended = ran(here, *data, *small, "--config-dir", "conf", "experiment=hostile", "hydra.run.dir=run")
    assert ended.status == 0, ended.err
    assert "\x1b" not in ended.out + ended.err + (here / "run" / "train.log").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert sorted(path.name for path in here.iterdir() if not path.name.endswith((".out", ".err"))) == [
        "conf",
        "run",
        "table.csv",
    ]
    pictures = {path.relative_to(here / "run" / "csv").as_posix() for path in (here / "run" / "csv").rglob("*.png")}
    assert len(pictures) == len(HOSTILE)
    assert all(name.isprintable() for name in pictures)


@pytest.mark.slow
def test_a_job_of_a_sweep_does_not_leave_its_folder(tmp_path: Path) -> None:
    (tmp_path / "er").mkdir()
    sweep = ["-m", "hydra.sweep.dir=sweep", "hydra.sweep.subdir=${hydra.job.override_dirname}", "seed=1"]
    ended = ran(tmp_path / "er", *QUICK, SINGLE, *sweep, "+run.note=../../../../stolen")
    assert ended.status == 2
    assert "leaves hydra.sweep.dir" in ended.err
    assert not list(tmp_path.rglob("config.yaml"))


@pytest.mark.parametrize(
    "override", ["+launcher.sbatch.comment", "launcher.account", "launcher.partition", "hydra.run.dir"]
)
def test_a_name_adds_no_line_to_the_script_of_a_slurm_job(
    override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm is not needed: it is refused before anything is submitted, and no ``sbatch`` is asked."""
    pytest.importorskip("submitit")
    for program in ("sbatch", "srun", "squeue"):
        (tmp_path / program).write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nexit 1\n")
        (tmp_path / program).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match="is not one line of printable text"):
        ddp_recipes.run([*QUICK, "launcher=slurm", f"{override}='{tmp_path}/a\ntouch out\n'"])
    assert not (tmp_path / "asked").exists()


# --- after a power failure -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_config_and_summary_are_durable(tmp_path: Path) -> None:
    """Whoever looks at what the run asks of the system sees each of them synced before it gets its name."""
    trace = shutil.which("strace")
    if trace is None:
        pytest.skip("strace is not installed")
    log = tmp_path / "trace"
    command = [
        trace,
        "-f",
        "-y",
        "-e",
        "trace=fsync,fdatasync,rename,renameat,renameat2",
        "-o",
        str(log),
        sys.executable,
    ]
    ended = ran(tmp_path, *SMALL, SINGLE, "trainer.max_epochs=1", command=command)
    assert ended.status == 0, ended.err
    lines = log.read_text().splitlines()
    for name in ("config.yaml", "summary.json"):
        renamed = next(number for number, line in enumerate(lines) if "rename" in line and f'/run/{name}"' in line)
        assert any("fsync" in line and f".{name}.part" in line for line in lines[:renamed])
        assert any("fsync" in line and "/run>" in line for line in lines[renamed:])


@pytest.mark.slow
@pytest.mark.parametrize("content", slow_but([""], ["", '{"status": "finished", "overrides": 3}']))
def test_an_unreadable_summary_counts_as_not_finished(content: str, tmp_path: Path) -> None:
    request = [*QUICK, SINGLE, "-m", f"hydra.sweep.dir={tmp_path / 'sweep'}", "seed=1"]
    ddp_recipes.run(request)
    path = tmp_path / "sweep" / "0" / "summary.json"
    path.write_text(content)
    (again,) = ddp_recipes.run(request)
    assert (again["status"], json.loads(path.read_text())["status"]) == ("finished", "finished")


# --- file systems ----------------------------------------------------------------------------------------------------


@pytest.fixture
def exfat(tmp_path: Path) -> Iterator[Path]:
    """A folder on exFAT, which has no hard links."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("mkfs.exfat", "mount.exfat-fuse", "losetup"))):
        pytest.skip("takes root, exfatprogs and exfat-fuse, to make and mount a file system without hard links")
    image, folder = tmp_path / "image", tmp_path / "exfat"
    image.touch()
    os.truncate(image, 64 << 20)
    folder.mkdir()
    subprocess.run(["mkfs.exfat", image], check=True, capture_output=True)
    device = subprocess.run(["losetup", "-f", "--show", image], capture_output=True, text=True).stdout.strip()
    if not device or subprocess.run(["mount.exfat-fuse", device, folder], capture_output=True).returncode != 0:
        pytest.skip("this machine mounts no file of its own")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
        subprocess.run(["losetup", "-d", device], check=True)


def test_a_file_system_without_hard_links_will_do(exfat: Path, run: Run) -> None:
    (exfat / "file").touch()
    with pytest.raises(PermissionError):
        os.link(exfat / "file", exfat / "link")
    first = run(SINGLE, directory=exfat / "run")
    assert {"last.pt", "best.pt"} < set(os.listdir(exfat / "run" / "checkpoints"))
    again = run(SINGLE, "ckpt_path=auto", "trainer.max_epochs=3", directory=exfat / "run")
    assert (first["global_step"], again["global_step"]) == (16, 24)
    assert again["weights_sha256"] == run(SINGLE, "trainer.max_epochs=3")["weights_sha256"]
