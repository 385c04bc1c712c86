"""Feed damaged and hostile files to what reads files: ``python tests/security/fuzz.py 100000 [seed]``.

Each input is a real file or text, changed at random places, or put together again around changed parts so that its
checksums are right. What reads it returns, or raises the one error that it names; nothing is run, started or connected.
"""

import io
import json
import pickle
import pickletools
import random
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.append(str(Path(__file__).parents[1]))  # for helpers, as pytest does

from ddp_recipes.build.instantiate import make
from ddp_recipes.checkpointing.files import content_of
from ddp_recipes.checkpointing.reading import load
from ddp_recipes.config.request import Request
from ddp_recipes.errors import RequestError
from ddp_recipes.launchers.worker import RankReport
from ddp_recipes.reporting.run_directory import read_summary
from ddp_recipes.reporting.sweep import finished_before, report
from ddp_recipes.testing import make_job
from helpers import security_files

ACTS = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.Popen",
    "socket.connect",
    "pty.spawn",
)
ODD = (
    b"\0",
    b"\xff" * 8,
    b"../" * 4,
    b"\x1b[2J",
    b"\n",
    b"c",
    b"R",
    b".",
    b"\x80\x04",
    b"1e999",
    b"null",
    b"[",
    b'{"',
    b"}",
)
WORDS = (
    None,
    True,
    -1,
    0,
    1,
    2**63,
    10**400,
    1.5,
    float("nan"),
    "",
    "os.system",
    "../../x",
    "${oc.env:HOME}",
    "\x1b[2J",
    [],
    {},
)
TARGETS = (
    "os.system",
    "builtins.exec",
    "torch.load",
    "torch.hub.load",
    "joblib.load",
    "pickle.loads",
    "own.x",
    "a..b",
    ".",
    "",
)

_acted: list[str] = []
_watching = False


def _watch(event: str, arguments: Any) -> None:
    if _watching and event in ACTS:
        _acted.append(f"{event} {arguments}")


sys.addaudithook(_watch)


