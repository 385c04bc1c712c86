"""The shape of the code: who knows what, and what is loaded; `make lint` sees that imports point down only."""

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Set
from pathlib import Path
from typing import TypeGuard

import pytest

import ddp_recipes
from helpers.patience import patience

ROOT = Path(__file__).parents[2]
PACKAGE = Path(ddp_recipes.__file__).parent
NAME = "ddp_recipes"

SOURCES = [path for path in PACKAGE.rglob("*.py") if not {"conf", "template"} & {*path.relative_to(PACKAGE).parts}]


def part_of(path: Path) -> str:
    """Return the module or folder right under the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


# The reference of check=equivalence is named there.
ABOUT_STRATEGIES = re.compile(
    r"ddp_exact|ddp_pipeline|parameter_server|strategy=(?!single|\{|%s|strategy|recipe\.|self)"
    r"|strategy\.(stages|shards|schedule|micro_batches|sync_batchnorm|shared_memory|comm_hook|num_threads|static_graph)"
)


def test_a_strategy_is_known_in_its_own_folder_alone() -> None:
    """Everyone else asks the settings, and so works for a strategy from outside as well."""
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in SOURCES
        if part_of(path) != "strategies"
        for line in path.read_text().splitlines()
        if ABOUT_STRATEGIES.search(line)
    ]
    assert found == []


# Cloudpickle, and so unpickling, for what the same user's parent hands over through an inherited descriptor alone.
UNPICKLES = {"ddp_recipes_devices.py": 2, "job.py": 1}
ABOUT_PICKLES = re.compile(r"\w_object(_list)?\(|pickle\.loads?\(|Unpickler|weights_only=False|allow_pickle=True")


def test_nothing_that_is_received_is_unpickled() -> None:
    """Neither from a collective nor from the store nor from a file: torch's collectives of objects unpickle."""
    plugins = (PACKAGE.parent / "hydra_plugins").rglob("*.py")
    found = {path.name: len(ABOUT_PICKLES.findall(path.read_text())) for path in (*SOURCES, *plugins)}
    found = {name: count for name, count in found.items() if count}
    assert found.pop("hydra_.py", 0) <= 1  # Hydra's get_object looks up a name
    assert found == UNPICKLES, "Use strategies/collectives.py, JSON, safetensors or torch.load(weights_only=True)."


# --- types of devices ------------------------------------------------------------------------------------------------

TYPE = r"(cuda|xpu|mps|npu|hpu)"
MODULE = re.compile(rf"torch(\.backends|\.version)?\.{TYPE}\b")
VALUE = re.compile(rf"{TYPE}(:\d*)?|nccl|xccl|hccl")  # a text that is one, not one for users


def types_of_devices(code: str) -> list[str]:
    """Return where a module names a type of device, or its backend: by torch's module for it, or as a value."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and MODULE.fullmatch(name := ast.unparse(node)):
            found.append((node.lineno, name))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = (package + each.name for each in node.names)
            found += [(node.lineno, name) for name in names if MODULE.match(name)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and VALUE.fullmatch(node.value):
            found.append((node.lineno, node.value))
    return [f"{line}: {name}" for line, name in found]


@pytest.mark.slow
def test_types_of_devices_are_named_in_one_module_alone() -> None:
    sources = [*SOURCES, *(PACKAGE.parent / "hydra_plugins").rglob("*.py")]
    found = {path.name: types_of_devices(path.read_text()) for path in sources if path != PACKAGE / "devices.py"}
    found = {name: places for name, places in found.items() if places}
    assert not found, f"Ask {NAME}.devices: {found}"


@pytest.mark.parametrize(
    "code",
    [
        "torch.cuda.synchronize()",
        "ask = torch.xpu",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "import torch.cuda",
        "from torch import mps",
        "from torch.cuda import Stream",
        "tensor.to('cuda')",
        "torch.device(f'cuda:{rank}')",
        "torch.device('npu:0')",
        "backend = 'nccl' if kind == other else 'gloo'",
        "device: Literal['auto', 'xpu'] = 'auto'",
    ],
)
def test_a_type_of_device_is_seen(code: str) -> None:
    assert len(types_of_devices(code)) == 1


@pytest.mark.parametrize(
    "code",
    [
        "'''Events of GPUs: torch.cuda has them.'''",
        "count()  # not torch.cuda.device_count()",
        "refuse('launcher.device=cuda needs GPUs: check CUDA_VISIBLE_DEVICES, or nccl')",
        "os.environ.setdefault('NCCL_SOCKET_IFNAME', 'lo')",
        "torch.backends.cudnn.benchmark; torch.accelerator.current_accelerator().type",
    ],
)
def test_words_about_devices_and_what_torch_has_for_all_of_them_are_not(code: str) -> None:
    assert types_of_devices(code) == []


# --- private names ---------------------------------------------------------------------------------------------------

# Documented, whatever they look like: os._exit, and what a named tuple has.
DOCUMENTED = {"_exit", "_asdict", "_fields", "_make", "_replace"}


def is_private(name: str) -> bool:
    """Whether a name is private: not ``__init__``, and not ``_target_``, a key of Hydra's."""
    return name.startswith("_") and not name.endswith("_") and name not in DOCUMENTED


