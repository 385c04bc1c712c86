"""Train what conf/config.yaml says: ``python train.py optimizer.lr=0.1``."""

from pathlib import Path

from ddp_recipes.main import main

if __name__ == "__main__":
    main(str(Path(__file__).parent / "conf"), "config", leaves=True)
