"""``plan=true``: a dry run of the recipe."""

from ddp_recipes.tools.dry_run.plan import make_plan, plan

__all__ = ["make_plan", "plan"]