def members(tree: ast.AST) -> set[str]:
    """Return the names that the classes and the top level of a module define, and attributes of ``self``."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            found.add(node.attr)
    return found


def is_own(node: ast.Attribute) -> bool:
    """Whether an attribute is one of ``self`` or ``cls``."""
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def private_names(tree: ast.AST, of_package: set[str]) -> Iterator[str]:
    """Yield the private names of other packages that a module uses.

    Its own are those that it defines itself; of ``self``, those that any class of this package does: a base class's.
    """
    of_module = members(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if any(map(is_private, each.name.split("."))))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in (NAME, "__future__"):
            names = (f"{node.module}.{each.name}" for each in node.names)
            yield from (name for name in names if any(map(is_private, name.split("."))))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr not in (of_package if is_own(node) else of_module):
                yield ast.unparse(node)
        elif (
            isinstance(node, ast.Call) and (name := asked_by_text(node)) and is_private(name) and name not in of_module
        ):
            yield ast.unparse(node)


def asked_by_text(call: ast.Call) -> str:
    """Return the name that ``getattr`` or one of its kind is called with; empty for another call."""
    by_text = isinstance(call.func, ast.Name) and call.func.id in ("getattr", "hasattr", "setattr", "delattr")
    name = call.args[1] if by_text and len(call.args) > 1 else None
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""


def private_names_of(code: str) -> list[str]:
    """Return what :func:`private_names` finds in a text."""
    tree = ast.parse(code)
    return list(private_names(tree, members(tree)))


@pytest.mark.slow
def test_only_compat_uses_private_names_of_others() -> None:
    plugins = (PACKAGE.parent / "hydra_plugins").rglob("*.py")
    trees = {path: ast.parse(path.read_text()) for path in (*SOURCES, *plugins) if "_compat" not in path.parts}
    of_package = set().union(*map(members, trees.values()))
    used = {str(path): found for path, tree in trees.items() if (found := list(private_names(tree, of_package)))}
    assert not used, f"Move these to an entry of {NAME}._compat: {used}"


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch.utils._pytree import tree_map",
        "from torch.utils import _pytree",
        "torch._C.f()",
        "module._buffers",
        "self._buffers",
        "getattr(loader, '_iterator', None)",
        "import os; threading._shutdown()",
    ],
)
def test_private_names_of_others_are_seen(code: str) -> None:
    assert len(private_names_of(code)) == 1


@pytest.mark.parametrize(
    "code",
    [
        "from ddp_recipes._compat.torch_ import tree_leaves",
        "os._exit(0); cursor._replace(step=1); cursor._asdict()",
        "node._target_; loss.__class__",
        "class A:\n  def __init__(self, other): self._mine = other._mine",
        "getattr(cfg, 'name')",
    ],
)
def test_names_of_our_own_and_documented_ones_are_not(code: str) -> None:
    assert private_names_of(code) == []


# --- what is there ---------------------------------------------------------------------------------------------------


def test_public_names_are_there() -> None:
    assert all(getattr(ddp_recipes, name) is not None for name in ddp_recipes.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'runn'"):
        _ = ddp_recipes.runn


# --- what is loaded --------------------------------------------------------------------------------------------------


def loaded_by(code: str, folder: Path) -> set[str]:
    """Return the top-level modules that a new interpreter has after some code."""
    code += "\nimport json, sys; print('\\n' + json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=patience(60)
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.spawn
def test_importing_the_package_loads_nothing_heavy(tmp_path: Path) -> None:
    assert not loaded_by("import ddp_recipes", tmp_path) & {"torch", "numpy", "hydra", "omegaconf", "rich"}


@pytest.mark.spawn
def test_the_launching_parent_needs_no_torch(tmp_path: Path) -> None:
    code = """
