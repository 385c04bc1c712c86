"""The data sets of the recipes. A function here and a yaml in ``conf/data`` make ``data=<name>``.

Importing this package imports neither torchvision nor scikit-learn: each function imports what it needs.
"""

from ddp_recipes.datasets.images import cifar10, fashion_mnist, image_folder, mnist
from ddp_recipes.datasets.memory import InMemory, balanced
from ddp_recipes.datasets.synthetic import fake_images, random_regression
from ddp_recipes.datasets.table import ImageTable, csv_table
from ddp_recipes.datasets.tabular import breast_cancer, digits
from ddp_recipes.datasets.transforms import Chain, ScaleAndNormalize
from ddp_recipes.datasets.windows import Prompts, Windows, text

__all__ = [
    "Chain",
    "ImageTable",
    "InMemory",
    "Prompts",
    "ScaleAndNormalize",
    "Windows",
    "balanced",
    "breast_cancer",
    "cifar10",
    "csv_table",
    "digits",
    "fake_images",
    "fashion_mnist",
    "image_folder",
    "mnist",
    "random_regression",
    "text",
]
