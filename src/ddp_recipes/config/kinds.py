"""What a config may call of packages, once it is found: classes by their kind, functions by name. Loads no torch.

What lies in the user's own folders, or in ``trusted_packages``, is called as it is.
"""

import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ddp_recipes._compat import hydra_
from ddp_recipes.config import targets
from ddp_recipes.config.targets import REMEDY, identity, is_never, is_own, matches
from ddp_recipes.errors import RequestError

# A class is of a kind when it, or one that it derives from, is defined there. It is made by its constructor.
KINDS = {
    "a module": "torch.nn.modules.module.Module ddp_recipes.tasks.task.*",
    "a metric": "torchmetrics.metric.Metric torchmetrics.collections.MetricCollection torchmetrics.wrappers.** "
    "ddp_recipes.tasks.metrics.Accuracy ddp_recipes.tasks.metrics.MeanAbsoluteError torch.nn.modules.loss.* "
    "torch.nn.modules.distance.* timm.loss.**",
    "a data set": "torch.utils.data.dataset.Dataset",
    "an optimizer": "torch.optim.optimizer.Optimizer",
    "a scheduler": "torch.optim.lr_scheduler.LRScheduler timm.scheduler.scheduler.Scheduler",
    "a callback": "ddp_recipes.callbacks.base.Callback lightning.pytorch.callbacks.callback.Callback "
    "pytorch_lightning.callbacks.callback.Callback",
    "a logger": "ddp_recipes.loggers.base.Logger lightning.fabric.loggers.logger.Logger "
    "lightning_fabric.loggers.logger.Logger",
    "a strategy": "ddp_recipes.strategies.**",
    "a data module": "lightning.pytorch.core.datamodule.LightningDataModule "
    "pytorch_lightning.core.datamodule.LightningDataModule",
    "a sampler": "torch.utils.data.sampler.Sampler",
    "a distribution": "torch.distributions.distribution.Distribution torch.distributions.transforms.Transform",
    "a transform": "ddp_recipes.datasets.transforms.* torchvision.transforms.transforms.* timm.data.transforms.* "
    "timm.data.auto_augment.* timm.data.random_erasing.* timm.data.mixup.* sklearn.base.TransformerMixin "
    "torch.distributions.transforms.Transform",
    "a collate function": "transformers.data.data_collator.* timm.data.mixup.FastCollateMixup",
    "a configuration": "transformers.configuration_utils.PretrainedConfig peft.config.PeftConfigMixin "
    "transformers.configuration_utils.PreTrainedConfig transformers.generation.configuration_utils.GenerationConfig "
    "transformers.utils.quantization_config.QuantizationConfigMixin",
    "a processor": "transformers.tokenization_utils_base.PreTrainedTokenizerBase "
    "transformers.feature_extraction_utils.FeatureExtractionMixin transformers.processing_utils.ProcessorMixin "
    "transformers.image_processing_base.ImageProcessingMixin",
    "a value": "enum.Enum numpy.generic torch.device torch.Generator torch.Size wandb.sdk.wandb_settings.Settings",
    "a part of a sweep": "hydra.plugins.plugin.Plugin hydra.experimental.callback.Callback "
    "optuna.samplers._base.BaseSampler optuna.pruners._base.BasePruner",
}
# The kind that each section takes.
PLACES = {
    "model": "a module",
    "task": "a module",
    "optimizer": "an optimizer",
    "scheduler": "a scheduler",
    "strategy": "a strategy",
    "callbacks.*": "a callback",
    "logger**": "a logger",
    "data.datamodule": "a data module",
    "data.sampler": "a sampler",
    "data.batch_sampler": "a sampler",
    "data.collate_fn": "a collate function",
    "data.weights": "a value",
    "data.group_by_length": "a value",
    **{f"data.{split}**": "a data set" for split in ("train", "val", "test", "predict")},
}
# The kinds that arguments take, by section and name, where it is not the user's own code that takes them; others any.
_PARTS = "a module or a processor or a configuration or a value"
ARGUMENTS = {
    "task/metrics.*": "a metric",
    "task/metrics.*.**": f"a metric or {_PARTS}",
    "data.collate_fn/**": f"a collate function or {_PARTS}",
    **{f"data.**/**transform{more}": f"a transform or {_PARTS}" for more in ("", "s", ".**", "s.**")},
}
# Functions, by the module that they are named by; ``torchvision.models`` and ``timm.models`` list their own.
FUNCTIONS = {
    "ddp_recipes.datasets": "balanced breast_cancer cifar10 csv_table digits fake_images fashion_mnist image_folder "
    "mnist random_regression text",
    "ddp_recipes.models": "resnet18 resnet50 resnet50_mp",
    "torch": "abs arange as_tensor clamp cos exp eye full linspace log log1p normal ones rand randn relu sigmoid sin "
    "softmax sqrt square tanh tensor zeros",
    "torch.special": "erf expit gammaln log_softmax logit softmax",
    "torch.linalg": "matrix_norm norm vector_norm",
    "torch.nn.functional": "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d "
    "adaptive_max_pool2d adaptive_max_pool3d alpha_dropout avg_pool1d avg_pool2d avg_pool3d binary_cross_entropy "
    "binary_cross_entropy_with_logits celu cosine_embedding_loss cosine_similarity cross_entropy ctc_loss dropout "
    "dropout1d dropout2d dropout3d elu embedding feature_alpha_dropout gaussian_nll_loss gelu glu group_norm "
    "gumbel_softmax hardshrink hardsigmoid hardswish hardtanh hinge_embedding_loss huber_loss instance_norm "
    "interpolate kl_div l1_loss layer_norm leaky_relu linear local_response_norm log_softmax logsigmoid "
    "margin_ranking_loss max_pool1d max_pool2d max_pool3d mish mse_loss multi_margin_loss multilabel_margin_loss "
    "multilabel_soft_margin_loss nll_loss normalize one_hot pad pairwise_distance pixel_shuffle pixel_unshuffle "
    "poisson_nll_loss prelu relu relu6 rms_norm rrelu scaled_dot_product_attention selu sigmoid silu smooth_l1_loss "
    "soft_margin_loss softmax softmin softplus softshrink softsign tanh tanhshrink threshold triplet_margin_loss",
    "torch.nn.init": "constant_ dirac_ eye_ kaiming_normal_ kaiming_uniform_ normal_ ones_ orthogonal_ sparse_ "
    "trunc_normal_ uniform_ xavier_normal_ xavier_uniform_ zeros_",
    "torch.nn.utils": "skip_init spectral_norm weight_norm",
    "torch.nn.utils.parametrizations": "orthogonal spectral_norm weight_norm",
    "torch.utils.data": "default_collate default_convert random_split",
    "torchvision.models": "get_model",
    "torchvision.ops": "complete_box_iou_loss distance_box_iou_loss generalized_box_iou_loss sigmoid_focal_loss",
    "torchvision.io": "decode_image read_image",
    "torchvision.datasets": "wrap_dataset_for_transforms_v2",
    "torchvision.datasets.folder": "default_loader",
    "numpy": "arange array asarray full linspace ones zeros",
    "numpy.random": "default_rng normal permutation rand randint randn uniform",
    "sklearn.datasets": "load_breast_cancer load_diabetes load_digits load_iris load_linnerud load_wine "
    "make_biclusters make_blobs make_checkerboard make_circles make_classification make_friedman1 make_friedman2 "
    "make_friedman3 make_gaussian_quantiles make_hastie_10_2 make_low_rank_matrix make_moons "
    "make_multilabel_classification make_regression make_s_curve make_sparse_coded_signal "
    "make_sparse_spd_matrix make_sparse_uncorrelated make_spd_matrix make_swiss_roll",
    "sklearn.metrics": "accuracy_score average_precision_score balanced_accuracy_score cohen_kappa_score f1_score "
    "fbeta_score hamming_loss jaccard_score log_loss matthews_corrcoef mean_absolute_error mean_squared_error "
    "precision_score r2_score recall_score roc_auc_score",
    "sklearn.model_selection": "train_test_split",
    "timm": "create_model",
    "timm.data": "create_dataset create_transform",
    "timm.optim": "create_optimizer_v2",
    "timm.scheduler": "create_scheduler_v2",
    "transformers": "default_data_collator get_constant_schedule get_constant_schedule_with_warmup "
    "get_cosine_schedule_with_warmup get_cosine_with_hard_restarts_schedule_with_warmup "
    "get_cosine_with_min_lr_schedule_with_warmup get_inverse_sqrt_schedule get_linear_schedule_with_warmup "
    "get_polynomial_decay_schedule_with_warmup get_scheduler get_wsd_schedule",
    "peft": "get_peft_model",
    "datasets": "concatenate_datasets interleave_datasets load_dataset load_from_disk",
}
# Constructors of another name, by where they are defined: no other method is called.
METHODS = """
transformers.*.Pre*.from_pretrained transformers.models.auto.*.*Auto*.from_pretrained
transformers.models.auto.auto_factory._BaseAutoModelClass.from_config
transformers.feature_extraction_utils.FeatureExtractionMixin.from_pretrained
transformers.image_processing_base.ImageProcessingMixin.from_pretrained
transformers.processing_utils.ProcessorMixin.from_pretrained peft.peft_model.PeftModel.from_pretrained
datasets.arrow_dataset.Dataset.from_csv datasets.arrow_dataset.Dataset.from_dict
datasets.arrow_dataset.Dataset.from_json datasets.arrow_dataset.Dataset.from_list
datasets.arrow_dataset.Dataset.from_parquet datasets.arrow_dataset.Dataset.from_text
""".split()  # noqa: SIM905


