"""A config calls nothing but what it may, whoever wrote it: what is refused is not even imported."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

import ddp_recipes
from ddp_recipes import RequestError
from ddp_recipes.build.instantiate import make
from ddp_recipes.config.targets import check, check_hydra, is_own
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.testing import make_job
from helpers import security_files
from helpers.patience import patience
from helpers.recipes import QUICK

OWN = """
import os
from os import mkdir
from pathlib import Path

import numpy as np
import torch
from torch import load, nn, relu

FOLDERS = []


class Net(nn.Linear):
    def __init__(self, in_features, out_features, hidden_features=0, more=None):
        super().__init__(in_features, out_features)
        self.more = more
"""

# Each would make the folder ``made``, or read ``file``, which makes a witness when it is unpickled.
NAMES = [
    *(
        "os.mkdir",
        "posix.mkdir",
        "own.os.mkdir",
        "own.mkdir",
        "own.torch.os.mkdir",
        "own.Path.mkdir",
        "own.FOLDERS.append",
    ),
    *("subprocess.run", "pathlib.Path.mkdir", "pathlib.Path", "builtins.eval", "builtins.dict", "builtins.open"),
    *("shutil.copy", "importlib.import_module", "runpy.run_path", "pickle.load", "_pickle.loads", "cloudpickle.load"),
    *("joblib.load", "numpy.load", "own.np.load", "torch.load", "own.load", "own.torch.load"),
    *("torch.serialization.load", "torch.hub.load", "torch.package.PackageImporter", "torch.jit.load", "torch.save"),
    *("torch.utils.cpp_extension.load", "torch.utils.collect_env.run", "torch.distributed.run.main"),
    *("torch.nn.modules.module.torch.utils.collect_env.run", "torch.nn.init.warnings.sys.path.append"),
    *("torchvision.io.write_file", "own.Net.__init__", "own.Net.load_from_checkpoint", "mlflow.pyfunc.load_model"),
    *("hydra.utils.instantiate", "hydra.utils.call", "hydra._internal.utils._locate", "hydra_plugins.x.y"),
    *(
        "ddp_recipes._compat.hydra_.instantiate",
        "ddp_recipes.reporting.run_directory.write_text",
        "own.os.environ.clear",
    ),
    *(
        "ddp_recipes.runtime.main_module.unpack",
        "logging.FileHandler",
        "setuptools.setup",
        "test.support.run_unittest",
        "torchvision.datasets.LSUN",
        "sklearn.utils.Bunch",
    ),
]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be in a folder that has a module of the user's, ``own``."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def composed() -> dict[str, Any]:
    """Return a config that is composed, for it takes a while."""
    return dict(make_job([*QUICK, "strategy=single"]).config)


def refusal(request: Any, **options: Any) -> str:
    """Return the message with which ``run`` refuses this, having left nothing in the current folder."""

    def there() -> set[Path]:
        return {path for path in Path().rglob("*") if "__pycache__" not in path.parts}

    before = there()
    with pytest.raises(RequestError) as refused:
        ddp_recipes.run(request, **options)
    assert there() == before
    return str(refused.value)


def calls(name: str) -> list[dict[str, Any]]:
    """Return nodes that call what has this name."""
    return [
        {"_target_": name, "_args_": ["made"]},
        {"_target_": "own.Net", "more": [{"_target_": name, "_partial_": True}]},
        {"_target_": "own.Net", "more": {"_target_": "hydra.utils.get_method", "path": name}},
        {"_target_": "own.Net", "more": {"_target_": "hydra.utils.get_class", "_args_": [name]}},
    ]


def test_a_target_that_acts_is_refused_however_it_is_named(own: Path, composed: dict[str, Any]) -> None:
    for name in NAMES:
        if name.startswith("hydra_plugins.") and is_own("hydra_plugins"):
            continue  # no plug-in is installed beside ours, which lies here
        later = name.startswith(("own.", "torch.nn."))  # what it stands for is known once it is imported
        for node in calls(name):
            with pytest.raises(RequestError, match=re.escape(name)):
                make(node, "model") if later else check({**composed, "model": node})
    for node in calls("os.mkdir"):
        assert "os.mkdir" in refusal({**composed, "model": node})
    assert not (own / "made").exists()


HARMLESS = st.none() | st.booleans() | st.integers() | st.text("ab._$ ", max_size=5)
KEYS = st.sampled_from(["a", "more", "_args_", "path", "1"])
AT_ONCE = [name for name in NAMES if not name.startswith(("own.", "torch.nn."))]
BAD = st.one_of(
    st.sampled_from([node for name in AT_ONCE for node in calls(name)]),
    st.sampled_from(["torch.nn.Linear", "numpy.array", "transformers.AutoModel.from_pretrained"]).flatmap(
        lambda name: st.sampled_from(
            [{"_target_": name, "trust_remote_code": True}, {"_target_": name, "allow_pickle": 1}]
        )
    ),
    # What is no name, or none that is listed, whatever it looks like
    st.text("abc.*_$ {}/\n", max_size=8)
    .filter(lambda name: not name.isidentifier())
    .map(lambda name: {"_target_": f"torch.nn {name}"}),
    st.tuples(
        st.sampled_from(["", " ", "\n", "\t"]), st.sampled_from(AT_ONCE), st.sampled_from([" ", "\n", ".", "\0"])
    ).map(lambda parts: {"_target_": "".join(parts)}),
)


def inside(nodes: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Such nodes somewhere in lists, dicts and nodes that are allowed."""
    return st.recursive(
        nodes,
        lambda deeper: st.one_of(
            st.tuples(st.lists(HARMLESS, max_size=2), deeper).map(lambda pair: [*pair[0], pair[1]]),
            st.builds(
                lambda key, node, more: {**more, key: node}, KEYS, deeper, st.dictionaries(KEYS, HARMLESS, max_size=2)
            ),
            deeper.map(lambda node: {"_target_": "torch.nn.Sequential", "_partial_": True, "_args_": [node]}),
        ),
        max_leaves=3,
    )


