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
    ".basic": ["Linear", "MLP", "Toy", "ToyMP"],
    ".gpt": ["GPT"],
    ".resnet": ["ResNet50MP", "resnet18", "resnet50", "resnet50_mp"],
}
__all__ = [name for names in _HOMES.values() for name in names]
__getattr__ = on_use(__name__, _HOMES)