def check_found(target: str, key: str, place: str = "", more: Sequence[str] = ()) -> Any:
    """Return what a name stands for, and see that it may be called there: ``my_models.os.remove`` is ``os.remove``.

    Args:
        key: what has the name, for messages.
        place: its section; of an argument ``section/name``.
        more: patterns of names that may be given here, too.

    Raises:
        RequestError: it stands for what no config may call.
        ImportError, ValueError: there is no such thing.
    """
    found = hydra_.locate(target)
    if target in targets.LOOK_UPS:  # under its own name alone, by which the path is looked at
        return found
    parts = target.split(".")
    passed: Any = sys.modules[parts[0]]
    owner: Any = None
    for number, part in enumerate(parts[1:], 1):
        owner, full = passed, ".".join(parts[: number + 1])
        passed = getattr(owner, part) if hasattr(owner, part) else sys.modules[full]  # Hydra looks at plugins twice
        if isinstance(owner, ModuleType) and owner.__name__ != ".".join(parts[:number]):
            targets.check_name(".".join([owner.__name__, *parts[number:]]), f"{key}={target}", more)
        if not isinstance(passed, ModuleType) and callable(passed) and is_never(identity(passed)):
            raise RequestError(f"{key}={target} stands for {identity(passed)}, which no config may call. {REMEDY}")
    given = f"{key}={target}"
    if isinstance(found, type):
        _check_class(found, given, place)
    elif not _may_be_called(found, is_own(parts[0])):
        method = "a method" if isinstance(owner, type) else "not among the functions that a config may call"
        raise RequestError(f"{given} stands for {identity(found)}, {method}. {_OR_TRUST}")
    return found


