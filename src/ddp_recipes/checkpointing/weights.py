"""Weights to start from: of a run of ours, of Lightning, or of any program that writes safetensors or a state dict."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_recipes.checkpointing.files import find, is_index
from ddp_recipes.checkpointing.reading import is_alike, load, load_first, refuse_odd_zip
from ddp_recipes.checkpointing.writing import reason_of
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.tensors import place_of, put_together

PREFIXES = ("", "model.", "net.", "module.", "_orig_mod.")  # of a wrapper, which a file may have before every name
SHOWN = 4  # names of a kind


def matching(
    given: str, expected: Mapping[str, Tensor], takes: Callable[[str, Any], bool] = lambda name, value: False
) -> tuple[dict[str, Tensor], list[str]]:
    """Return those of a file's weights that the model has, and lines on what did not match.

    Args:
        given: ``weights_from``, a file or a run directory.
        expected: the model's own weights, which decide on names and shapes.
        takes: whether a weight would be loaded in another shape than that of the model's own.

    Raises:
        RequestError: there is no such file, it holds more than tensors and plain data, or nothing in it matches.
    """
    path = Path(given).expanduser().absolute()
    if not (os.path.isfile(path) or os.path.isdir(path)):  # also where the name is too long to be looked at
        raise RequestError(
            f"weights_from={given}: there is no file {path}. Allowed: a run directory, a checkpoint of it, a "
            f".safetensors file, a state dict, or a .ckpt of Lightning."
        )
    weights = _read(path)
    found = {prefix: _renamed(weights, prefix) for prefix in PREFIXES}
    counts = {prefix: len(named.keys() & expected.keys()) for prefix, named in found.items()}
    best = [prefix for prefix, count in counts.items() if count == max(counts.values())]
    if counts[""]:
        best = [""]
    elif max(counts.values()) and len(best) > 1:
        shown = " and ".join(f"{prefix}{next(iter(found[prefix]))}" for prefix in best)
        raise RequestError(
            f"weights_from={given}: names match the model's without any of {', '.join(best)}, as in {shown}: which one "
            f"is meant is not known. Save the part that is meant as a state dict of its own."
        )
    named = _with_ties(found[best[0]] if max(counts.values()) else weights, expected)
    taken = {
        name: value
        for name, value in named.items()
        if name in expected and (is_alike(value, expected[name]) or takes(name, value))
    }
    differing = {
        "not in the file": [name for name in expected if name not in named],
        "not in the model": [name for name in weights if name.removeprefix(best[0]) not in expected],
        "of another shape": [
            f"{name} {list(named[name].shape)} for {list(value.shape)}"
            for name, value in expected.items()
            if name in named and name not in taken
        ],
    }
    if not taken:
        raise RequestError(
            f"weights_from={given}: nothing in it matches the model.{''.join(_lines(differing))}\nChoose the model "
            f"that the file is of, or rename its tensors."
        )
    if not any(differing.values()):
        return taken, []
    lines = "".join(_lines(differing))
    return taken, [f"weights_from={given}: {len(taken)} of the model's {len(expected)} tensors are taken.{lines}"]


def _read(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors in a file, or in the newest checkpoint of a run directory."""
    if path.is_dir():
        _, state, _ = load_first(find(str(path), Path.cwd(), "weights_from"))
        return _tensors(path, put_together(state["model"]))
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except Exception as error:  # noqa: BLE001 - a class of its own, which it does not export
            raise RequestError(f"weights_from={path} is no whole safetensors file: {error}.") from None
    if is_index(path):
        return _tensors(path, put_together(load(path)["model"]))
    try:
        refuse_odd_zip(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail in any way in the unpickler
        raise RequestError(
            f"weights_from={path} cannot be read, or holds more than tensors and plain data ({reason_of(error)}). What "
            f"a file brings is never run: where you wrote it save its state dict alone, or as .safetensors."
        ) from error
    if isinstance(content, Mapping) and type(content.get("format")) is int:
        content = load(path)["model"]  # one of ours: its checksums are looked at
    for key in ("state_dict", "model"):  # Lightning's; what many others write
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    return _tensors(path, content)


def _tensors(path: Path, content: Any) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        raise RequestError(f"weights_from={path} holds a {type(content).__name__}, no state dict: names to tensors.")
    extra = "_extra_state"  # of modules, plain data
    return {str(name): each for name, each in content.items() if isinstance(each, Tensor) or str(name).endswith(extra)}


def _renamed(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the weights without a prefix of their names; only those that have it."""
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def _with_ties(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights by all names that the model has for them: many files have a tied weight once."""
    tensors = {name: each for name, each in expected.items() if isinstance(each, Tensor)}
    there = {place_of(each): weights[name] for name, each in tensors.items() if name in weights}
    ties = {name: there[place] for name, each in tensors.items() if (place := place_of(each)) in there}
    return {**ties, **weights}


def _lines(differing: Mapping[str, list[str]]) -> list[str]:
    """Return a line for each kind of difference: how many, and the first names."""
    return [
        f"\n  {len(names)} {kind}: {', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''}"
        for kind, names in differing.items()
        if names
    ]
