"""What forward passes write to, as it was before a step: what a step that is cut off leaves there does not count."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from ddp_recipes._compat.torch_ import buffers_of, copy_each
from ddp_recipes.errors import RunFailed
from ddp_recipes.runtime.tensors import sums_of_bits
from ddp_recipes.tasks.task import outside
from ddp_recipes.tasks.written import seen_of

LOOKS = 3  # steps whose passes are looked at by what they leave in parameters that are not trained


class BeforeStep:
    """Keeps buffers, and those parameters that are not trained and that passes have been seen to write to.

    A moving average of the weights is one (a teacher, a target network). The others are not copied: they may be most of
    a model, as where a few are fine-tuned.
    """

    def __init__(self, module: nn.Module) -> None:
        every = [buffers_of(each) for each in module.modules()]
        self._places = [
            (own, name) for own in every for name, tensor in own.items() if tensor is not None and not tensor.is_meta
        ]
        self._parameters = {
            outside(name): each
            for name, each in module.named_parameters()
            if type(each.data) is Tensor and not each.is_meta
        }
        self._written: dict[str, nn.Parameter] = {}  # by passes, of those
        self._kept = [tensor.clone() for tensor in self._tensors()]
        self._seen: dict[str, tuple[int, int]] = {}  # of each parameter, as a step began; of none between steps
        self._sums: dict[str, int] = {}  # of the bits of those that are not trained, likewise
        self._looks = LOOKS

    def _tensors(self) -> list[Tensor]:
        buffers = [tensor for own, name in self._places if (tensor := own[name]) is not None]
        return [each.detach() for each in (*buffers, *self._written.values())]

    def keep(self) -> None:
        """Keep them as they are now."""
        if self._kept:
            copy_each(self._kept, self._tensors())

    def begin(self) -> None:
        """Keep them as a step begins."""
        self.keep()
        self._seen = {name: seen_of(each) for name, each in self._parameters.items()}
        frozen = [name for name, each in self._parameters.items() if not each.requires_grad]
        self._sums = self._bits(frozen) if self._looks else {}

    def end(self) -> None:
        """Keep them as a step has ended, which counts, with what it was seen to write to."""
        for name in self._changed():
            if not self._parameters[name].requires_grad:  # else the optimizer has
                self._written[name] = self._parameters[name]
                self._kept.append(torch.empty_like(self._parameters[name].detach()))
        self._seen, self._sums, self._looks = {}, {}, max(0, self._looks - 1)
        self.keep()

    def put_back(self) -> None:
        """Put them back as they were kept.

        Raises:
            RunFailed: a pass had written to another parameter, of which there is no copy.
        """
        changed = sorted(self._changed())
        self._seen, self._sums = {}, {}
        if self._kept:
            copy_each(self._tensors(), self._kept)
        if changed:
            raise RunFailed(
                f"A forward pass had written to the parameter {changed[0]} as a rank was lost, and there is no copy of "
                f"what it was before. All ranks start again."
            )

    def _changed(self) -> set[str]:
        """Return which parameters were written to since the step began, but those that are kept."""
        bits = self._bits(self._sums)
        changed = {name for name, before in self._seen.items() if seen_of(self._parameters[name]) != before}
        changed |= {name for name, before in self._sums.items() if bits[name] != before}
        return changed - self._written.keys()

    def _bits(self, names: Collection[str]) -> dict[str, int]:
        return dict(zip(names, sums_of_bits([self._parameters[name].detach() for name in names]), strict=True))