_OR_TRUST = (
    "Of packages a config calls classes that make a module, data set, optimizer and the like, and the functions that "
    "are listed. Call it in a function of your own, and name that one; or, if you trust it, list its package in "
    "trusted_packages."
)


def _check_class(found: type, given: str, place: str) -> None:
    """Refuse a class of a package that is of no kind, or of another kind than its place takes."""
    name = identity(found)
    if _is_trusted(name):
        return
    bases = [f"{base.__module__}.{base.__qualname__}" for base in found.__mro__]
    kinds = [kind for kind, where in KINDS.items() if any(matches(base, where.split()) for base in bases)]
    if not kinds:
        raise RequestError(f"{given} stands for {name}, a class of no kind that a config makes. {_OR_TRUST}")
    table = ARGUMENTS if "/" in place else PLACES
    taken = next((each for where, each in table.items() if matches(place, (where,))), None)
    if taken is not None and not {*taken.split(" or ")} & {*kinds}:
        raise RequestError(f"{given} is {kinds[0]}, and {place.replace('/', '.')} takes {taken}.")


def _may_be_called(found: Any, own: bool) -> bool:
    """Whether what is no class may be called, or is a value, which is not."""
    if isinstance(found, ModuleType):
        return own
    if not callable(found) or _is_trusted(identity(found)):
        return True
    is_function = inspect.isroutine(found)
    if own and not is_function:  # an object that the user made, or an imported look-up of Hydra's
        return not identity(found).startswith("hydra.")
    if matches(identity(found), METHODS):
        return True
    name = getattr(found, "__name__", "")
    homes = (sys.modules.get(home) for home, names in FUNCTIONS.items() if name in names.split())
    return is_function and (any(getattr(home, name, None) is found for home in homes) or _is_builder(found))


