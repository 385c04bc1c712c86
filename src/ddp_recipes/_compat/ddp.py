"""What ``DistributedDataParallel`` loads when it is first made, and what it leaves alone."""

from collections.abc import Collection
from contextlib import suppress
from functools import cache

from torch import nn


def load_what_ddp_needs() -> None:
    """Load ``torch._dynamo``, which takes a second: once before ranks are forked. Without it each rank loads its own.

    The public name, ``torch.compiler``, does not load it.
    """
    with suppress(ModuleNotFoundError):
        import torch._dynamo  # noqa: F401


@cache
def compile_nothing_of(*modules: str) -> None:
    """Have ``torch.compile`` leave the functions of these modules, and of packages all below, to Python.

    It looks at all that runs while a compiled model does, hooks too, and warns of what it cannot trace in them.
    """
    from torch._dynamo import trace_rules

    for name in modules:
        trace_rules.add(name)


def ignored_by_ddp(module: nn.Module) -> Collection[str]:
    """Return the names of the parameters and buffers that its user has told DDP to leave to each rank."""
    names: Collection[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return names
