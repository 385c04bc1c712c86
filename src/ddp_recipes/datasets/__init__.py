"""The data sets of the recipes. A function here and a yaml in ``conf/data`` make ``data=<name>``.

Importing this package imports neither torchvision nor scikit-learn: each function imports what it needs.
"""

from typing import TYPE_CHECKING

from ddp_recipes._lazy import on_use

if TYPE_CHECKING:
    from ddp_recipes.datasets.images import (
        cifar10 as cifar10,
        fashion_mnist as fashion_mnist,
        image_folder as image_folder,
        mnist as mnist,
    )
    from ddp_recipes.datasets.memory import InMemory as InMemory, balanced as balanced
    from ddp_recipes.datasets.synthetic import fake_images as fake_images, random_regression as random_regression
    from ddp_recipes.datasets.table import ImageTable as ImageTable, csv_table as csv_table
    from ddp_recipes.datasets.tabular import breast_cancer as breast_cancer, digits as digits
    from ddp_recipes.datasets.transforms import Chain as Chain, ScaleAndNormalize as ScaleAndNormalize
    from ddp_recipes.datasets.windows import Prompts as Prompts, Windows as Windows, text as text

_HOMES = {
    ".images": ["cifar10", "fashion_mnist", "image_folder", "mnist"],
    ".memory": ["InMemory", "balanced"],
    ".synthetic": ["fake_images", "random_regression"],
    ".table": ["ImageTable", "csv_table"],
    ".tabular": ["breast_cancer", "digits"],
    ".transforms": ["Chain", "ScaleAndNormalize"],
    ".windows": ["Prompts", "Windows", "text"],
}
__all__ = [name for names in _HOMES.values() for name in names]
__getattr__ = on_use(__name__, _HOMES)
