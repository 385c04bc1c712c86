"""What is added to a run around its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_recipes.training.state import Run


class RunHooks:
    """What an extra does around the steps of a run, on every rank; by itself nothing.

    Unlike a callback it is not of the config, is in no checkpoint, and may look at all that the loop works with.
    """

    def on_step_start(self, run: Run) -> None:
        """Called before a step, when nothing of the one before is left to do."""

    def on_update(self, run: Run) -> None:
        """Called once a step counts; logging, validation and saving are still to be done."""

    def on_validated(self, run: Run) -> None:
        """Called after a validation, before a checkpoint is saved."""

    def on_step_end(self, run: Run) -> None:
        """Called when all that follows a step is done."""

    def on_fit_end(self, run: Run, reason: str) -> None:
        """Called after the last step, before the last checkpoint is saved; ``reason`` is why it was the last."""
