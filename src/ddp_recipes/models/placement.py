"""What models that place themselves on several devices have in common."""

from collections.abc import Sequence

import torch

from ddp_recipes.errors import RequestError

Device = torch.device | str | int


def two_devices(model: str, devices: Sequence[Device]) -> tuple[torch.device, torch.device]:
    """Return ``devices`` as the two that a replica of ``model`` spans; the same one twice is fine.

    Raises ``RequestError`` for any other number of them.
    """
    if len(devices) != 2:
        given = ", ".join(str(device) for device in devices) or "none"
        raise RequestError(
            f"{model} spans 2 devices and was given {len(devices)} ({given}). "
            "Set model.num_devices=2, or choose the model without '_mp', which needs one device."
        )
    return torch.device(devices[0]), torch.device(devices[1])
