"""Which collectives a piece of code calls.

torch documents ``TorchDispatchMode`` by this name; there is no public way for it.
"""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class OnCollective(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``found`` with the name of each collective of ``torch.distributed`` before it runs."""

    def __init__(self, found: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.found(func.name())
        return func(*args, **(kwargs or {}))