def _is_builder(found: Any) -> bool:
    """Whether a function makes one of the models that torchvision or timm lists."""
    top, name = str(found.__module__).partition(".")[0], found.__name__
    models: Any = sys.modules.get(f"{top}.models")
    if top == "timm":
        return models.is_model(name) and models.model_entrypoint(name) is found
    return top == "torchvision" and any(models.get_model_builder(each) is found for each in models.list_models())


def _is_trusted(name: str) -> bool:
    """Whether something is the user's own, or makes values alone."""
    return _is_users(name) or matches(name, hydra_.OF_STANDARD_LIBRARY)


def _is_users(name: str) -> bool:
    """Whether something is defined in the user's own folders, or in a package that is trusted."""
    return targets.is_trusted(name) or (is_own(name.partition(".")[0]) and not is_never(name))


def check_call(target: str, found: Any, node: Mapping[str, Any], key: str) -> None:
    """See what a node gives to what it calls, by name and by position.

    Raises:
        RequestError: an argument would have it run what a file or a download brings.
    """
    arguments = {name: value for name, value in node.items() if name != "_args_"}
    given = node.get("_args_") or []
    if target == "functools.partial" and len(given) > 1:
        raise RequestError(f"{key}: arguments of functools.partial are given by name, not by position.")
    if given:
        with suppress(TypeError, ValueError):  # it has no signature, or does not take them, which the call says
            arguments |= inspect.signature(found).bind_partial(*given).arguments
    targets.check_arguments((target, identity(found)), arguments, key)


def check_hydra(config: DictConfig) -> None:
    """See the same of the section ``hydra``, whose plugins and callbacks Hydra makes, and of what a job's env_set sets.

    Raises:
        RequestError: says which name, and what to do.
    """
    trusted = OmegaConf.select(config, "trusted_packages")
    targets.trust(OmegaConf.to_container(trusted) if OmegaConf.is_config(trusted) else trusted)
    for where, target, _ in targets.in_hydra(config):
        targets.check_name(target, f"{where}._target_", targets.OF_HYDRA)
        with suppress(ImportError, ValueError):  # Hydra says so
            check_found(target, f"{where}._target_", more=targets.OF_HYDRA)


def check_calls(resolved: Any, section: str) -> list[str]:
    """Look at all that a node has called, once it is resolved and before anything is; return the names of it.

    Raises:
        RequestError: it names what no config may call there.
    """
    names: list[str] = []
    takers: dict[str, bool] = {}  # whether what takes arguments there is the user's own
    for where, target, node in targets.nodes(resolved, section):
        names.append(target)
        with suppress(ImportError, ValueError):  # Hydra says so
            of_users = next((own for at, own in reversed(takers.items()) if where.startswith(f"{at}.")), False)
            place = "" if of_users else _place_of(where, section)
            found = check_found(target, f"{where}._target_", place)
            takers[where] = _is_users(identity(found))
            check_call(target, found, node, where)
            names.append(identity(found))
            if target in targets.LOOK_UPS:
                path = targets.path_of(node)
                names += [path, identity(check_found(path, f"{where}.path", place))]
    return names


def _place_of(where: str, section: str) -> str:
    """Return the place of a node in a section: that, or of an argument ``section/name``."""
    return where if where == section else f"{section}/{where.removeprefix(f'{section}.')}"
