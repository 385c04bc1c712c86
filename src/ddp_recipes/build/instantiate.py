"""Objects of config nodes: the only place that calls what a yaml names."""

import inspect
import math
import re
from collections.abc import Collection, Mapping
from functools import partial
from traceback import extract_tb, walk_tb
from typing import Any, get_type_hints
from urllib.error import URLError

import torch
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from ddp_recipes._compat import hydra_
from ddp_recipes._compat.messages import shortened
from ddp_recipes.config import kinds, targets
from ddp_recipes.config.keys import is_plain, of_environment, require, shown
from ddp_recipes.config.targets import identity
from ddp_recipes.errors import RecipeError, RequestError
from ddp_recipes.runtime.phases import CALLS

_OF_STEPS = ("optimizer", "scheduler")  # whose numbers weights are multiplied with
WELL_KNOWN = ("ddp_recipes.", "torch.", "torchvision.")  # whose own errors say enough without a traceback


def locate(target: str, section: str, place: str | None = None) -> Any:
    """Return what a dotted name stands for.

    Args:
        place: what decides which kind it may be of; without one the section.

    Raises:
        RequestError: there is no such thing, or no config may name it.
    """
    targets.check_name(target, f"{section}._target_")
    try:
        return kinds.check_found(target, f"{section}._target_", section if place is None else place)
    except (ImportError, AttributeError, ValueError) as error:
        if (broken := _broken_module(error.__cause__, target)) is not None:
            raise RequestError(f"{section}._target_={target} cannot be imported: {broken}") from None
        raise RequestError(f"{section}._target_={target} cannot be found: {shortened(error)}") from None


def _broken_module(cause: BaseException | None, target: str) -> str | None:
    """Return what is wrong in a module that is there, with file and line; ``None`` where it is not there."""
    missing = isinstance(cause, ModuleNotFoundError) and f"{target}.".startswith(f"{cause.name}.")
    if cause is None or missing or isinstance(cause, AttributeError):
        return None
    if isinstance(cause, RecipeError):
        return str(cause)
    if isinstance(cause, SyntaxError):
        return f"{type(cause).__name__}: {cause.msg} ({cause.filename}, line {cause.lineno})"
    frames = [frame for frame in extract_tb(cause.__traceback__) if not frame.filename.startswith("<frozen")]
    return f"{type(cause).__name__}: {cause} ({frames[-1].filename}, line {frames[-1].lineno})"


def parameters_of(target: str, section: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of what a dotted name stands for; none where they are not known."""
    found = locate(target, section)
    try:
        return inspect.signature(found).parameters
    except (TypeError, ValueError):  # it has none, or cannot be called, which the call will show
        return {}


def resolved(node: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Return a node with what comes from the environment, and see that what it names by now may be called.

    Raises:
        RequestError: a variable is not set, or something may not be called.
    """
    try:
        values = OmegaConf.to_container(OmegaConf.create(dict(node)), resolve=True)
    except OmegaConfBaseException as error:
        where = f"{section}.{error.full_key}" if error.full_key else section
        raise RequestError(f"{where}: {str(error).splitlines()[0]}") from None
    assert isinstance(values, dict)
    if "${" in str(values):  # Hydra would resolve it once more, behind the check
        raise RequestError(f"{section} still holds ${{…}} once it is resolved. Write out what it stands for.")
    targets.check_node(values, section)
    return {str(name): value for name, value in values.items()}


def bound(node: Mapping[str, Any], section: str, without: Collection[str] = ()) -> "partial[Any]":
    """Return what a config node is to call, with its arguments: lists as lists, and what nodes in it make.

    Args:
        section: the node's dotted name, for messages.
        without: keys that are not for the target.

    Raises:
        RequestError: there is no such target, Hydra refuses it, or it does not take such values.
        Exception: what a user's own code raised, with its traceback.
    """
    if not isinstance(node, Mapping):
        raise RequestError(f"{section}={shown(node)} is no section: give a _target_ with its arguments.")
    if "_target_" not in node:
        raise RequestError(f"{section} has no _target_, the dotted name of a class or function to call.")
    target = str(node["_target_"])
    try:
        given = {name: value for name, value in node.items() if name not in without}
        if any("${oc.env:" in str(value) for value in given.values()):  # which gives texts, also of numbers
            given = of_environment(_hints(locate(target, section)), given)
        whole = resolved(given, section)
        names = [*kinds.check_calls(whole, section), *_tensors(whole)]
        found: partial[Any] = hydra_.instantiate(whole, names, _convert_="all", _partial_=True)
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, ImportError):
            for where, named, _ in targets.nodes(whole, section):
                locate(str(named), where, "")  # says which one, and what is wrong in a module that is there
        if not isinstance(cause, (ImportError, InstantiationException)):  # of an object nested in this one
            if isinstance(cause, RecipeError) or reaches_own_code(cause):
                raise cause from None
            inner = re.search(r"full_key: (\S+)", str(error))
            raise RequestError(f"{section}{f'.{inner[1]}' if inner else ''} cannot be made: {_said(cause)}.") from error
        message = f"{section}._target_={target} cannot be made: {shortened(cause)}"
        if not isinstance(cause, ImportError):
            message += " Name what is installed or lies in the current folder: your own function may call the rest."
        raise RequestError(message) from error
    check_values(found.func, found.keywords, section)
    return found


