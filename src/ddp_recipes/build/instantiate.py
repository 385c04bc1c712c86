"""Objects of config nodes: the only place that calls what a yaml names."""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from ddp_recipes._compat import hydra_
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.fast_paths import uncompiled

WELL_KNOWN = ("ddp_recipes.", "torch.", "torchvision.")  # whose own errors say enough without a traceback


def locate(target: str, section: str) -> Any:
    """Return what a dotted name stands for.

    Raises:
        RequestError: there is no such thing.
    """
    try:
        return hydra_.locate(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise RequestError(f"{section}._target_={target} cannot be found: {_last_line(error)}") from None


def parameters_of(target: str, section: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of what a dotted name stands for; none where they are not known."""
    found = locate(target, section)
    try:
        return inspect.signature(found).parameters
    except (TypeError, ValueError):  # it has none, or cannot be called, which comes out when it is
        return {}


def make_section(config: DictConfig, section: str, *arguments: Any, without: Sequence[str] = (), **runtime: Any) -> Any:
    """Make the object of a section of the config, some of its keys left out; as :func:`make`."""
    node = config[section]
    kept = [name for name in node if name not in without]
    return make(OmegaConf.masked_copy(node, kept), section, *arguments, **runtime)


def make(node: DictConfig, section: str, *arguments: Any, **runtime: Any) -> Any:
    """Make an object of a config node; lists arrive as lists, and runtime objects untouched.

    Raises:
        RequestError: the target is not there or does not take these arguments, or it refused them itself.
        Exception: what a user's own code raised, with its traceback.
    """
    if "_target_" not in node:
        raise RequestError(f"{section} has no _target_, the dotted name of a class or function to call.")
    target = str(node._target_)
    try:
        made = hydra_.instantiate(node, _convert_="all", _partial_=True)
        return partial(uncompiled(made.func), *made.args, **made.keywords)(*arguments, **runtime)
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, RequestError) or not isinstance(cause, (ImportError, InstantiationException)):
            raise cause from None  # the target's own words, of an object nested in this one
        raise RequestError(f"{section}._target_={target} cannot be made: {_last_line(cause)}") from error
    except (TypeError, ValueError) as error:
        well_known = target.startswith(WELL_KNOWN)
        if isinstance(error, TypeError) and "argument" in str(error) and (well_known or _at_the_call(error)):
            raise RequestError(f"{section} does not fit {target}: {error}. Check the keys of {section}.") from error
        if not well_known:
            raise  # a user's own code: the traceback is what helps
        given = ", ".join(f"{name!s}={value}" for name, value in node.items() if str(name)[0] != "_")
        raise RequestError(f"{section} does not fit {target}: {error}. Check the values of {given}.") from error


def _at_the_call(error: BaseException) -> bool:
    """Whether an error comes of calling with the wrong arguments, not from inside of what was called."""
    trace: TracebackType | None = error.__traceback__
    return trace is not None and trace.tb_next is None


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("full_key")]
    return lines[-1] if lines else type(error).__name__
