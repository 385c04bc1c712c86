"""Every yaml composes and its objects are made; sizes, tasks and defaults are those that were promised.

Tests run over the files that are there, so a new one is covered when it is added.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ddp_recipes.build.observers import make_logger
from ddp_recipes.build.recipe import Recipe, make_recipe
from ddp_recipes.build.run import make_optimizers_and_schedules, make_run, make_stop_controller
from ddp_recipes.config import compose
from ddp_recipes.config.compose import resolve
from ddp_recipes.errors import RequestError
from ddp_recipes.loggers import Logger
from ddp_recipes.main import CONF
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.control import Control
from ddp_recipes.runtime.job import Job
from ddp_recipes.runtime.world import World
from helpers.marks import needs, slow_but
from helpers.trackers import QUIET

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "conf"


def options(group: str) -> list[str]:
    found = sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))
    assert found, f"no yaml in {FOLDER / group}"
    return found


def takes_images(group: str, option: str) -> bool:
    return "in_channels" in (FOLDER / group / f"{option}.yaml").read_text()


MODELS = options("model")
# Of lightning a module brings the data sets; gpt takes what text gives (tests/distributed/test_language_model.py); a
# stream has shards, and a mixture sets (tests/streams).
DATA = [name for name in options("data") if name not in ("lightning", "mixture", "stream", "text")]
VECTOR_MODELS = [name for name in MODELS if name != "gpt" and not takes_images("model", name)]
IMAGE_DATA = [name for name in DATA if takes_images("data", name) and name != "csv"]
PAIRS = sorted(
    {(model, data) for model in VECTOR_MODELS for data in ("digits", "random")}
    | {(model, "fake_images") for model in MODELS if model != "gpt"}
    | {(model, data) for model in ("linear", "toy_mp") for data in DATA}
    | {("resnet18", data) for data in IMAGE_DATA}
)


@pytest.fixture
def files(tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """What makes a data choice read the few samples of ``tiny_data``, or make few and small ones of its own."""
    from torchvision.datasets import CIFAR10

    # Files of our own have other checksums.
    for name in ("train_list", "test_list"):
        monkeypatch.setattr(CIFAR10, name, [(file, None) for file, _ in getattr(CIFAR10, name)])
    monkeypatch.setitem(CIFAR10.meta, "md5", None)

    def overrides(data: str) -> list[str]:
        if data == "csv":
            return [f"data.path={tiny_data / 'table.csv'}", "data.inputs=[a,b]", "data.target=kind"]
        if data == "image_folder":
            return [f"data.root={tiny_data}", "data.image_size=32"]
        small = {
            "random": ["data.num_samples=40", "data.val_samples=10"],
            "fake_images": ["data.num_samples=20", "data.val_samples=10", "data.image_size=32"],
        }
        return small.get(data, [f"data.root={tiny_data}"])

    return overrides


def composed(*overrides: str) -> DictConfig:
    """Compose with Hydra's own section."""
    with compose.session(CONF) as hydra:
        return compose.compose(hydra, "train", ["launcher.device=cpu", *overrides])


