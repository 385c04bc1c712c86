"""A user's own models, each with one fault. Tests copy this file to the folder that a run is started from."""

import ctypes
import fcntl
import logging
import os
import signal
import sys
import threading
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddp_recipes.callbacks import Callback
from ddp_recipes.loggers import Logger
from ddp_recipes.models import Toy
from ddp_recipes.strategies import DDP, DDPSettings

RANK = int(os.environ.get("RANK", "0"))


class Slow(Toy):
    """Takes its time for each batch, so that a run can be disturbed; stands as long as there is a file ``hold``."""

    def __init__(self, sleep_s: float = 0.005, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.sleep_s = sleep_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.sleep_s)
        while Path("hold").exists():
            time.sleep(0.01)
        return super().forward(x)


class SlowToValidate(Toy):
    """Takes its time for each batch of a validation, and says when it has begun with one."""

    def __init__(self, sleep_s: float, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.sleep_s = sleep_s

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.sleep_s:
            Path(f"validates_{RANK}").touch()
            time.sleep(self.sleep_s)
        return super().forward(x)


class OneByOne(Dataset[tuple[Tensor, Tensor]]):
    """Random samples for data workers."""

    def __init__(self) -> None:
        self.inputs, self.targets = torch.randn(64, 10), torch.randn(64, 5)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.005)
        return self.inputs[index], self.targets[index]


class Stuck(Toy):
    """Takes a minute for a batch, and says when it has begun with it."""

    def forward(self, x: Tensor) -> Tensor:
        Path(f"begun_{RANK}").touch()
        time.sleep(60)
        return super().forward(x)


class InOneCall(Toy):
    """Trains in a single call of torch's, in which no handler of Python's runs, from SIGTSTP until SIGCONT."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not Path(f"begun_{RANK}").exists():
            called, (read_end, write_end) = torch.futures.Future[None](), os.pipe()
            os.set_blocking(write_end, False)
            signal.set_wakeup_fd(write_end)

            def follow() -> None:
                while (number := os.read(read_end, 1)[0]) != signal.SIGCONT:
                    Path(f"got_{number}_{RANK}").touch()
                called.set_result(None)

            threading.Thread(target=follow, daemon=True).start()
            Path(f"begun_{RANK}").touch()
            called.wait()
        return super().forward(x)


class Deserter(Callback):
    """Has rank 0 leave once training is over, when nobody waits for it in a collective."""

    def on_end(self) -> None:
        if RANK == 0:
            os._exit(0)


class Sleeper(Callback):
    """Has one rank sleep once training is over, in ``on_end`` or when its output is closed."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def on_end(self) -> None:
        Path(f"ended_{RANK}").touch()
        if self.rank == RANK:
            time.sleep(600)


class NeverCloses(Logger):
    """Sleeps when it is closed, once training is over on all ranks."""

    def close(self) -> None:
        Path("closes").touch()
        time.sleep(600)


def hold() -> None:
    """Have rank 0 say that it waits, and wait until another file is there."""
    if RANK == 0:
        Path("held").touch()
        while not Path("attacked").exists():
            time.sleep(0.01)


class HeldWhileMade(Toy):
    """Is made once it may go on."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        hold()


class HeldInSave(Callback):
    """Waits as a checkpoint is saved."""

    def on_save_start(self, step: int) -> None:
        hold()


class HeldAtEnd(Callback):
    """Waits once training is over."""

    def on_end(self) -> None:
        hold()


class Loud(Slow):
    """Logs a warning for each batch."""

    def forward(self, x: Tensor) -> Tensor:
        logging.getLogger(__name__).warning("another batch")
        return super().forward(x)


def stop_with_the_store() -> None:
    """Stop rank 1 as if it had just locked the file that the ranks meet in, for one of its messages."""
    if RANK != 1:
        return
    files = [path for path in Path("/proc/self/fd").iterdir() if os.path.lexists(path)]
    meeting = next(path for path in files if os.readlink(path).startswith("/memfd:ddp_recipes"))
    fcntl.flock(os.open(meeting, os.O_RDWR), fcntl.LOCK_EX)
    Path("stopped").touch()
    os.kill(os.getpid(), signal.SIGSTOP)


class StopsWhileMade(Toy):
    """Is stopped with the store before ranks have agreed."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        stop_with_the_store()


class StopsWhileJoining(DDP):
    """Is stopped with the store before it joins the process group."""

    def setup(self, *arguments: Any) -> None:
        stop_with_the_store()
        super().setup(*arguments)


class StopsWhileJoiningSettings(DDPSettings):
    """As those of DDP."""

    name = "stops_while_joining"


class JoinsLate(DDP):
    """Has rank 1 join the process group once a file is there."""

    def setup(self, *arguments: Any) -> None:
        while RANK == 1 and not Path("attacked").exists():
            time.sleep(0.01)
        super().setup(*arguments)


class JoinsLateSettings(DDPSettings):
    """As those of DDP."""

    name = "joins_late"


class EndsLate(DDP):
    """Waits once its ranks have exchanged all, as it leaves the group."""

    def teardown(self) -> None:
        hold()
        super().teardown()


class EndsLateSettings(DDPSettings):
    """As those of DDP."""

    name = "ends_late"


class StopsWhileTraining(Callback):
    """Is stopped with the store at the end of an epoch."""

    def on_epoch_end(self, epoch: int) -> None:
        stop_with_the_store()


class Faulty(Toy):
    """Does ``what`` in the third training batch on one rank."""

    def __init__(self, what: str, rank: int, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.what, self.rank, self.batches = what, rank, 0

    def forward(self, x: Tensor) -> Tensor:
        self.batches += self.training
        if self.batches == 3 and self.rank == RANK:
            self.fail()
        return super().forward(x)

    def fail(self) -> None:
        """Fail as told."""
        match self.what:
            case "raise":
                raise ValueError("the cat sat on the keyboard")
            case "exit":
                os._exit(0)
            case "sys.exit":
                sys.exit(0)
            case "breakpoint":
                breakpoint()
            case "segfault":
                ctypes.string_at(0)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)


class Unbuildable(Toy):
    """Cannot be made on one rank."""

    def __init__(self, rank: int, **sizes: Any) -> None:
        super().__init__(**sizes)
        if rank == RANK:
            raise ValueError("the cat sat on the blueprint")


class Deserted(Toy):
    """Ends its process while it is made, on one rank."""

    def __init__(self, rank: int, **sizes: Any) -> None:
        super().__init__(**sizes)
        if rank == RANK:
            os._exit(0)


class Huge(Toy):
    """Takes a minute to be made."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        time.sleep(60)


class Secretive(Toy):
    """Is of no use without the right token, which it must not give away."""

    def __init__(self, token: str, digest: str, **sizes: Any) -> None:
        super().__init__(**sizes)
        assert sha256(token.encode()).hexdigest() == digest
        print(f"rank {RANK} has the token", flush=True)