@given(st.data(), inside(BAD))
def test_what_is_refused_is_refused_wherever_it_is(composed: dict[str, Any], data: st.DataObject, node: Any) -> None:
    """In any section, at any depth."""
    section = data.draw(st.sampled_from([name for name, value in composed.items() if isinstance(value, dict)]))
    with pytest.raises(RequestError, match=r"no config may|is no dotted name|is not among"):
        check({**composed, section: {**composed[section], "more": node}})


@given(
    st.sampled_from(["callbacks", "launcher", "sweeper"]),
    # Hydra's own plugins may be there.
    inside(st.sampled_from(AT_ONCE).filter(lambda name: "plugins" not in name).map(lambda name: {"_target_": name})),
)
def test_what_is_refused_is_refused_in_hydras_section(part: str, node: Any) -> None:
    with pytest.raises(RequestError, match=r"no config may|is no dotted name|is not among"):
        check_hydra(OmegaConf.create({"hydra": {part: {"x": node}, "job": {"env_set": {}}}}))


def test_variables_that_decide_what_a_process_loads_are_refused() -> None:
    for name in ("LD_PRELOAD", "DYLD_X", "PYTHONPATH", "PATH", "TRUST_REMOTE_CODE", "CC", "TORCH_FORCE_X"):
        with pytest.raises(RequestError, match="Set it in the shell"):
            check_hydra(OmegaConf.create({"hydra": {"job": {"env_set": {"OMP_NUM_THREADS": 1, name: "x"}}}}))


@given(
    st.sampled_from(
        ["os", "torch.hub", "joblib", "pickle", "numpy.lib", "ddp_recipes._compat", "hydra._internal.utils"]
    )
    | st.text("*.$ /é1", min_size=1, max_size=4).filter(lambda name: not name.isidentifier())
    | st.none()
    | st.integers()
    | st.just("")
)
def test_packages_that_act_cannot_be_trusted(name: Any) -> None:
    for trusted in ([name], ["mine", name], name or 1):
        with pytest.raises(RequestError, match="trusted_packages="):
            check({"trusted_packages": trusted})


@pytest.mark.parametrize(
    "overrides",
    [
        ["+callbacks.x={_target_: os.mkdir, path: made}"],
        ["+hydra.callbacks.x={_target_: os.mkdir, path: made}"],
        ["+hydra.sweeper.x={_target_: os.mkdir, path: made}", "-m"],
        ["+hydra.job.env_set.LD_PRELOAD=evil.so"],
        ["++trusted_packages=[joblib]", "model._target_=joblib.load"],
    ],
    ids=lambda overrides: overrides[0],
)
@pytest.mark.usefixtures("own")
def test_a_run_looks_at_its_config_before_anything_is_made(overrides: list[str]) -> None:
    said = refusal([*QUICK, "strategy=single", *overrides])
    assert re.search("no config may|trusted_packages=|Set it in the shell|is not among", said)


