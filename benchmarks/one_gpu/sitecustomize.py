"""Several ranks on one GPU, over NCCL, which takes the ranks for as many machines: for tests where no others are.

With this folder on ``PYTHONPATH`` and ``ONE_GPU_RANKS=4`` in the environment a run finds four GPUs, each of which is
the first one. NCCL refuses two ranks on one GPU of a machine, and tells machines apart by ``NCCL_HOSTID``; it then goes
by way of sockets. What is tried so is what ranks say to each other and how they end: it says nothing about speed.
"""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

DEVICES = "ddp_recipes.devices"
RANKS = int(os.environ.get("ONE_GPU_RANKS", "0"))
NCCL = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


def share(module: Any) -> None:
    """Have a module that asks for devices find the first GPU several times."""
    known, use = module.known_to_torch, module.use

    def known_to_torch(asked: str) -> Any:
        found = known(asked)
        return module.of_gpus(RANKS) if found.type == module.GPU else found

    def used(kind: str, first: int, count: int) -> Any:
        os.environ.update(NCCL, NCCL_HOSTID=f"one-gpu-{first}")
        return use(kind, 0, 1) * count

    module.known_to_torch, module.use = known_to_torch, used
    module._of_driver = lambda: RANKS
    module.identity = lambda device: ""


class Finder:
    """Finds that module, and changes it once it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != DEVICES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                share(module)

            loader.exec_module = exec_module
        return spec


if RANKS:
    sys.meta_path.insert(0, Finder())
