"""Which modules are in training mode, and which in eval mode."""

from torch import nn


class Modes:
    """The mode of a module and of all in it, as it is now: parts may be frozen, a batch norm or a teacher."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._training = {each: each.training for each in module.modules()}

    def restore(self) -> None:
        """Put it back. A module's own ``train`` is called first: it may do more than to set the mode."""
        self._module.train()
        for each, training in self._training.items():
            if each.training != training:
                each.training = training
