"""Objects of config nodes: the only place that calls what a yaml names."""

import inspect
from collections.abc import Collection, Mapping
from functools import partial
from traceback import extract_tb
from typing import Any

from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_recipes._compat import hydra_
from ddp_recipes._compat.messages import shortened
from ddp_recipes.config import kinds, targets
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.fast_paths import uncompiled

WELL_KNOWN = ("ddp_recipes.", "torch.", "torchvision.")  # whose own errors say enough without a traceback


def locate(target: str, section: str) -> Any:
    """Return what a dotted name stands for.

    Raises:
        RequestError: there is no such thing, or no config may name it.
    """
    targets.check_name(target, f"{section}._target_")
    try:
        return kinds.check_found(target, f"{section}._target_", section)
    except (ImportError, AttributeError, ValueError) as error:
        if (broken := _broken_module(error.__cause__, target)) is not None:
            raise RequestError(f"{section}._target_={target} cannot be imported: {broken}") from None
        raise RequestError(f"{section}._target_={target} cannot be found: {shortened(error)}") from None


def _broken_module(cause: BaseException | None, target: str) -> str | None:
    """Return what is wrong in a module that is there, with file and line; ``None`` where it is not there."""
    missing = isinstance(cause, ModuleNotFoundError) and f"{target}.".startswith(f"{cause.name}.")
    if cause is None or missing or isinstance(cause, AttributeError):
        return None
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


def _resolved(node: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Return a node with what comes from the environment, and see that what it names by now may be called."""
    values = OmegaConf.to_container(OmegaConf.create(dict(node)), resolve=True)
    assert isinstance(values, dict)
    if "${" in str(values):  # Hydra would resolve it once more, behind the check
        raise RequestError(f"{section} still holds ${{…}} once it is resolved. Write out what it stands for.")
    targets.check_node(values, section)
    return {str(name): value for name, value in values.items()}


def make(node: Mapping[str, Any], section: str, *arguments: Any, without: Collection[str] = (), **runtime: Any) -> Any:
    """Make an object of a config node; lists arrive as lists, and runtime objects untouched.

    Args:
        section: the node's dotted name, for messages.
        without: keys that are not for the target.

    Raises:
        RequestError: there is no such target, Hydra refuses it, it does not take these arguments, or refuses them.
        Exception: what a user's own code raised, with its traceback.
    """
    if "_target_" not in node:
        raise RequestError(f"{section} has no _target_, the dotted name of a class or function to call.")
    target = str(node["_target_"])
    try:
        kept = {name: value for name, value in node.items() if name not in without}
        resolved = _resolved(kept, section)
        names = kinds.check_calls(resolved, section)
        made = hydra_.instantiate(resolved, names, _convert_="all", _partial_=True)
    except OmegaConfBaseException as error:  # an environment variable that is not set
        where = f"{section}.{error.full_key}" if error.full_key else section
        raise RequestError(f"{where}: {str(error).splitlines()[0]}") from None
    except InstantiationException as error:
        cause = error.__cause__ or error
        if not isinstance(cause, (ImportError, InstantiationException)):
            raise cause from None  # of an object nested in this one
        message = f"{section}._target_={target} cannot be made: {shortened(cause)}"
        if not isinstance(cause, ImportError):
            message += " Name what is installed or lies in the current folder: your own function may call the rest."
        raise RequestError(message) from error
    try:
        return partial(uncompiled(made.func), *made.args, **made.keywords)(*arguments, **runtime)
    except (TypeError, ValueError) as error:
        well_known = target.startswith(WELL_KNOWN)
        at_the_call = error.__traceback__ is None or error.__traceback__.tb_next is None  # not inside what was called
        if isinstance(error, TypeError) and "argument" in str(error) and (well_known or at_the_call):
            raise RequestError(f"{section} does not fit {target}: {error}. Check the keys of {section}.") from error
        if not well_known:
            raise  # the traceback is what helps
        given = ", ".join(f"{name}={value}" for name, value in kept.items() if not name.startswith("_"))
        raise RequestError(f"{section} does not fit {target}: {error}. Check the values of {given}.") from error
