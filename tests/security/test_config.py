"""A config calls nothing but what it may, whoever wrote it: what is refused is not even imported."""

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, strategies as st
from omegaconf import OmegaConf

import ddp_recipes
from ddp_recipes import RequestError, datasets, models
from ddp_recipes.build import instantiate
from ddp_recipes.build.instantiate import make
from ddp_recipes.config.kinds import FUNCTIONS, check_calls, check_found, check_hydra
from ddp_recipes.config.targets import check, is_own
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
from hydra.utils import get_object
from torch import compile, load, nn, relu
from torch.utils.data import DataLoader

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
    for nothing in ([], "", "os.mkdir"):
        looked_up = {"_target_": "hydra.utils.get_method", "_args_": nothing}
        assert "model.more.path=None is no dotted name" in refusal(
            {**composed, "model": {"_target_": "torch.nn.Sequential", "more": looked_up}}
        )
    for node in calls("os.mkdir"):
        assert "os.mkdir" in refusal({**composed, "model": node})
    assert not (own / "made").exists()


# Each lies where much may be named, and is a method, a function that is not listed, or a class of no kind.
DECIDED_BY_KIND = [
    *(
        "own.compile",
        "own.DataLoader",
        "own.get_object",
        "torch.compile",
        "torch.set_default_device",
        "torch.nn.Linear.to",
    ),
    *("torch.nn.Module.load_state_dict", "torch.nn.Module.register_module", "torch.nn.init.math.log.__call__"),
    *(
        "torch.nn.utils.stateless.functional_call",
        "torch.nn.modules.module.warnings.warn",
        "torch.utils.data.DataLoader",
    ),
    *("torch.utils.data.get_worker_info", "torch.nn.parallel.replicate", "torch.optim.swa_utils.update_bn"),
    "torch.nn.utils._deprecation_utils.lazy_deprecated_import",  # imports any module
    *(
        "torchvision.models._api.WeightsEnum.get_state_dict",
        "torchvision.models._api.Weights",
        "torchvision.models.Weights",
    ),
    *("torchvision.models.ResNet18_Weights.DEFAULT.get_state_dict", "torchvision.models.resnet.Weights"),
    *("torchvision.io.write_png", "torchmetrics.Metric.reset", "torchmetrics.utilities.prints.rank_zero_info"),
    *("numpy.fromfile", "numpy.random.seed", "sklearn.datasets.fetch_openml", "sklearn.datasets.get_data_home"),
    *("timm.models._helpers.load_state_dict", "timm.models.load_checkpoint", "timm.data.create_loader"),
    *("timm.models.load_model_config_from_hf", "timm.models.register_model"),
    *("transformers.models.auto.configuration_auto.get_class_from_dynamic_module", "transformers.pipeline"),
    *(
        "transformers.dynamic_module_utils.get_class_from_dynamic_module",
        "transformers.Trainer",
        "transformers.set_seed",
    ),
    *(
        "transformers.BertModel.save_pretrained",
        "transformers.AutoModel.register",
        "peft.AutoPeftModel.from_pretrained",
    ),
    *("datasets.Dataset.save_to_disk", "datasets.Dataset.from_generator", "datasets.disable_caching"),
    *("lightning.Trainer", "lightning.pytorch.callbacks.Callback.setup", "lightning.pytorch.Trainer.fit"),
    *("ddp_recipes.datasets.table.Path", "ddp_recipes.datasets.table.csv.reader"),
    *("ddp_recipes.run", "ddp_recipes.export", "ddp_recipes.datasets.csv_table.__call__", "ddp_recipes.tasks.Task.to"),
]
# What configs call of packages, and what makes a name of it a node.
CALLED = [
    *(
        "ddp_recipes.datasets.digits",
        "ddp_recipes.models.resnet18",
        "ddp_recipes.tasks.Accuracy",
        "own.Net",
        "own.relu",
    ),
    *(
        "ddp_recipes.callbacks.EMA",
        "ddp_recipes.loggers.CSVLogger",
        "ddp_recipes.strategies.DDPPipeline",
        "torch.device",
    ),
    *(
        "torch.nn.Linear",
        "torch.nn.Sequential",
        "torch.nn.functional.gelu",
        "torch.relu",
        "torch.tensor",
        "torch.float32",
    ),
    *("torch.optim.AdamW", "torch.optim.lr_scheduler.ReduceLROnPlateau", "torch.optim.lr_scheduler.LambdaLR"),
    *("torch.utils.data.ConcatDataset", "torch.utils.data.default_collate", "torch.distributions.Normal"),
    *("torch.nn.utils.parametrizations.weight_norm", "torchvision.models.resnet18", "torchvision.models.get_model"),
    *("torchvision.models.detection.fasterrcnn_resnet50_fpn", "torchvision.models.ResNet18_Weights.DEFAULT"),
    *("torchvision.models.quantization.resnet18", "torchvision.datasets.CIFAR10", "torchvision.ops.sigmoid_focal_loss"),
    *(
        "torchvision.transforms.ToTensor",
        "torchvision.transforms.v2.Resize",
        "torchvision.transforms.InterpolationMode",
    ),
    *("torchmetrics.MetricCollection", "torchmetrics.classification.MulticlassF1Score", "numpy.array", "numpy.float32"),
    *("sklearn.datasets.load_iris", "sklearn.datasets.make_moons", "sklearn.preprocessing.StandardScaler"),
    *(
        "timm.create_model",
        "timm.models.resnet18",
        "timm.optim.create_optimizer_v2",
        "timm.optim.Lamb",
        "timm.data.Mixup",
    ),
    *("timm.scheduler.CosineLRScheduler", "timm.loss.SoftTargetCrossEntropy", "timm.data.create_transform"),
    *("transformers.BertConfig", "transformers.BertForSequenceClassification", "transformers.DataCollatorWithPadding"),
    *("transformers.AutoModel.from_pretrained", "transformers.AutoModelForSequenceClassification.from_pretrained"),
    *("transformers.BertModel.from_pretrained", "transformers.AutoModelForCausalLM.from_config"),
    *("transformers.AutoTokenizer.from_pretrained", "transformers.BertConfig.from_pretrained", "wandb.Settings"),
    *("transformers.AutoConfig.from_pretrained", "transformers.get_cosine_schedule_with_warmup", "peft.LoraConfig"),
    *("transformers.PreTrainedTokenizerFast", "transformers.BertTokenizerFast.from_pretrained", "peft.get_peft_model"),
    *("datasets.load_dataset", "datasets.Dataset.from_dict", "lightning.pytorch.callbacks.LearningRateMonitor"),
    *("lightning.pytorch.demos.boring_classes.BoringModel", "lightning.pytorch.demos.boring_classes.BoringDataModule"),
    *("collections.OrderedDict", "math.log", "datetime.timedelta", "functools.partial", "hydra.utils.get_class"),
]


