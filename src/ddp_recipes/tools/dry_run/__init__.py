"""``plan=true``: the run on paper."""

from ddp_recipes.tools.dry_run.plan import make_plan, plan

__all__ = ["make_plan", "plan"]