def make(node: Mapping[str, Any], section: str, *arguments: Any, without: Collection[str] = (), **runtime: Any) -> Any:
    """Make an object of a config node; runtime objects arrive untouched.

    Args:
        section: the node's dotted name, for messages.
        without: keys that are not for the target.

    Raises:
        RequestError: as :func:`bound`, or what is called does not take these arguments, or refuses them.
        Exception: what a user's own code raised, with its traceback.
    """
    called = bound(node, section, without)
    target = str(node["_target_"])
    try:
        return partial(CALLS.made_of(called.func), *called.args, **called.keywords)(*arguments, **runtime)
    except RecipeError:
        raise
    except Exception as error:
        well_known = target.startswith(WELL_KNOWN) and not reaches_own_code(error)
        at_the_call = error.__traceback__ is None or error.__traceback__.tb_next is None  # not inside what was called
        if (
            isinstance(error, TypeError)
            and re.search("(keyword|positional) argument|values for argument", str(error))
            and (well_known or at_the_call)
        ):
            hint = f"Check the keys of {section}."
            if "unexpected" in str(error) and all(map(str.isidentifier, section.split("."))):
                hint += f" Without those of the group's file: '~{section}' +{section}._target_={target}"
            raise RequestError(f"{section} does not fit {target}: {_said(error)}. {hint}") from error
        if not well_known:
            raise  # the traceback is what helps
        if isinstance(error, (URLError, ConnectionError, TimeoutError)):
            raise RequestError(
                f"{section} cannot be made by {target}, which downloads what cannot be reached: {_said(error)}. Fetch "
                f"it where there is a network, or set what asks for it: weights, weights_backbone, download, …"
            ) from error
        kept = {name: value for name, value in node.items() if name not in without and not name.startswith("_")}
        given = ", ".join(f"{name}={value}" for name, value in kept.items())
        raise RequestError(f"{section} does not fit {target}: {_said(error)}. Check the values of {given}.") from error


def check_values(found: Any, arguments: Mapping[str, Any], section: str) -> None:
    """Refuse a text for a number and the like, where a parameter's annotation says so, and what no step can use.

    Raises:
        RequestError: says what is allowed.
    """
    hints = _hints(found)
    for name, value in arguments.items():
        if is_plain(hint := hints.get(name, Any)):
            require(f"{section}.{name}", value, hint)
        if hints and isinstance(value, float) and not math.isfinite(value) and section in _OF_STEPS:
            raise RequestError(f"{section}.{name}={shown(value)} would make all weights NaN. Allowed: a finite number.")


def _hints(found: Any) -> dict[str, Any]:
    """Return the annotations of a well-known function's parameters, or of a class's constructor's."""
    if not f"{getattr(found, '__module__', '')}.".startswith(WELL_KNOWN):
        return {}
    bases = found.__mro__ if isinstance(found, type) else ()
    function = next((vars(base)["__init__"] for base in bases if "__init__" in vars(base)), found)
    try:
        return get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # what they name is not there at run time
        return {}


def _tensors(resolved: Any) -> list[str]:
    """Have lists of numbers become tensors where nothing else is taken, as class weights; return what makes them."""
    made = []
    for _, target, node in [*targets.nodes(resolved, "")]:
        lists = [name for name, value in node.items() if isinstance(value, list) and value and _are_numbers(value)]
        hints = _hints(hydra_.locate(target)) if lists and target.startswith(WELL_KNOWN) else {}
        for name in lists:
            if hints.get(name) in (Tensor, Tensor | None):
                node[name] = {"_target_": "torch.tensor", "data": [float(number) for number in node[name]]}
                made = ["torch.tensor", identity(torch.tensor)]
    return made


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def reaches_own_code(error: BaseException) -> bool:
    """Whether an error comes from a function in a user's own folder, so that its traceback helps."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return any(targets.is_own(str(frame.f_globals.get("__name__", "__main__")).partition(".")[0]) for frame in frames)


def _said(error: BaseException) -> str:
    """Return what an error says in one line: torch's go on with the frames of its C++."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