@pytest.fixture
def there(own: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what skips a test of a name whose package is not installed."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as Lightning sets it when it is imported

    def check(name: str) -> None:
        if find_spec(name.partition(".")[0]) is None:
            pytest.skip("not installed")

    return check


@pytest.mark.slow
@pytest.mark.parametrize("name", DECIDED_BY_KIND)
def test_methods_and_unlisted_functions_of_packages_are_refused(name: str, there: Callable[[str], None]) -> None:
    there(name)
    for node in calls(name):
        with pytest.raises(RequestError, match=re.escape(name)):
            make(node, "model")
    with pytest.raises(RequestError, match=re.escape(name)):
        instantiate.locate(name, "data.collate_fn")


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLED)
def test_what_configs_call_of_packages_is_found(name: str, there: Callable[[str], None]) -> None:
    there(name)
    assert check_found(name, "model._target_") is not None


@pytest.mark.parametrize(
    ("section", "target", "kind"),
    [
        ("model", "torch.optim.SGD", "an optimizer, and model takes a module"),
        ("optimizer", "torch.nn.Linear", "a module, and optimizer takes an optimizer"),
        ("scheduler", "torch.nn.Linear", "a module, and scheduler takes a scheduler"),
        ("data.val.clean", "torch.optim.SGD", "an optimizer, and data.val.clean takes a data set"),
        ("callbacks.mine", "torch.nn.Linear", "a module, and callbacks.mine takes a callback"),
        ("data.weights", "torch.nn.Linear", "a module, and data.weights takes a value"),
        ("data.collate_fn", "torch.utils.data.TensorDataset", "a data set, and data.collate_fn takes a collate functi"),
    ],
)
def test_a_section_takes_classes_of_one_kind(section: str, target: str, kind: str) -> None:
    with pytest.raises(RequestError, match=re.escape(f"{section}._target_={target} is {kind}")):
        make({"_target_": target}, section)


