"""What ``DistributedDataParallel`` loads when it is first made."""

from contextlib import suppress


def load_what_ddp_needs() -> None:
    """Load ``torch._dynamo``, which takes a second: once before ranks are forked. Without it each rank loads its own.

    The public name, ``torch.compiler``, does not load it.
    """
    with suppress(ModuleNotFoundError):
        import torch._dynamo  # noqa: F401
