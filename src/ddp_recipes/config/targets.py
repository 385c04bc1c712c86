"""Which names a config may use: looked up here before anything is imported. Loads no torch.

What such a name stands for is decided in :mod:`~ddp_recipes.config.kinds`, once it is found.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_recipes._compat.hydra_ import OF_STANDARD_LIBRARY
from ddp_recipes.errors import RequestError

# Where the classes and functions of packages are: ``*`` stands for anything between two dots, ``**`` for anything.
LISTED = """
ddp_recipes.* ddp_recipes.callbacks.** ddp_recipes.datasets.** ddp_recipes.launchers.* ddp_recipes.lightning.**
ddp_recipes.loggers.** ddp_recipes.models.** ddp_recipes.strategies.** ddp_recipes.streams.* ddp_recipes.tasks.**
ddp_recipes.launchers.*.*Launcher
ddp_recipes.tools.profiling.*
torch.* torch.nn.** torch.optim.** torch.utils.data.** torch.distributions.** torch.amp.* torch.special.* torch.linalg.*
torchvision.datasets.** torchvision.io.read_image torchvision.io.decode_image torchvision.models.** torchvision.ops.**
torchvision.transforms.** torchmetrics.** numpy.* numpy.random.* sklearn.datasets.* sklearn.metrics.*
sklearn.model_selection.* sklearn.preprocessing.* timm.* timm.data.** timm.layers.** timm.loss.** timm.models.**
timm.optim.** timm.scheduler.** transformers.* transformers.*.from_* transformers.models.** transformers.optimization.*
peft.* peft.*.from_pretrained datasets.* datasets.*.from_* wandb.Settings lightning.*
lightning.pytorch.* lightning.pytorch.callbacks.** lightning.pytorch.demos.** lightning.pytorch.loggers.**
pytorch_lightning.* pytorch_lightning.callbacks.** pytorch_lightning.demos.** pytorch_lightning.loggers.**
""".split()  # noqa: SIM905
# Of a config's section ``hydra`` alone: what sweeps are made of.
OF_HYDRA = """
hydra._internal.core_plugins.** hydra.experimental.callbacks.* hydra_plugins.** optuna.samplers.** optuna.pruners.**
""".split()  # noqa: SIM905
LOOK_UPS = tuple(f"hydra.utils.get_{kind}" for kind in ("class", "method", "static_method", "object"))
# Neither listed by anyone nor reached by another name: what reads pickles, loads code, or writes and runs anything.
NEVER = """
joblib.** cloudpickle.** dill.** jsonpickle.** yaml.** pandas.read_pickle pandas.io.pickle.** mlflow.**load_model
numpy.load numpy.save* numpy.memmap numpy.lib.** numpy.f2py.** numpy.testing.** numpy.ctypeslib.** sklearn.externals.**
torch.load torch.save torch.serialization.** torch.hub.** torch.package.** torch.jit.load torch.jit._ser*.**
torch.export.load torch.export.save torch.from_file torch.fork torch.wait torch.import_ir_* torch.PyTorchFile*
torch.Script* torch.Lite* torch.CompilationUnit torch.ops.load_library torch._ops._Ops.** torch.testing.**
torch.utils.cpp_extension.** torch.utils.model_zoo.** torch.utils.collect_env.** torch.utils.data.datapipes.**
torch.multiprocessing.** torch.distributed.run.** torch.distributed.launcher.** torch.distributed.elastic.**
torch.distributed.checkpoint.** torch.distributed.rpc.** torchvision.datasets.utils.** transformers.**.convert_**
torchvision.datasets.LSUN* torchvision.datasets.lsun.**
hydra.utils.instantiate hydra.utils.call hydra._internal.utils.** ddp_recipes._compat.** ddp_recipes.runtime.**
**.load_from_checkpoint
""".split()  # noqa: SIM905
# Of what is called, arguments that would have it run what a file or a download brings, and what is harmless of each.
SAFE = (
    ("**", "trust_remote_code", "False"),
    ("**", "allow_pickle", "False"),
    ("**", "weights_only", "True"),
    ("datasets.**", "path", r"(?!(cache|generator|iceberg|pandas|spark|sql)$).*"),
    ("timm.**", "class_map", r".*(?<!\.pkl)"),
    ("peft.**", "megatron_co(re|nfig)", ""),
    ("transformers.**", "_?attn_implementation(_internal)?", "[^/]*"),
    ("transformers.**", "use_kernels", "False"),
)

_DOTTED = r"[^\W\d]\w*(\.[^\W\d]\w*)*"

_trusted: tuple[str, ...] = ()  # ``trusted_packages`` of the config that this process works for


def check(config: Mapping[str, Any]) -> None:
    """See that a resolved config names only what it may, and look up its later names by its ``trusted_packages``.

    Raises:
        RequestError: says which name, and what to do.
    """
    trust(config.get("trusted_packages"))
    check_node({name: value for name, value in config.items() if name != "hydra"}, "")


def trust(packages: Any) -> None:
    """Allow names of these packages in later look-ups, beside those that are listed.

    Raises:
        RequestError: they are no list of names of packages, or one acts on the machine.
    """
    global _trusted
    packages = packages or []
    if not isinstance(packages, list) or not all(isinstance(name, str) and name for name in packages):
        raise RequestError(f"trusted_packages={packages} is not allowed. Allowed: a list of names of packages.")
    for name in packages:
        if not re.fullmatch(_DOTTED, name) or is_never(name) or is_never(f"{name}._"):
            raise RequestError(f"trusted_packages={name}: no config may call that. {REMEDY}")
    _trusted = tuple(packages)


def check_node(node: Any, section: str) -> None:
    """See that a node and all in it name only what a config may.

    Raises:
        RequestError: says which name, and what to do.
    """
    for where, target, one in nodes(node, section):
        check_name(target, f"{where}._target_")
        check_arguments((target,), one, where)
        if target in LOOK_UPS:
            check_name(path_of(one), f"{where}.path")


def check_arguments(called: Sequence[str], arguments: Any, key: str) -> None:
    """See that arguments, at any depth, have nothing run that a file or a download brings.

    Args:
        called: the names of what gets them.

    Raises:
        RequestError: names the argument.
    """
    if isinstance(arguments, list | tuple):
        for each in arguments:
            check_arguments(called, each, key)
    if not isinstance(arguments, Mapping):
        return
    for name, value in arguments.items():
        for pattern, argument, harmless in SAFE:
            given = (
                value is not None
                and re.fullmatch(argument, str(name))
                and any(matches(one, (pattern,)) for one in called)
            )
            if given and not re.fullmatch(harmless, str(value), re.DOTALL):
                raise RequestError(
                    f"{key}.{name}={value}: {called[0]} would run what a file brings, which no config may ask for. "
                    f"Leave it out. {REMEDY}"
                )
        check_arguments(called, value, f"{key}.{name}")


def path_of(node: Mapping[str, Any]) -> Any:
    """Return what one of Hydra's look-ups is to find."""
    given = node.get("_args_")
    return node.get("path", given[0] if given and isinstance(given, list) else None)