from ddp_recipes.config import compose
from ddp_recipes import main
from ddp_recipes.config.request import Request
from ddp_recipes.devices import NONE
import ddp_recipes.launchers.local
from omegaconf import OmegaConf
with compose.session(main.CONF) as hydra:
    config = compose.compose(hydra, "train", [])
Request.of(compose.resolve(OmegaConf.masked_copy(config, [name for name in config if name != "hydra"]))).processes(NONE)
"""
    assert not loaded_by(code, tmp_path) & {"torch", "torchvision", "torchmetrics", "tensorboard", "sklearn"}


@pytest.mark.slow
@pytest.mark.spawn
def test_a_run_loads_only_what_it_uses(tmp_path: Path) -> None:
    code = """
import ddp_recipes
ddp_recipes.run(["strategy=single", "data=random", "data.num_samples=16", "model=toy", "logger=none",
    "trainer.max_epochs=1", "launcher.device=cpu"])
"""
    loaded = loaded_by(code, tmp_path)
    assert "torch" in loaded
    assert not loaded & {"torchvision", "torchmetrics", "tensorboard", "sklearn", "PIL"}


def test_every_folder_of_tests_is_run() -> None:
    paths = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"]
    assert sorted(paths) == sorted({str(file.parent.relative_to(ROOT)) for file in ROOT.glob("tests/**/test_*.py")})


# --- the tests themselves --------------------------------------------------------------------------------------------

TESTS = sorted((ROOT / "tests").rglob("*.py"))


def checks(function: ast.AST, checkers: Set[str]) -> bool:
    """Whether a function asserts something, or calls one that is known to."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in checkers or called.startswith("assert_") or called in ("raises", "warns", "fail"):
                return True
            if any(word.arg == "check" and ast.unparse(word.value) == "True" for word in node.keywords):
                return True  # of a command, whose exit code is the assertion
    return False


@pytest.mark.slow
def test_every_test_asserts_something() -> None:
    defined = [
        (path, node) for path in TESTS for node in ast.walk(ast.parse(path.read_text())) if is_function(node, "")
    ]
    # Helpers that assert, and those that call them; tests are no helpers.
    helpers = [node for _, node in defined if not is_function(node, "test_")]
    checkers: set[str] = set()
    while more := {node.name for node in helpers if node.name not in checkers and checks(node, checkers)}:
        checkers |= more
    idle = [
        f"{path.name}: {node.name}"
        for path, node in defined
        if path.name.startswith("test_") and is_function(node, "test_") and not checks(node, checkers)
    ]
    assert idle == []


def is_function(node: ast.AST, prefix: str) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and node.name.startswith(prefix)


@pytest.mark.slow
def test_words_that_are_gone_stay_gone() -> None:
    done = subprocess.run([sys.executable, ROOT / ".ci" / "words.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert not any(line.startswith("error") for line in done.stdout.splitlines())


def test_a_word_that_is_gone_is_named_with_its_place(tmp_path: Path) -> None:
    for folder in (".ci", "src/ddp_recipes"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("words.py", "words.md"):
        shutil.copy(ROOT / ".ci" / name, tmp_path / ".ci")
    (tmp_path / "src/ddp_recipes/new.py").write_text('"""Waits in vain."""\n\n\ndef catch_up() -> None: ...\n')
    subprocess.run("git init -q && git add -A", shell=True, cwd=tmp_path, check=True)
    command = [sys.executable, tmp_path / ".ci" / "words.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    errors = [line for line in done.stdout.splitlines() if line.startswith("error")]
    assert errors == [
        "error: catch_up in 1 names, 0 in words.md; say sync_to. src/ddp_recipes/new.py:4",
        "error: in vain in 1 lines, 0 in words.md; say did not respond, timed out. src/ddp_recipes/new.py:1",
    ]
