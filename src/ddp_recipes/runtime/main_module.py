"""Classes and functions of a script or a notebook's cell, ``__main__``: other processes have another ``__main__``."""

import re
import sys
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

from ddp_recipes.errors import RequestError


def pack(config: Mapping[str, Any]) -> str:
    """Return what a config names of ``__main__``, as text that :func:`unpack` takes; empty if it names nothing.

    Raises:
        RequestError: it cannot be sent to other processes.
    """
    main, names = sys.modules["__main__"], sorted(set(re.findall(r"'__main__\.(\w+)", repr(config))))
    objects = {name: getattr(main, name) for name in names if hasattr(main, name)}
    if not objects:
        return ""
    import cloudpickle

    try:
        return b64encode(cloudpickle.dumps(objects)).decode()
    except Exception as error:  # whatever a class of a user's refers to may raise
        raise RequestError(
            f"{', '.join(f'__main__.{name}' for name in objects)} cannot be sent to the other processes ({error}). Put "
            f"it into a file: %%writefile my_model.py as the first line of a notebook's cell writes one, and "
            f"my_model.{names[0]} is then its name. Or use launcher.nproc_per_node=1."
        ) from error


def unpack(text: str) -> None:
    """Put into this process's ``__main__`` what it does not have."""
    if text:
        import cloudpickle

        main = sys.modules["__main__"]
        for name, value in cloudpickle.loads(b64decode(text)).items():
            if not hasattr(main, name):
                setattr(main, name, value)
