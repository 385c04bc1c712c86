"""Compose a config and train: ``python train.py strategy=ddp model=toy_mp``."""

from ddp_recipes.main import main

if __name__ == "__main__":
    main(leaves=True)
