"""How a checkpoint is read: verified at every load."""

import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ddp_recipes.checkpointing.files import FORMAT, LAST, DamagedParts, State, hint, is_index
from ddp_recipes.checkpointing.writing import reason_of
from ddp_recipes.errors import RecipeError, RequestError
from ddp_recipes.runtime.tensors import Source

Verify = Callable[[Sequence[Callable[[], str | None]]], Sequence[str | None]]

_KINDS: dict[str, type] = {
    **dict.fromkeys(("checkpointer", "metrics", "optimizer", "precision", "scheduler"), dict),
    **dict.fromkeys(("more_optimizers", "more_schedulers"), list),
    **dict.fromkeys(("global_batch_size", "seed", "world_size"), int),
}


class DamagedCheckpoint(RequestError):
    """A file that is no whole checkpoint. The message also says what else is in its folder; ``reason`` only why."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)  # from which another process unpickles it
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path} is damaged or no checkpoint: {self.reason}. {hint(self.path.parent)}"


def verify_here(checks: Sequence[Callable[[], str | None]]) -> list[str | None]:
    """Return what checks of parts return, which are all made in this process."""
    return [check() for check in checks]


def load(path: Path, verify: Verify = verify_here, readers: int = 0) -> State:
    """Return the state in a checkpoint, verified: tensors and plain data only, nothing in it is run.

    It has a ``checksum``, too, which copies of a file have in common. What ranks had rows of is a ``Source``.

    Args:
        verify, readers: as :func:`ddp_recipes.checkpointing.parts.load`.

    Raises:
        DamagedCheckpoint: it is damaged, or no checkpoint of ours.
        RequestError: it is not there, or of a newer format.
        RunFailed: a rank that was to verify a part of it does not answer.
    """
    if path.exists() and not path.is_file():  # to open a pipe would wait for ever
        raise DamagedCheckpoint(path, "it is no regular file")
    try:
        if is_index(path):
            from ddp_recipes.checkpointing import parts

            return _checked(path, parts.load(path, verify, readers), parts.FORMAT)
        refuse_odd_zip(path)
        with zipfile.ZipFile(path) as archive:  # torch does not look at its checksums
            if record := archive.testzip():
                raise DamagedCheckpoint(path, f"its content does not match its checksum ({record})")
            checksum = f"{zlib.crc32(repr([(each.filename, each.CRC) for each in archive.infolist()]).encode()):08x}"
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise RequestError(f"There is no checkpoint {path}. {hint(path.parent)}") from None
    except RecipeError:  # of ranks that were to verify parts, too: the files may be whole
        raise
    except DamagedParts as error:
        raise DamagedCheckpoint(path, str(error)) from None
    except Exception as error:  # a damaged file can fail in any way in the unpickler
        raise DamagedCheckpoint(
            path, f"it cannot be read, or holds more than tensors and plain data ({reason_of(error)})"
        ) from error
    return {**_checked(path, state, FORMAT), "checksum": checksum}


def _checked(path: Path, state: Any, newest: int) -> State:
    """Return what is in a file, if a run of ours wrote it so."""
    if not isinstance(state, dict) or type(state.get("format")) is not int:
        raise DamagedCheckpoint(
            path, "it has not the format of ddp_recipes (weights alone, of any program, are given as weights_from)"
        )
    if state["format"] > newest:
        raise RequestError(
            f"{path} has format {state['format']}, this version reads up to {newest}: update ddp_recipes."
        )
    if (misfit := _misfit(state)) is not None:
        raise DamagedCheckpoint(path, misfit)
    return state


_FOLDER = 0x10  # in the attributes of MS-DOS, https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT 4.4.15


def refuse_odd_zip(path: Path) -> None:
    """Refuse a zip file that unpacks to more than it takes, or has a record that is marked as a folder.

    torch writes none. It reads the first one into memory, and in the place of the other one what is in memory: the
    mark is one bit, which no checksum covers.

    Raises:
        ValueError: it is one.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
        if sum(record.file_size for record in records) > path.stat().st_size:
            raise ValueError("it unpacks to more than it takes, as no checkpoint does")
        for record in records:
            if record.external_attr & _FOLDER:
                raise ValueError(f"its record {record.filename} is marked as a folder")


def _misfit(state: State) -> str | None:
    """Return what in a file is not as a run writes it, where the run could not say so itself."""
    weights, cursor = state.get("model"), state.get("cursor", {})
    if not isinstance(weights, dict):
        return "it has no weights"
    for name, value in weights.items():
        is_tensor = isinstance(value, (torch.Tensor, Source))
        if not isinstance(name, str) or not (is_tensor or name.endswith("_extra_state")):
            return f"its weight {name} is a {type(value).__name__}, no tensor"
    counts = ("epoch", "batch", "step", "samples_seen")
    if not isinstance(cursor, dict) or any(type(cursor.get(name, 0)) is not int for name in counts):
        return f"its cursor is {cursor}, no whole numbers"
    for name, kind in _KINDS.items():
        if not isinstance(state.get(name, kind()), kind):
            return f"its {name} is a {type(state[name]).__name__}, no {kind.__name__}"
    return None


def load_first(paths: Sequence[Path], verify: Verify = verify_here, readers: int = 0) -> tuple[Path, State, list[str]]:
    """Return the path and state of the first checkpoint that is whole, and warnings about the others.

    Raises:
        DamagedCheckpoint: the only one is damaged.
        RequestError: all are damaged, each is named; or as :func:`load`.
    """
    damaged: dict[Path, DamagedCheckpoint] = {}
    for path in paths:
        try:
            state = load(path, verify, readers)
            break
        except DamagedCheckpoint as error:
            damaged[path] = error
    else:
        if len(paths) == 1:
            raise damaged[paths[0]]
        reasons = "".join(f"\n  {path.name}: {error.reason}" for path, error in damaged.items())
        raise RequestError(f"Every checkpoint in {paths[0].parent} is damaged:{reasons}")
    last = paths[-1]
    if last.stem == LAST and path != last:
        with suppress(DamagedCheckpoint):
            newer = load(last, verify)
            if newer.get("cursor", {}).get("step", 0) > state.get("cursor", {}).get("step", 0):
                return last, newer, [f"The file that {last} was a second name of is deleted; that name is used."]
    return path, state, [f"{bad} is damaged: {error.reason}. {path} is used instead." for bad, error in damaged.items()]


def check_weights(path: Path, weights: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse the weights of another model, and list the names and shapes that differ."""
    differing = [
        *(f"{name}: not in the checkpoint" for name in expected if name not in weights),
        *(f"{name}: not in the model" for name in weights if name not in expected),
        *(
            f"{name}: {_described(weights[name])} in the checkpoint, {_described(expected[name])} in the model"
            for name in expected
            if name in weights and not is_alike(weights[name], expected[name])
        ),
    ]
    if differing:
        more = f"\n  … and {len(differing) - 8} more" if len(differing) > 8 else ""
        raise RequestError(
            f"{path} is a checkpoint of another model:\n  " + "\n  ".join(differing[:8]) + more + "\n"
            "Compose the model it was saved from (config.yaml in its run directory), or choose another ckpt_path."
        )


def _described(value: Any) -> str:
    return f"a {type(value).__name__}" if (shape := _shape(value)) is None else str(list(shape))


def is_alike(value: Any, other: Any) -> bool:
    """Whether two weights have one shape; what modules save beside tensors (``get_extra_state``) has none."""
    return _shape(value) == _shape(other)


def _shape(value: Any) -> Sequence[int] | None:
    return None if is_lazy(value) else getattr(value, "shape", None)  # which a lazy one raises an error for
