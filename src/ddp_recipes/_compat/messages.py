"""What only the wording of an error of torch or Hydra tells: neither has a type or an attribute for it.

Where another version words it differently, each of these says no, and the error is shown as it is.
"""

import re
from traceback import walk_tb

# Where nothing is exchanged.
_FETCHING = ("ddp_recipes.data.keyed", "ddp_recipes.data.loader", "ddp_recipes.data.one_by_one", "torch.utils.data")


def text_of(error: BaseException) -> str:
    """Return what an error says; nothing where its class fails to."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a user's __str__ may raise anything
        return ""


def timed_out(error: BaseException) -> bool:
    """Whether a collective or the store timed out: torch's ``RuntimeError`` says so in several ways."""
    text = r"timeout|\btimed?[ -]out\b"  # not "runtime output"
    if not isinstance(error, RuntimeError) or re.search(text, text_of(error), re.IGNORECASE) is None:
        return False
    return not _of_data(error)


def _of_data(error: BaseException) -> bool:
    """Whether an error came of a data set or a data worker, which may wait for a server of their own."""
    names = (str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__))
    return any(name.startswith(_FETCHING) for name in names)


def lost_a_rank(error: BaseException) -> bool:
    """Whether an error of a collective comes of another rank, which has exited, is stopped or was cut off."""
    if type(error).__name__ == "DistBackendError":  # NCCL's, which from torch 2.15 on are plain ones
        return True
    text = r"third_party/gloo|gloo/transport|Connection (closed|reset|refused)|Broken pipe"
    text += r"|NCCL (communicator was aborted|Async Error|\w+ failed)"
    closed = isinstance(error, RuntimeError) and re.search(text, text_of(error)) is not None
    return timed_out(error) or (closed and not _of_data(error))


def out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory for a tensor: on a GPU it has a type, which is not imported here; on a CPU none."""
    text = r"can't allocate memory|not enough memory|_STATUS_ALLOC_FAILED"
    return type(error).__name__ in ("OutOfMemoryError", "MemoryError") or re.search(text, text_of(error)) is not None


def address_in_use(error: BaseException) -> bool:
    """Whether a ``TCPStore`` could not listen because its port is taken."""
    return "EADDRINUSE" in str(error)


def without_gradient(error: BaseException) -> list[int]:
    """Return the numbers of the parameters that ``DistributedDataParallel`` got no gradients of."""
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
    return [int(index) for index in found[1].split()] if found else []


def of_sparse(error: BaseException) -> bool:
    """Whether an operation got a sparse tensor, and cannot take it."""
    text = r"Sparse(CPU|CUDA|TensorImpl)|sparse tensor|sparse\.\w+Tensor"
    return isinstance(error, RuntimeError) and re.search(text, str(error), re.IGNORECASE) is not None


def refused_global(error: BaseException) -> str | None:
    """Return the class or function that ``torch.load(weights_only=True)`` refused: ``GLOBAL module.name``."""
    found = re.search(r"GLOBAL [\w.]+", str(error))
    return found[0] if found else None


def unknown_override(error: BaseException) -> str | None:
    """Return the key that Hydra could not override or delete."""
    found = re.search(r"Could not (?:override|delete)(?!.* value of)[^']*'([^']+)'", str(error))
    return found[1] if found else None


def added_twice(error: BaseException) -> str | None:
    """Return the key or group that ``+`` was to add, and that is there already."""
    said = r"An item is already at '([^']+)'|Multiple values for ([\w/@.]+\w)|(\w+) appears more than once in the final"
    found = re.search(said, str(error))
    return found[found.lastindex or 0] if found else None


def null_that_was_merged_into(error: BaseException) -> str | None:
    """Return the key of a null that OmegaConf was to put keys into, which it says of its own list of them."""
    found = re.search(r"'NoneType' object has no attribute 'get'(?s:.*)full_key: (\S+)", str(error))
    if "Unexpected type for root: NoneType" in str(error):  # which names none: the one null of Hydra's that holds keys
        return "hydra.sweeper.params"
    return found[1] if found else None


def config_of_error(error: BaseException) -> str | None:
    """Return the config, as in a defaults list, whose composing failed."""
    found = re.match(r"In '([^']+)'", str(error))
    return found[1] if found else None


def is_about_a_choice(error: BaseException) -> bool:
    """Whether Hydra refused the type of what a group was to be."""
    return re.search("group override (must be|deletion value)", str(error)) is not None


def without_search_path(error: BaseException) -> str:
    """Return Hydra's message about a missing primary config without the list of places where it looked."""
    return str(error).split("Config search path")[0].strip()


def missing_interpolation_key(error: BaseException) -> str | None:
    """Return the key that an interpolation names and no config has."""
    found = re.search(r"key '([^']*)'", str(error))
    return found[1] if found else None


def shortened(error: BaseException) -> str:
    """Return what Hydra says about a target in one line: why it cannot be found, or the first sentence about it."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("full_key")]
    if isinstance(error, ImportError) and lines:
        return lines[-1]
    return re.split(r"\.\s|\.$|, set env", " ".join(lines))[0] + "."
