"""The config groups as the package ``ddp_recipes.conf``: Hydra takes ``pkg://`` only to folders with this file."""
