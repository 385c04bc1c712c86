"""A module with a callback that counts where a rank waits for its simulated accelerator, and writes it to a file."""

COUNTING = """
import os
import traceback
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddp_recipes import Callback

READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "_assert_async")


def on_device(values):
    return any(isinstance(each, torch.Tensor) and each.device.type == "openreg" for each in tree_leaves(values))


def is_a_copy(result, args, kwargs):
    return isinstance(result, torch.Tensor) and result.is_cpu and not (kwargs.get("non_blocking") or True in args[2:])


def is_sent(result, args, kwargs):
    # From memory that is not page-locked, or asked to: torch waits until the device has the copy.
    source = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else args[0] if args else None
    if not (isinstance(source, torch.Tensor) and source.is_cpu and source.dim() and on_device(result)):
        return False
    return not (source.is_pinned() and (kwargs.get("non_blocking") or True in args[2:]))


class Waits(TorchDispatchMode):
    def __init__(self):
        self.places = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        sent = name in ("_to_copy", "copy_") and is_sent(result, args, kwargs or {})
        if sent or on_device(args) and (name in READS or is_a_copy(result, args, kwargs or {})):
            frames = [frame for frame in traceback.extract_stack() if "_dispatch" not in frame.filename]
            if not any(frame.filename.endswith("openreg_device.py") for frame in frames):  # the group's own copies
                if any(frame.name == "reason" and frame.filename.endswith("cadence.py") for frame in frames):
                    return result
                own = [frame for frame in frames if "ddp_recipes" in frame.filename] or frames
                self.places[f"{name} at {own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}"] += 1
        return result


class Counting(Callback):
    def __init__(self, first, last):
        self.first, self.last, self.waits = first, last, Waits()

    def on_step(self, step):
        if step == self.first:
            self.waits.__enter__()
        if step == self.last:
            self.waits.__exit__(None, None, None)
            own = Path(__file__).with_name(f"waits_{os.environ.get('RANK', 0)}")  # two prints at once mix
            with own.open("w") as file:
                for place, count in self.waits.places.items():
                    print(count, place, file=file)
"""
