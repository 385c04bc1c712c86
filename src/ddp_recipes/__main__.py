"""``python -m ddp_recipes``: the same as ``train.py``, from any folder."""

from ddp_recipes.main import main


def command() -> None:
    """``ddp-recipes``."""
    main(leaves=True)


if __name__ == "__main__":
    command()
