"""``python -m ddp_recipes``: the same as ``train.py``, from any folder."""

from ddp_recipes.main import main

if __name__ == "__main__":
    main()