def without_hydra(config: DictConfig) -> dict[str, Any]:
    return resolve(OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"]))


def config_of(*overrides: str) -> dict[str, Any]:
    return without_hydra(composed(*overrides))


def made(config: Mapping[str, Any], folder: Path) -> Recipe:
    """Make all objects of a config, as its rank 0 of two would, or its only rank."""
    single = config["strategy"]["processes"] == 1
    recipe = make_recipe(Job(config, folder), World() if single else World(0, 2, 0, 2), Control(World(), None, 10))
    logger = make_logger(recipe.loggers, folder, purge_step=None)
    assert isinstance(logger, Logger)
    logger.close()
    return recipe


def assert_learns(recipe: Recipe) -> None:
    """One training step and one of validation, with two samples: they fit the model, the loss and each other.

    A rank that computes no shard of a batch has one sample, which does not count.
    """
    recipe.load_weights()
    for split, loader in recipe.loaders.items():
        first = next(loader.batches(0))
        inputs, targets = first.data
        batch = (inputs[:2], targets[:2])
        step = recipe.task if split == "train" else recipe.task.validation_step
        output = step(batch)
        assert torch.isfinite(output.loss)
        assert output.weight in (None, 2 if first.num_samples else 1)  # None: as many as the batch is made of
        if split == "train":
            output.loss.backward()
            optimizers, schedules = make_optimizers_and_schedules(recipe.job.config, recipe.task, True, 10, 10)
            optimizers[0].step()
            schedules[0].scheduler.step()
    assert all(parameter.grad is not None for parameter in recipe.task.parameters())


@pytest.mark.parametrize(("name", "fused"), [("AdamW", True), ("Adagrad", True), ("RMSprop", False)])
def test_an_optimizer_of_torch_updates_all_parameters_in_one_kernel_where_it_can(
    name: str, fused: bool, tmp_path: Path
) -> None:
    config = config_of("model=toy", "data=random", "data.batch_size=2", "logger=none", "strategy=single")
    recipe = made({**config, "optimizer": {"_target_": f"torch.optim.{name}", "lr": 0.1}}, tmp_path)
    (optimizer,), _ = make_optimizers_and_schedules(recipe.job.config, recipe.task, True, 10, 10)
    assert bool(optimizer.param_groups[0].get("fused")) == fused


# --- each yaml -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "data"), slow_but(PAIRS[::3], PAIRS))
def test_any_model_with_a_data_set_it_fits(
    model: str, data: str, files: Callable[[str], list[str]], tmp_path: Path
) -> None:
    config = config_of(f"model={model}", f"data={data}", "data.batch_size=2", "logger=none", *files(data))
    recipe = made(config, tmp_path)
    assert_learns(recipe)
    assert len(recipe.devices.own) == config["model"]["num_devices"] == (2 if model.endswith("_mp") else 1)
    inputs, _ = recipe.loaders["train"].sample()
    assert inputs[0].numel() == config["data"]["in_features"]
    recipe.task.eval()
    outputs = recipe.task.predict_step(recipe.loaders["train"].sample())
    assert outputs.shape == (1, config["data"]["out_features"])


LIGHTNING = """
import torch

class Module(torch.nn.Linear):
    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return torch.nn.functional.cross_entropy(self(inputs), targets)

class WithLoss(torch.nn.Linear):
    def forward(self, inputs, targets):
        return torch.nn.functional.cross_entropy(super().forward(inputs), targets)
"""

GROUPS = [
    "optimizer",
    "scheduler",
    "strategy",
    "task",
    "logger",
    "checkpoint",
    "callbacks",
    "debug",
    "launcher",
    "trainer",
]


PACKAGES = {"mlflow": "mlflow", "wandb": "wandb", "sample_predictions": "matplotlib"}  # that an option needs
OPTIONS_OF_GROUPS = [
    pytest.param(
        group,
        option,
        marks=[*([needs(PACKAGES[option])] if option in PACKAGES else []), *([pytest.mark.slow] if number % 3 else [])],
    )
    for number, (group, option) in enumerate((group, option) for group in GROUPS for option in options(group))
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow")  # of what MLflow does with SQLAlchemy
@pytest.mark.parametrize(("group", "option"), OPTIONS_OF_GROUPS)
def test_each_option(group: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    special = {
        "regression": ["data=random", "data.num_samples=40"],
        "lightning": ["model=linear", "model._target_=lightning_like.Module"],
        "model_loss": ["model=linear", "model._target_=lightning_like.WithLoss"],
        "ddp_pipeline": ["data.batch_size=4"],  # a sample for each micro-batch
        "gradient_accumulation": ["callbacks.gradient_accumulation.schedule={1: 2}"],
    }
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "lightning_like.py").write_text(LIGHTNING)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    folder = tmp_path / "run"
    recipe = made(config_of(f"{group}={option}", "data.batch_size=2", *special.get(option, [])), folder)
    assert_learns(recipe)
    written = {path.relative_to(folder).parts[0] for path in folder.rglob("*")}
    logger = option if group == "logger" else "tensorboard"
    assert written == {logger} - {"none"}


# Those on streams need packed data, which the commands of docs/streams.md make.
EXPERIMENTS = [each for each in options("experiment") if not each.startswith("stream_")]


@pytest.mark.parametrize("experiment", slow_but(EXPERIMENTS[::3], EXPERIMENTS))
def test_each_experiment(
    experiment: str, files: Callable[[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # paths in experiments are relative to the root
    choices = OmegaConf.to_container(composed(f"experiment={experiment}").hydra.runtime.choices)
    assert isinstance(choices, dict)
    own = (FOLDER / "experiment" / f"{experiment}.yaml").read_text()
    # What an experiment sets itself is left as it is: only where its files are is said here.
    small = [one for one in files(str(choices["data"])) if one.split("=")[0].split(".")[1] + ":" not in own]
    recipe = made(config_of(f"experiment={experiment}", *small), tmp_path)
    assert_learns(recipe)


def test_each_folder_of_conf_is_covered() -> None:
    groups = {path.name for path in FOLDER.iterdir() if path.is_dir() and any(path.glob("*.yaml"))}
    assert groups - {"base"} == {*GROUPS, "model", "data", "experiment"} & groups


def test_each_yaml_says_what_it_is() -> None:
    for path in FOLDER.rglob("*.yaml"):
        lines = path.read_text().splitlines()
        described = lines[1] if lines[0].startswith("# @package") else lines[0]
        assert described.startswith("# "), path


# --- what follows from what ------------------------------------------------------------------------------------------


def test_the_task_follows_the_data() -> None:
    tasks = {}
    for data in ("digits", "breast_cancer", "random", "mnist", "fake_images"):
        tasks[data] = composed(f"data={data}").hydra.runtime.choices.task
    assert tasks == {
        "digits": "classification",
        "breast_cancer": "classification",
        "random": "regression",
        "mnist": "classification",
        "fake_images": "classification",
    }


def test_the_task_can_be_chosen() -> None:
    assert config_of("data=random", "task=classification")["task"]["loss"]["_target_"] == "torch.nn.CrossEntropyLoss"
    assert config_of("task=regression")["task"]["loss"]["_target_"] == "torch.nn.MSELoss"


SIZES = [
    (["data=digits"], (64, 10)),
    (["data=breast_cancer"], (30, 2)),
    (["data=random"], (10, 5)),
    (["data=random", "data.in_features=7", "data.out_features=3"], (7, 3)),
    (["data=mnist"], (784, 10)),
    (["data=cifar10"], (3072, 10)),
    (["data=fake_images", "data.image_size=8", "data.in_channels=2", "data.out_features=4"], (128, 4)),
]


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    slow_but(SIZES[::3], SIZES),
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_sizes_follow_the_data(overrides: list[str], sizes: tuple[int, int]) -> None:
    for model in VECTOR_MODELS:
        config = config_of(f"model={model}", *overrides)
        assert (config["model"]["in_features"], config["model"]["out_features"]) == sizes


def test_image_models_follow_the_images() -> None:
    config = config_of("model=resnet18", "data=mnist")
    assert (config["model"]["in_channels"], config["model"]["num_classes"]) == (1, 10)


@pytest.mark.slow
def test_csv_counts_its_inputs() -> None:
    columns = ["data.path=t.csv", "data.inputs=[a,b,c]", "data.target=y", "data.out_features=1"]
    assert config_of("data=csv", *columns)["data"]["in_features"] == 3


@pytest.mark.slow
def test_schedules_follow_the_length_of_the_run(tmp_path: Path) -> None:
    def schedule(*overrides: str) -> Any:
        config = config_of("data=random", "data.num_samples=64", "data.batch_size=8", "logger=none", *overrides)
        recipe = made(config, tmp_path)
        return make_run(recipe, make_stop_controller(recipe)).schedules[0].scheduler

    assert schedule("scheduler=cosine", "trainer.max_epochs=3").T_max == 3 * 4
    assert schedule("scheduler=cosine", "scheduler.interval=epoch", "trainer.max_epochs=3").T_max == 3
    assert schedule("scheduler=cosine", "trainer.max_epochs=3", "trainer.max_steps=5").T_max == 5
    assert schedule("scheduler=cosine", "trainer.accumulate_grad_batches=3", "trainer.max_epochs=3").T_max == 3 * 2
    assert schedule("scheduler=cosine", "scheduler.T_max=100").T_max == 100
    assert schedule("scheduler=one_cycle", "trainer.max_epochs=3").total_steps == 3 * 4
    warmed = schedule("scheduler=warmup_cosine", "scheduler.milestones=[5]", "trainer.max_epochs=3")
    assert [warmed._schedulers[0].total_iters, warmed._schedulers[1].T_max] == [5, 3 * 4 - 5]
    assert schedule("scheduler=warmup_cosine", "trainer.max_epochs=3")._schedulers[1].T_max == 1  # it is never reached
    chained = "schedulers: [{_target_: torch.optim.lr_scheduler.CosineAnnealingLR, T_max: null}]"
    chained = schedule("~scheduler", f"+scheduler={{_target_: torch.optim.lr_scheduler.ChainedScheduler, {chained}}}")
    assert chained._schedulers[0].T_max == 10
    unlimited = ("trainer.max_epochs=-1", "trainer.max_time=60")
    with pytest.raises(RequestError, match=r"scheduler\.schedulers\.1\.T_max follows the length of the run, which is"):
        schedule("scheduler=warmup_cosine", *unlimited)
    with pytest.raises(RequestError, match=r"scheduler\.schedulers\.0 does not fit torch\S+LinearLR: .* argument 'x'"):
        schedule("scheduler=warmup_cosine", "+scheduler.schedulers.0.x=1")
    with pytest.raises(RequestError, match=r"scheduler\.T_max follows the length of the run, which is not known"):
        schedule("scheduler=cosine", "trainer.max_epochs=-1", "trainer.max_time=60")


# --- the defaults that CONTRACT names --------------------------------------------------------------------------------

DEFAULTS: dict[str, Any] = {
    "seed": 42,
    "mode": "fit",
    "ckpt_path": None,
    "plan": False,
    "check": None,
    "model.num_devices": 1,
    "model.split": None,
    "model.micro_batches": 1,
    "data.root": "data",
    "data.in_features": 64,
    "data.out_features": 10,
    "data.global_batch_size": None,
    "data.num_workers": 0,
    "data.drop_last": False,
    "launcher.nproc_per_node": "auto",
    "launcher.nnodes": 1,
    "launcher.max_restarts": 0,
    "launcher.timeout_s": 1800,
    "launcher.backend": "auto",
    "launcher.device": "auto",
    "trainer.accumulate_grad_batches": 1,
    "trainer.gradient_clip_val": None,
    "trainer.gradient_clip_algorithm": "norm",
    "trainer.precision": "32-true",
    "trainer.deterministic": False,
    "trainer.detect_anomaly": False,
    "trainer.compile": False,
    "trainer.progress": "auto",
}

THERE = [
    "optimizer.lr",
    "data.batch_size",
    *(
        f"trainer.{name}"
        for name in (
            "max_epochs",
            "max_steps",
            "max_time",
            "log_every_n_steps",
            "val_check_interval",
            "check_val_every_n_epoch",
            "num_sanity_val_steps",
            "limit_train_batches",
            "limit_val_batches",
            "overfit_batches",
            "fast_dev_run",
        )
    ),
    *(
        f"checkpoint.{name}"
        for name in ("every_n_steps", "every_n_epochs", "monitor", "mode", "save_top_k", "save_last", "async_save")
    ),
    *(
        f"strategy.{name}"
        for name in (
            "bucket_cap_mb",
            "find_unused_parameters",
            "static_graph",
            "gradient_as_bucket_view",
            "broadcast_buffers",
            "shared_memory",
            "sync_batchnorm",
            "comm_hook",
        )
    ),
]

GROUP_DEFAULTS = {
    "data": "digits",
    "strategy": "ddp",
    "launcher": "auto",
    "trainer": "default",
    "logger": "tensorboard",
    "checkpoint": "default",
}

OPTIONS = {
    "model": {"linear", "mlp", "toy", "toy_mp", "resnet18", "resnet50", "resnet50_mp"},
    "data": {
        "digits",
        "breast_cancer",
        "random",
        "mnist",
        "fashion_mnist",
        "cifar10",
        "fake_images",
        "image_folder",
        "csv",
    },
    "task": {"classification", "regression"},
    "optimizer": {"sgd", "adam", "adamw"},
    "scheduler": {"constant", "cosine", "warmup_cosine", "step", "one_cycle"},
    "strategy": {"single", "dp", "ddp"},
    "launcher": {"auto", "local", "env"},
    "trainer": {"default"},
    "logger": {"tensorboard", "csv", "none"},
    "checkpoint": {"default", "none"},
    "debug": {"fast_dev_run", "overfit", "profiler"},
}


def test_promised_keys_have_their_defaults() -> None:
    with compose.session(CONF) as hydra:
        config = compose.compose(hydra, "train", [])
    plain = without_hydra(config)

    def value(key: str) -> Any:
        found: Any = plain
        for name in key.split("."):
            assert name in found, key
            found = found[name]
        return found

    assert {key: value(key) for key in DEFAULTS} == DEFAULTS
    for key in THERE:
        value(key)
    assert {group: config.hydra.runtime.choices[group] for group in GROUP_DEFAULTS} == GROUP_DEFAULTS
    assert config_of("model=toy_mp")["model"]["num_devices"] == 2


@pytest.mark.parametrize("group", OPTIONS)
def test_promised_options_are_there(group: str) -> None:
    assert OPTIONS[group] <= set(options(group))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=toi", "model=toi: there is no such option. Options of model: gpt, linear, mlp, "),
        ("model=toi", "Did you mean 'toy'?"),
        ("optimiser=sgd", "Did you mean 'optimizer'?"),
        (
            "trainer.max_epoch=3",
            "trainer.max_epoch=3: there is no key trainer.max_epoch. Did you mean 'trainer.max_epochs'?",
        ),
        ("sead=3", "Did you mean 'seed'?"),
        ("data.batch_sise=3", "Did you mean 'data.batch_size'?"),
    ],
)
def test_unknown_names_get_the_nearest(override: str, message: str) -> None:
    with pytest.raises(RequestError) as refusal:
        composed(override)
    assert message in str(refusal.value)


def test_an_own_group_option_is_found(tmp_path: Path, run: Callable[..., Summary]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(
        "_target_: torch.nn.Linear\nin_features: ${data.in_features}\nout_features: ${data.out_features}\n"
    )
    summary = run("model=mine", config_dir=str(tmp_path))
    assert summary["status"] == "finished"
    assert summary["devices_per_replica"] == 1, "num_devices may be left out"


def test_composing_leaves_hydra_as_it_was() -> None:
    config_of()
    assert not HydraConfig.initialized()


class Color(Enum):
    RED = 1


@dataclass
class Structured:
    """What a user of Hydra's structured configs might have."""

    root: Path = Path("a/b")
    color: Color = Color.RED


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({0: b"abc"}, r"model\.names\.0 is of the type bytes\. Allowed: texts, numbers"),
        ({"a": [2**63]}, r"model\.names\.a is an integer of 65 bits\. Allowed: those of 64 bits"),
    ],
)
def test_what_no_other_process_could_be_told_is_refused(given: dict[Any, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        resolve(OmegaConf.create({"model": {"names": given}}))


def test_paths_and_enums_of_structured_configs_are_texts() -> None:
    structured = OmegaConf.structured(Structured)
    found = resolve(OmegaConf.create({"data": {"own": structured, "all": [Path("a"), "${data.own.root}"]}}))
    assert found["data"] == {"own": {"root": "a/b", "color": "RED"}, "all": ["a", "a/b"]}