SET, V1, V2 = "torch.utils.data.TensorDataset", "torchvision.transforms", "torchvision.transforms.v2"
A_SET = {"_target_": SET}
# Arguments by section: what each may hold, and what not.
ARGUMENTS: list[tuple[str, str, Any, bool]] = (
    [
        ("task", "ddp_recipes.tasks.Task", {"metrics": {"own": node}}, allowed)
        for node, allowed in [
            (A_SET, False),
            ({"_target_": "torch.nn.Linear"}, False),
            ({"_target_": "torch.optim.SGD"}, False),
            ({"_target_": "functools.partial", "_args_": [{**A_SET, "_partial_": True}]}, False),
            ({"_target_": "hydra.utils.get_class", "path": SET}, False),
            ({"_target_": "torchmetrics.MetricCollection", "metrics": {"f1": A_SET}}, False),
            ({"_target_": "torchmetrics.MetricCollection", "_args_": [[A_SET]]}, False),
            (
                {"_target_": "torchmetrics.MetricCollection", "metrics": {"f1": {"_target_": "torchmetrics.F1Score"}}},
                True,
            ),
            ({"_target_": "torchmetrics.ClasswiseWrapper", "metric": {"_target_": "torchmetrics.Accuracy"}}, True),
            (
                {"_target_": "torchmetrics.wrappers.BootStrapper", "base_metric": {"_target_": "torchmetrics.F1Score"}},
                True,
            ),
            (
                {
                    "_target_": "torchmetrics.image.FrechetInceptionDistance",
                    "feature": {"_target_": "torch.nn.Flatten"},
                },
                True,
            ),
            ({"_target_": "ddp_recipes.tasks.Accuracy"}, True),
            ({"_target_": "torch.nn.CrossEntropyLoss", "reduction": "none"}, True),
            ({"_target_": "torch.nn.CosineSimilarity"}, True),
            ({"_target_": "timm.loss.BinaryCrossEntropy", "reduction": "none"}, True),
            ({"_target_": "torch.nn.functional.cosine_similarity", "_partial_": True}, True),
            ({"_target_": "own.Net", "more": A_SET}, True),
        ]
    ]
    + [
        ("data.train", "torchvision.datasets.CIFAR10", {name: node}, allowed)
        for name, node, allowed in [
            ("transform", A_SET, False),
            ("target_transform", {"_target_": "torch.optim.SGD"}, False),
            ("transforms", {"_target_": f"{V2}.Compose", "transforms": [A_SET]}, False),
            ("transform", {"_target_": f"{V1}.Compose", "_args_": [[A_SET]]}, False),
            ("transform", [{"_target_": f"{V1}.ToTensor"}, A_SET], False),
            ("transform", {"_target_": "torch.utils.data.DistributedSampler"}, False),
            ("transform", {"_target_": "torchmetrics.F1Score"}, True),  # a module, as transforms are
            ("transform", [{"_target_": f"{V1}.ToTensor"}, {"_target_": f"{V1}.RandomHorizontalFlip"}], True),
            (
                "transform",
                {
                    "_target_": f"{V1}.Resize",
                    "size": 8,
                    "interpolation": {"_target_": V1 + ".InterpolationMode", "_args_": ["bilinear"]},
                },
                True,
            ),
            ("transforms", {"_target_": f"{V2}.Compose", "transforms": [{"_target_": f"{V2}.ToImage"}]}, True),
            (
                "transform",
                {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": f"{V1}.CenterCrop", "size": 8}]},
                True,
            ),
            ("transform", {"_target_": "timm.data.create_transform", "input_size": 8}, True),
            ("transform", {"_target_": "timm.data.random_erasing.RandomErasing"}, True),
            ("transform", {"_target_": "ddp_recipes.datasets.transforms.ScaleAndNormalize"}, True),
            ("transform", {"_target_": "torch.distributions.transforms.AffineTransform", "loc": 0, "scale": 2}, True),
            ("transform", {"_target_": "transformers.ViTImageProcessor"}, True),
            ("transform", {"_target_": "own.Net", "more": A_SET}, True),
        ]
    ]
    + [
        (
            "data.val.clean",
            "torch.utils.data.ConcatDataset",
            {"datasets": [{"_target_": owner, "transform": node}]},
            allowed,
        )
        for owner, node, allowed in [
            ("torchvision.datasets.CIFAR10", A_SET, False),
            ("torchvision.datasets.CIFAR10", {"_target_": f"{V1}.ToTensor"}, True),
            ("ddp_recipes.datasets.cifar10", A_SET, False),
            ("own.Net", {"_target_": "torch.distributions.Normal"}, True),  # what it means by that is the user's
        ]
    ]
    + [
        ("data.collate_fn", owner, {name: node}, allowed)
        for owner, name, node, allowed in [
            ("functools.partial", "_args_", [{**A_SET, "_partial_": True}], False),
            ("transformers.DataCollatorWithPadding", "tokenizer", A_SET, False),
            ("transformers.DataCollatorWithPadding", "tokenizer", {"_target_": "transformers.BertTokenizerFast"}, True),
            (
                "transformers.DataCollatorForSeq2Seq",
                "model",
                {"_target_": "transformers.BertModel", "config": {"_target_": "transformers.BertConfig"}},
                True,
            ),
            ("timm.data.FastCollateMixup", "mixup_alpha", 0.8, True),
            (
                "functools.partial",
                "_args_",
                [{"_target_": "torch.utils.data.default_collate", "_partial_": True}],
                True,
            ),
            ("own.Net", "more", A_SET, True),
        ]
    ]
)


@pytest.mark.slow
@pytest.mark.parametrize(("section", "owner", "argument", "allowed"), ARGUMENTS, ids=str)
def test_arguments_of_packages_take_classes_of_their_kind(
    section: str, owner: str, argument: dict[str, Any], allowed: bool, there: Callable[[str], None]
) -> None:
    for name in re.findall(r"'_target_': '([\w.]+)", str({"_target_": owner, **argument})):
        there(name)
    node = {"_target_": owner, **argument}
    if allowed:
        assert owner in check_calls(node, section)
        return
    with pytest.raises(RequestError, match=rf"is an? .*, and {section}\..* takes a "):
        make(node, section)


@pytest.mark.slow
@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "timm.data.ImageDataset", "_args_": [".", None, "train", "evil.pkl"]},
        {"_target_": "timm.create_model", "model_name": "resnet18", "pretrained_cfg": {"weights_only": False}},
        {"_target_": "datasets.load_dataset", "_args_": ["pandas"], "data_files": "evil.pkl"},
        {
            "_target_": "functools.partial",
            "_args_": [{"_target_": "datasets.load_dataset", "_partial_": True}, "pandas"],
        },
        {"_target_": "peft.LoraConfig", "megatron_config": {"a": 1}, "megatron_core": "evil"},
        {"_target_": "transformers.BertConfig", "attn_implementation": "somebody/kernels"},
        {
            "_target_": "transformers.AutoModel.from_pretrained",
            "_args_": ["x"],
            "model_kwargs": [{"trust_remote_code": 1}],
        },
    ],
    ids=str,
)
def test_arguments_that_run_what_files_bring_are_refused_by_name_and_by_position(
    node: dict[str, Any], there: Callable[[str], None]
) -> None:
    there(node["_target_"])
    for one in (node, {"_target_": "torch.nn.Sequential", "_args_": [node]}):
        with pytest.raises(RequestError, match=r"would run what a file brings|by name, not by position"):
            make(one, "model.parts")


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


@pytest.mark.parametrize("package", [datasets, models], ids=lambda package: package.__name__)
def test_functions_that_a_config_is_to_call_are_listed(package: ModuleType) -> None:
    functions = [name for name in package.__all__ if inspect.isfunction(getattr(package, name))]
    assert functions
    assert {*functions} <= {*FUNCTIONS[package.__name__].split()}
