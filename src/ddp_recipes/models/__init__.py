"""The models of the recipes. A class here and a yaml in ``conf/model`` make ``model=<name>``."""

from typing import TYPE_CHECKING

from ddp_recipes._lazy import on_use

if TYPE_CHECKING:
    from ddp_recipes.models.basic import MLP as MLP, Linear as Linear, Toy as Toy, ToyMP as ToyMP
    from ddp_recipes.models.gpt import GPT as GPT
    from ddp_recipes.models.resnet import (
        ResNet50MP as ResNet50MP,
        resnet18 as resnet18,
        resnet50 as resnet50,
        resnet50_mp as resnet50_mp,
    )

_HOMES = {
    "GPT": ".gpt",
    "MLP": ".basic",
    "Linear": ".basic",
    "ResNet50MP": ".resnet",
    "Toy": ".basic",
    "ToyMP": ".basic",
    "resnet18": ".resnet",
    "resnet50": ".resnet",
    "resnet50_mp": ".resnet",
}
__all__ = [*_HOMES]
__getattr__ = on_use(__name__, _HOMES)
