"""The weights alone, for other programs: ``model.safetensors``."""

import logging
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ddp_recipes.checkpointing.files import find
from ddp_recipes.checkpointing.parts import size_in_file, stream
from ddp_recipes.checkpointing.reading import load_first
from ddp_recipes.checkpointing.writing import unwritable
from ddp_recipes.runtime.files import write_aside
from ddp_recipes.runtime.tensors import Source

log = logging.getLogger(__name__)


def export(ckpt_path: str | Path, file: str | Path = "model.safetensors") -> Path:
    """Write the weights of a checkpoint as safetensors, under the model's own names, and return the file.

    Needs no model: the checkpoint is read, verified, and nothing in it is run. ``mode=export`` also checks that the
    weights are those of a config's model.

    Of a run directory it is the newest checkpoint. The file is complete or not there at all.

    Raises:
        RequestError: there is no such checkpoint, or it is damaged.
        RecipeError: the file cannot be written.
    """
    _, state, _ = load_first(find(str(Path(ckpt_path).absolute()), Path.cwd()))
    write_weights(Path(file), state["model"])
    return Path(file)


def write_weights(file: Path, weights: Mapping[str, Tensor | Source]) -> None:
    """Write weights as safetensors, piece by piece; what a task holds beside its model (``task.…``) is left out.

    So is what modules save that is no tensor (``get_extra_state``), which is said.
    """
    of_model = {name: value for name, value in weights.items() if not name.startswith("task.")}
    tensors = {name: value for name, value in of_model.items() if hasattr(value, "shape")}
    if without := of_model.keys() - tensors.keys():
        log.warning("safetensors hold tensors alone, and so not %s.", ", ".join(sorted(without)))
    with unwritable(file, sum(map(size_in_file, tensors.values()))):
        write_aside(file, lambda out: out.writelines(stream(tensors)))
