"""The models of the recipes. A class here and a yaml in ``conf/model`` make ``model=<name>``.

Importing this package does not import torchvision; asking for one of its ResNets does.
"""

from typing import TYPE_CHECKING, Any

from ddp_recipes.models.basic import MLP, Linear, Toy, ToyMP
from ddp_recipes.models.gpt import GPT

if TYPE_CHECKING:
    from ddp_recipes.models.resnet import ResNet50MP, resnet18, resnet50, resnet50_mp

__all__ = ["GPT", "MLP", "Linear", "ResNet50MP", "Toy", "ToyMP", "resnet18", "resnet50", "resnet50_mp"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ddp_recipes.models import resnet

    return getattr(resnet, name)
