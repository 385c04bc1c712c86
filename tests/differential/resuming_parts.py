"""What recipes of ``test_resuming.py`` and ``test_replacing.py`` name."""

import os
import signal
from pathlib import Path
from threading import Timer
from typing import Any

import torch
from torch import nn

from ddp_recipes import Callback


class Stopping(Callback):
    """Ends the run after a step on one rank: ``STOPS="<step> <rank> raise"``, or the name of a signal."""

    def on_step(self, step: int) -> None:
        at, rank, how = os.environ.get("STOPS", "-1 0 raise").split()
        if step == int(at) and self.run.world.rank == int(rank):
            if how == "raise":
                raise ArithmeticError("stopped here")
            os.kill(os.getpid(), getattr(signal, how))


class Losing(Callback):
    """Ends the processes of ranks, each once, at the first such event from a step on; "backward" is one as well.

    ``LOSES="<step> <rank> <event> <how>; …"``: by ``raise``, by a signal, or by SIGKILL so many milliseconds later.
    """

    def __init__(self) -> None:
        for number, loss in enumerate(os.environ.get("LOSES", "").split(";")):
            at, rank, event, how = loss.split() or ("-1", "-1", "on_step", "raise")
            if rank == os.environ["RANK"] and not Path(f"lost_{number}").exists():
                setattr(self, event, self._lost(Path(f"lost_{number}"), int(at), how))

    def on_start(self, directory: Path | None, task: nn.Module) -> None:
        if backward := vars(self).get("backward"):
            first: Any = next(iter(task.modules()))
            first.model.register_full_backward_pre_hook(lambda *_: backward())

    def _lost(self, mark: Path, at: int, how: str) -> Any:
        def lose(*_: Any) -> None:
            if self.run.cursor.step >= at and not mark.exists():
                mark.touch()
                if how == "raise":
                    raise ArithmeticError("stopped here")
                later = Timer(int(how) / 1000, os.kill, [os.getpid(), signal.SIGKILL]) if how.isdigit() else None
                if later is None:
                    os.kill(os.getpid(), getattr(signal, how))
                else:
                    later.daemon = True
                    later.start()

        return lose


class Leaky(nn.Module):
    """A leaky ReLU whose slope is learned: a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.relu() - self.slope * (-inputs).relu()


class Deep(nn.Sequential):
    """Blocks with dropout and normalisation: those of batches or of layers."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int, norm: str = "layer") -> None:
        kind, width = nn.BatchNorm1d if norm == "batch" else nn.LayerNorm, hidden_features
        blocks = [nn.Sequential(nn.Linear(width, width), kind(width), Leaky(), nn.Dropout(0.2)) for _ in range(3)]
        super().__init__(nn.Linear(in_features, width), *blocks, nn.Linear(width, out_features))


class Counting(nn.Module):
    """A block with a running mean in a parameter that is not trained, which its forward pass writes to."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(features, features), nn.Parameter(torch.zeros(features), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.layer(inputs)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(torch.ones_like(self.mean), 0.1)  # alike on all ranks: ddp takes rank 0's on a resume
        return outputs - self.mean


class Counted(nn.Sequential):
    """Two such blocks."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        ends = nn.Linear(in_features, hidden_features), nn.Linear(hidden_features, out_features)
        super().__init__(ends[0], Counting(hidden_features), Counting(hidden_features), ends[1])


class Teacher(nn.Module):
    """A student and a moving average of it, which the student's forward pass updates (Tarvainen, Valpola, 2017)."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__()
        self.student, self.teacher = (Deep(in_features, hidden_features, out_features) for _ in range(2))
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "Teacher":
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                for mean, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    mean.lerp_(new, 0.2)
        return self.student(inputs) + 0.1 * self.teacher(inputs)
