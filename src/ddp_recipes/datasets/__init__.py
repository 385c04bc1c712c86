"""The data sets of the recipes. A function here and a yaml in ``conf/data`` make ``data=<name>``.

Importing this package imports neither torchvision nor scikit-learn: each function imports what it needs.
"""

from typing import TYPE_CHECKING

from ddp_recipes._lazy import on_use

if TYPE_CHECKING:
    from ddp_recipes.datasets.images import (
        cifar10 as cifar10,
    )
    from ddp_recipes.datasets.images import (
        fashion_mnist as fashion_mnist,
    )
    from ddp_recipes.datasets.images import (
        image_folder as image_folder,
    )
    from ddp_recipes.datasets.images import (
        mnist as mnist,
    )
    from ddp_recipes.datasets.memory import InMemory as InMemory
    from ddp_recipes.datasets.memory import balanced as balanced
    from ddp_recipes.datasets.synthetic import fake_images as fake_images
    from ddp_recipes.datasets.synthetic import random_regression as random_regression
    from ddp_recipes.datasets.table import ImageTable as ImageTable
    from ddp_recipes.datasets.table import csv_table as csv_table
    from ddp_recipes.datasets.tabular import breast_cancer as breast_cancer
    from ddp_recipes.datasets.tabular import digits as digits
    from ddp_recipes.datasets.transforms import Chain as Chain
    from ddp_recipes.datasets.transforms import ScaleAndNormalize as ScaleAndNormalize
    from ddp_recipes.datasets.windows import Prompts as Prompts
    from ddp_recipes.datasets.windows import Windows as Windows
    from ddp_recipes.datasets.windows import text as text

_HOMES = {
    "Chain": ".transforms",
    "ImageTable": ".table",
    "InMemory": ".memory",
    "Prompts": ".windows",
    "ScaleAndNormalize": ".transforms",
    "Windows": ".windows",
    "balanced": ".memory",
    "breast_cancer": ".tabular",
    "cifar10": ".images",
    "csv_table": ".table",
    "digits": ".tabular",
    "fake_images": ".synthetic",
    "fashion_mnist": ".images",
    "image_folder": ".images",
    "mnist": ".images",
    "random_regression": ".synthetic",
    "text": ".windows",
}
__all__ = [*_HOMES]
__getattr__ = on_use(__name__, _HOMES)
