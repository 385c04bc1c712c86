"""The warm ranks of a process of tests, and recipes that run on them."""

from functools import partial

from ddp_recipes import testing

RANKS = testing.WarmRanks()
run_recipe = partial(testing.run_recipe, ranks=RANKS)