def in_hydra(config: DictConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield the nodes of the section ``hydra`` that Hydra makes objects of; refuse what ``hydra.job.env_set`` may not.

    Raises:
        RequestError: a variable decides what code a process loads.
    """
    try:
        variables = OmegaConf.select(config, "hydra.job.env_set") or {}
    except OmegaConfBaseException:  # an interpolation that leads elsewhere, with OmegaConf 2.4
        variables = OmegaConf.to_container(config.hydra.job, resolve=False)["env_set"]  # type: ignore[call-overload, index]
    if not isinstance(variables, Mapping | DictConfig):
        raise RequestError(f"hydra.job.env_set={variables} is no section. Allowed: variables, with their values.")
    for name in variables:
        if re.match(r"LD_|DYLD_|PYTHON|PATH$|TORCH_FORCE_|TRUST_REMOTE_CODE$|CC$|CXX$", str(name)):
            raise RequestError(
                f"hydra.job.env_set.{name}: it decides what code a process loads. Set it in the shell instead."
            )
    for part in ("callbacks", "launcher", "sweeper"):
        yield from nodes(OmegaConf.select(config.hydra, part), f"hydra.{part}")


def check_name(target: Any, key: str, more: Sequence[str] = ()) -> None:
    """See that a config may name this, before anything is imported.

    Args:
        key: what has the name, for messages.
        more: patterns of names that may be given here, too.

    Raises:
        RequestError: says what is wrong, and what to do.
    """
    if not isinstance(target, str) or not re.fullmatch(_DOTTED, target):
        raise RequestError(f"{key}={target} is no dotted name of a class or function, written out.")
    parts = target.split(".")
    if is_never(target) or any(part.startswith("__") and part != "__main__" for part in parts):
        raise RequestError(f"{key}={target}: no config may call that. {REMEDY}")
    if matches(target, (*OF_STANDARD_LIBRARY, *LOOK_UPS, *more)) or is_trusted(target):
        return
    if matches(target, LISTED):
        if any(part.startswith("_") for part in parts):
            raise RequestError(f"{key}={target} is private to {parts[0]}: no config may call that. {REMEDY}")
        return
    if not is_own(parts[0]):
        known = {pattern.partition(".")[0] for pattern in (*LISTED, *_trusted)}
        among = ", ".join([*_trusted, target.rpartition(".")[0] if parts[0] in known else parts[0]])
        raise RequestError(
            f"{key}={target} is not among what a config may call: modules in your own folders, and of packages "
            f"ddp_recipes, torch, torchvision, torchmetrics and those that extras name. If you trust it, add "
            f"++trusted_packages=[{among}], or trusted_packages: [{among}] in your yaml."
        )


REMEDY = "It acts on the machine, or runs what files bring: call it in a function of your own, and name that one."


def is_own(package: str) -> bool:
    """Return whether a module lies in a folder of the user's: neither installed, nor in a folder that a run made.

    What is not there at all counts as well: nothing can be imported, and the message is about that.
    """
    if package in ("ddp_recipes", "__main__"):  # the former is installed editable, perhaps
        return package == "__main__"
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # made by the process itself
        return True
    if spec is None:
        return True
    places = [Path(place) for place in spec.submodule_search_locations or [spec.origin or ""]]
    installed, of_python = {"site-packages", "dist-packages", "built-in", "frozen"}, Path(os.__file__).parent
    return not any(installed & {*one.parts} or one.is_relative_to(of_python) or is_run(one.parent) for one in places)


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run directory, whose files may be somebody else's."""
    return (folder / "config.yaml").is_file() and (folder / ".hydra").is_dir()


def is_never(name: str) -> bool:
    """Whether a name is of what no config may call, whoever lists it."""
    top = name.partition(".")[0]
    of_python = top in sys.stdlib_module_names or top in sys.builtin_module_names
    acts = of_python and not matches(name, OF_STANDARD_LIBRARY) and not is_own(top)  # one's own may be called so, too
    return acts or matches(name, NEVER)


def is_trusted(name: str) -> bool:
    """Whether a name lies in one of the ``trusted_packages``."""
    return matches(name, [pattern for package in _trusted for pattern in (package, f"{package}.**")])


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is one of those that patterns stand for."""
    return _expression(tuple(patterns)).fullmatch(name) is not None


@lru_cache
def _expression(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Return what matches any of them."""
    each = (re.escape(pattern).replace(r"\*\*", ".*").replace(r"\*", "[^.]*") for pattern in patterns)
    return re.compile("|".join(each))


def identity(found: Any) -> str:
    """Return the dotted name of a class or function where it was defined; of another object that of its class."""
    if isinstance(found, ModuleType):
        return found.__name__
    module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(name, str)):
        module, name = type(found).__module__, type(found).__qualname__
    return f"{module}.{name}"


def nodes(node: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield each node that has a ``_target_``: its dotted name, that target, and the node."""
    if isinstance(node, Mapping | DictConfig):
        if node.get("_target_") is not None:
            yield where, node["_target_"], node
        keys: Any = node.keys()
    elif isinstance(node, list | tuple | ListConfig):
        keys = range(len(node))
    else:
        return
    for key in keys:
        try:
            inside = node[key]
        except OmegaConfBaseException:  # of Hydra's own section: known in a job only
            continue
        yield from nodes(inside, f"{where}.{key}" if where else str(key))