def changed(content: bytes, chance: random.Random) -> bytes:
    """Return bytes with a few places changed: flipped, cut out, said twice, replaced by something odd."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at = chance.randrange(len(data) + 1)
        end = min(len(data), at + chance.choice((1, 2, 8, 64, 1024)))
        match chance.randrange(5):
            case 0:
                data[at:end] = chance.randbytes(end - at)
            case 1:
                del data[at:end]
            case 2:
                data[at:at] = data[at:end]
            case 3:
                data[at:at] = chance.choice(ODD)
            case 4:
                data[at:end] = chance.choice(ODD)
    return bytes(data)


def replaced(value: Any, chance: random.Random, rate: float = 0.06) -> Any:
    """Return nested plain data in which a few values are others, or gone."""
    if chance.random() < rate:
        return chance.choice(WORDS)
    if isinstance(value, dict):
        kept = {name: one for name, one in value.items() if chance.random() > rate / 3}
        named = {str(name) if chance.random() > rate / 3 else "_target_": one for name, one in kept.items()}
        return {
            name: chance.choice(TARGETS)
            if name == "_target_" and chance.random() < 0.2
            else replaced(one, chance, rate)
            for name, one in named.items()
        }
    if isinstance(value, list):
        return [replaced(one, chance, rate) for one in value]
    return value


class Fuzz:
    """Inputs of each kind, and what reads them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.chance = folder, random.Random(seed)
        self.witness = folder / "witness"
        self.weights = {"net.weight": torch.arange(12.0).reshape(3, 4), "net.bias": torch.zeros(3)}
        self.state = {
            "model": self.weights,
            "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
            "scheduler": {"last_epoch": 1},
            "checkpointer": {"values": {"1": 0.5}},
            "callbacks": {},
            "precision": {},
            "cursor": {"epoch": 0, "batch": 1, "step": 1, "samples_seen": 8},
            "metrics": {"val/loss": 0.5},
        }
        memory = io.BytesIO()
        torch.save(content_of(self.state), memory)
        self.checkpoint = memory.getvalue()
        torch.save(self.weights, memory := io.BytesIO())
        self.plain = memory.getvalue()
        from safetensors.torch import save

        self.safetensors = save(self.weights)
        self.summary = {
            "status": "finished",
            "overrides": ["seed=1"],
            "objective": 0.5,
            "wall_time_s": 1.0,
            "error": None,
        }
        job = make_job(["strategy=single"], folder / "run")
        self.config: dict[str, Any] = dict(job.config)
        self.kinds: tuple[Callable[[], str], ...] = (
            self.a_checkpoint,
            self.a_checkpoint_with_right_checksums,
            self.weights_of_others,
            self.a_summary,
            self.a_report,
            self.a_config,
        )

    def a_checkpoint(self) -> str:
        """Read a checkpoint whose bytes are changed."""
        return self._load(changed(self._hostile() or self.checkpoint, self.chance))

    def a_checkpoint_with_right_checksums(self) -> str:
        """Read one that is put together again around a changed pickle, or of changed values."""
        if self.chance.random() < 0.5:
            memory = io.BytesIO()
            try:
                torch.save(replaced(content_of(self.state), self.chance), memory)
            except (TypeError, OverflowError):
                return "not made"
            return self._load(memory.getvalue())
        memory = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(self.checkpoint)) as old, zipfile.ZipFile(memory, "w") as new:
            for name in old.namelist():
                content = old.read(name)
                if name.endswith("data.pkl"):
                    content = (
                        self._other_opcodes(content) if self.chance.random() < 0.5 else changed(content, self.chance)
                    )
                elif self.chance.random() < 0.1:
                    content = changed(content, self.chance)
                new.writestr(name, content)
        return self._load(memory.getvalue())

    def _other_opcodes(self, content: bytes) -> bytes:
        """Return a pickle with an opcode replaced, or a call of something forbidden put in."""
        places = [at for _, _, at in pickletools.genops(content) if at is not None]
        at = self.chance.choice(places)
        call = b"c" + self.chance.choice((b"os\nsystem", b"builtins\neval", b"posix\nsystem")) + b"\n(X\4\0\0\0echotR"
        return content[:at] + self.chance.choice((call, b"0", b"2", b"}", b"]", b"(")) + content[at:]

    def weights_of_others(self) -> str:
        """Read changed weights to start from: a state dict, a pickle, safetensors."""
        from ddp_recipes.checkpointing.weights import matching

        suffix = self.chance.choice((".ckpt", ".pt", ".safetensors"))
        whole = self.safetensors if suffix == ".safetensors" else self.plain
        path = self.folder / f"weights{suffix}"
        path.write_bytes(changed(self._hostile() or whole, self.chance))
        return self._refused_or(lambda: matching(str(path), self.weights))

    def a_summary(self) -> str:
        """Read a changed summary.json as a sweep does that is called again."""
        job = self.folder / "sweep" / "0"
        job.mkdir(parents=True, exist_ok=True)
        text = json.dumps(replaced(self.summary, self.chance, 0.03)).encode()
        (job / "summary.json").write_bytes(changed(text, self.chance) if self.chance.random() < 0.7 else text)
        with redirect_stdout(io.StringIO()) as out:
            report(job.parent, out)
        assert "\x1b" not in out.getvalue(), "an escape sequence"
        found = self._refused_or(lambda: finished_before(job, ["seed=1"]))
        return "none" if read_summary(job) is None else found

    def a_report(self) -> str:
        """Read a changed report of a rank, as text and as a file."""
        from ddp_recipes.launchers.slurm.task import Attempt, read_reports, write_report

        attempt, folder = Attempt("1", 0), self.folder / "slurm"
        write_report(folder, attempt, RankReport.of_error(0, ValueError("no")))
        path = folder / "rank_0.json"
        entry = json.loads(path.read_text())
        entry["report"] = json.dumps(replaced(json.loads(entry["report"]), self.chance, 0.02))
        path.write_bytes(
            changed(json.dumps(entry).encode(), self.chance)
            if self.chance.random() < 0.5
            else json.dumps(entry).encode()
        )
        return "read" if read_reports(folder, attempt) else "none"

    def a_config(self) -> str:
        """Check a changed config, as text of YAML or as data, and make its loss."""
        config = replaced(self.config, self.chance, rate=0.004)
        if self.chance.random() < 0.3:
            try:
                config = yaml.safe_load(changed(yaml.safe_dump(config).encode(), self.chance))
            except (yaml.YAMLError, ValueError, RecursionError):
                return "no YAML"
        if not isinstance(config, dict):
            return "no config"
        if isinstance(config.get("task"), dict) and isinstance(config["task"].get("loss"), dict):
            return self._refused_or(lambda: (Request.of(config), make(config["task"]["loss"], "task.loss")))
        return self._refused_or(lambda: Request.of(config))

    def _hostile(self) -> bytes | None:
        kind = self.chance.randrange(12)
        header = {"net.weight": {"dtype": "F32", "shape": [3, 2**40], "data_offsets": [0, 2**60]}}
        return {
            0: lambda: security_files.pickled(self.witness),
            1: lambda: security_files.checkpoint(self.witness),
            2: lambda: pickle.dumps(self.summary),
            3: lambda: security_files.safetensors(header, bytes(48)),
            4: lambda: security_files.safetensors({}, length=self.chance.getrandbits(64)),
        }.get(kind, lambda: None)()

    def _load(self, content: bytes) -> str:
        path = self.folder / "step_00000001.pt"
        path.write_bytes(content)
        return self._refused_or(lambda: load(path))

    def _refused_or(self, read: Callable[[], object]) -> str:
        try:
            read()
        except RequestError as error:
            return "refused" if str(error).strip() else "refused without a word"
        return "read"


@contextmanager
def watched() -> Iterator[None]:
    """Watch for anything that is run, started or connected."""
    global _watching
    _acted.clear()
    _watching = True
    try:
        yield
    finally:
        _watching = False


def fuzz(count: int, seed: int, folder: Path) -> dict[str, Counter[str]]:
    """Feed so many inputs; return how many of each kind were read and refused.

    Raises:
        AssertionError: something raised another error, or ran; names the input's number.
    """
    torch.set_num_threads(1)
    inputs = Fuzz(folder, seed)
    came: dict[str, Counter[str]] = {kind.__name__: Counter() for kind in inputs.kinds}
    for number in range(count):
        kind = inputs.kinds[number % len(inputs.kinds)]
        try:
            with watched():
                came[kind.__name__][kind()] += 1
        except Exception as error:
            raise AssertionError(
                f"input {number} of seed {seed}, {kind.__name__}: {type(error).__name__}: {error}"
            ) from error
        assert "refused without a word" not in came[kind.__name__], f"input {number} of seed {seed}, {kind.__name__}"
        assert not _acted, f"input {number} of seed {seed}, {kind.__name__}: {_acted}"
        assert not inputs.witness.exists(), f"input {number} of seed {seed}, {kind.__name__}: a pickle was run"
    return came


if __name__ == "__main__":
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    warnings.simplefilter("ignore")  # torch's on other pickle protocols
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        for name, outcomes in fuzz(count, seed, Path(temporary)).items():
            print(f"{name:36}", ", ".join(f"{how} {number:,}" for how, number in sorted(outcomes.items())))
    print(f"{count:,} inputs of seed {seed} in {time.monotonic() - began:.0f} s: no crash, nothing run")