def test_a_target_that_comes_by_interpolation_is_refused(
    own: Path, composed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVIL", "{_target_: os.mkdir, path: made}")
    monkeypatch.setenv("TWICE", "${oc.decode:${oc.env:EVIL}}")
    for more, message in (
        ("${oc.decode:${oc.env:NO_SUCH_VARIABLE,{_target_: os.mkdir, path: made}}}", r"model\.more: "),
        ("${oc.decode:${oc.env:EVIL}}", r"model\.more\._target_=os\.mkdir"),
        ("${oc.env:TWICE}", "model still holds"),
        ({"_target_": "${oc.env:HOME}"}, "no dotted name"),
    ):
        config = {**composed, "model": {"_target_": "own.Net", "in_features": 4, "out_features": 1, "more": more}}
        with pytest.raises(RequestError, match=message):
            ddp_recipes.run(config, directory=own / "run")
    assert not (own / "made").exists()


def test_a_package_that_is_installed_is_not_imported_until_it_is_trusted(
    own: Path, composed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, run: Callable[..., Summary]
) -> None:
    witness, installed = own / "witness", own / "lib" / "site-packages"
    security_files.module(witness, installed / "stranger" / "__init__.py")
    monkeypatch.syspath_prepend(installed)
    said = refusal({**composed, "model": {"_target_": "stranger.Net"}})
    assert "model._target_=stranger.Net is not among" in said
    assert "++trusted_packages=[stranger]" in said
    two = {**composed, "model": {"_target_": "stranger.Net"}, "trusted_packages": ["other"]}
    assert "++trusted_packages=[other, stranger]" in refusal(two)
    assert not witness.exists()
    (own / "conf" / "experiment").mkdir(parents=True)
    (own / "conf" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ntrusted_packages: [stranger]\nmodel: {_target_: stranger.Net}\n"
    )
    for overrides, options in (
        (["model._target_=stranger.Net", "++trusted_packages=[stranger]"], {}),
        (["experiment=mine"], {"config_dir": str(own / "conf")}),
    ):
        with pytest.raises(RequestError, match="made a Net, which is no nn"):
            run("strategy=single", *overrides, **options)
        assert witness.exists()
        witness.unlink()


@pytest.mark.slow
def test_what_users_bring_simply_works(own: Path, run: Callable[..., Summary], monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the current folder, a package elsewhere on the path as editable ones are, names to look up."""
    (own / "work" / "src" / "mine" / "parts").mkdir(parents=True)
    (own / "work" / "src" / "mine" / "__init__.py").touch()
    (own / "work" / "src" / "mine" / "parts" / "nets.py").write_text(OWN)
    monkeypatch.syspath_prepend(own / "work" / "src")
    (own / "tabnanny.py").write_text(OWN)  # as a module of Python's is called
    monkeypatch.delitem(sys.modules, "tabnanny", raising=False)
    for target in ("own.Net", "mine.parts.nets.Net", "tabnanny.Net"):
        more = [
            "{_target_: hydra.utils.get_method, path: torch.nn.functional.gelu}",
            "{_target_: hydra.utils.get_object, path: torch.float32}",
            "{_target_: hydra.utils.get_object, path: own.FOLDERS}",
            "{_target_: collections.OrderedDict}",
            "{_target_: sklearn.datasets.load_iris}",
        ]
        done = run("strategy=single", f"model._target_={target}", f"+model.more=[{','.join(more)}]")
        assert done["status"] == "finished"


@pytest.mark.slow
def test_a_strangers_run_is_resumed_validated_and_exported_without_its_code(
    own: Path, run: Callable[..., Summary]
) -> None:
    theirs, witness = own / "theirs", own / "witness"
    run("strategy=single", directory=theirs)
    evil = {"trusted_packages": ["stranger"], "model": {"_target_": "stranger.Net"}, "hydra": {"searchpath": ["."]}}
    for name in ("config.yaml", ".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml"):
        (theirs / name).parent.mkdir(exist_ok=True)
        (theirs / name).write_text(OmegaConf.to_yaml(evil))
    for name in ("stranger", "sitecustomize", "torch", "own_models", "conf/__init__"):
        security_files.module(witness, theirs / f"{name}.py")
    for overrides in (["trainer.max_epochs=3"], ["mode=validate"], ["mode=export"]):
        done = run("strategy=single", f"ckpt_path={theirs}", *overrides)
        assert done["status"] == "finished"
    assert run("strategy=single", "trainer.max_epochs=3", "ckpt_path=auto", directory=theirs)["status"] == "finished"
    (theirs / "config.yaml").write_text(OmegaConf.to_yaml(evil))
    refused = subprocess.run(
        [sys.executable, "-m", "ddp_recipes", "model._target_=stranger.Net", "ckpt_path=.", "strategy=single"],
        cwd=theirs,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert (refused.returncode, witness.exists()) == (2, False), refused.stderr
    with pytest.raises(RequestError):
        ddp_recipes.run(OmegaConf.load(theirs / ".hydra" / "config.yaml"))
    assert not witness.exists()
