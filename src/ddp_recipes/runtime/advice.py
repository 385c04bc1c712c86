"""What to change here where torch alone words an error: one line below its traceback."""

from collections.abc import Mapping
from typing import Any

from ddp_recipes._compat.messages import label_out_of_range, out_of_memory, shapes_do_not_fit


def add_advice(error: BaseException, config: Mapping[str, Any]) -> None:
    """Have the traceback of such an error end with what to change."""
    data, trainer, model = config["data"], config["trainer"], config["model"]
    if out_of_memory(error):
        less = f"data.val_batch_size (now {data['val_batch_size']})"
        if config["mode"] == "fit":
            less = (
                f"data.batch_size (now {data['batch_size']}), with trainer.accumulate_grad_batches (now "
                f"{trainer['accumulate_grad_batches']}) as much larger, which keeps the global batch, or {less} if it "
                f"was in validation"
            )
        error.add_note(
            f"Out of memory. Make {less} smaller; or take trainer.precision=bf16-mixed, or more devices a replica "
            f"(model.num_devices). plan=true estimates what a run needs."
        )
    elif label_out_of_range(error):
        classes = data.get("out_features")
        error.add_note(
            f"A label is none of the classes, which are numbered from 0 and {classes} in number: set data.out_features "
            f"to how many there are, or mend the labels."
        )
    elif shapes_do_not_fit(error):
        sizes = [
            f"{section}.{name}={value}"
            for section, values in (("data", data), ("model", model))
            for name, value in values.items()
            if name.startswith(("in_", "out_", "image_")) and isinstance(value, int | list)
        ]
        error.add_note(f"The model and what the data give it have other sizes. Look at {', '.join(sizes)}.")
