"""What to change here where torch alone words an error: it says what is wrong, not where that is set."""

import re
from bdb import BdbQuit
from collections.abc import Mapping
from typing import Any

from ddp_recipes._compat.messages import out_of_memory, text_of

_ADVICE = {
    r"Target (-?\d+) is out of bounds": (
        "The data have the label {0}, for which the model has no output: labels are 0 to outputs - 1. Number them from "
        "0 in the data set, or give the model an output for each class (data.out_features, where the model follows it)."
    ),
    r"index out of range in self": (
        "An index is beyond the rows of an embedding (vocab_size): they are 0 to rows - 1. Give the model more rows "
        "(model.*), or other indices in the data set."
    ),
    r"'indices' to have one of .* Long, Int": (
        "An embedding takes numbers of tokens, int64, and gets other values. Choose data that give such (data=text), "
        "or convert them in the data set: tensor.long()."
    ),
    r"device-side assert": (
        "An index is out of range on the GPU: mostly a label that is not 0 to outputs - 1, or a token beyond the "
        "vocabulary. launcher.device=cpu says which."
    ),
    r"process group is bound to device": (
        "The backend has one device a process group, and a replica spans several (model.num_devices). Choose one that "
        "takes them (launcher.backend), or a strategy of stages, where a process has one device."
    ),
    r"expected target dtype to be Long|multi-target not supported": (
        "Cross-entropy takes class numbers as targets, int64 of the shape [n]. Give such in the data set, or choose "
        "task=regression for values."
    ),
    r"Expected input batch_size \((\d+)\) to match target batch_size \((\d+)\)": (
        "The model gives {0} outputs for {1} targets: the first dimension of what it returns has to be that of its "
        "inputs, the samples of a batch."
    ),
    r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)": (
        "A linear layer takes {1} features and gets {0}. Set the model's to {0} (data.in_features, where the model "
        "follows it), or give samples of {1}."
    ),
    r"to have (\d+) channels, but got (\d+) channels": (
        "A convolution takes {0} channels and gets {1}. Set the model's to {1} (data.in_channels, where the model "
        "follows it), or give images of {0}; images are [channels, height, width]."
    ),
    r"must have the same dtype, but got|Input type \(.*\) and bias type": (
        "Inputs and the model's weights are of different types. Convert inputs in the data set: tensor.float(), or "
        "array.astype('float32')."
    ),
    r"forward\(\) takes (?:from \d+ to )?\d+ positional arguments? but \d+ (?:was|were) given": (
        "The model's forward takes fewer arguments than the task gives it. task=classification and task=regression "
        "give it a batch's inputs, task=model_loss all that is in a batch: choose the one that fits, or another model."
    ),
    r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) (?:is killed by signal|exited unexpectedly)": (
        "A worker of data.num_workers ended: if nobody killed it, memory ran out (dmesg shows it). Use fewer, or "
        "smaller batches or samples."
    ),
    r"must be Tensor, not (\w+)": (
        "The model was given a {0}, as it came from the data set. Make tensors of it there or by data.collate_fn, or "
        "choose a task that takes such batches (task=model_loss gives a dict as keyword arguments)."
    ),
}


def advice(error: BaseException, config: Mapping[str, Any]) -> str | None:
    """Return one line on what to change, where an error is of a kind that users meet."""
    data, trainer = config["data"], config["trainer"]
    if out_of_memory(error):
        less = f"data.val_batch_size (now {data['val_batch_size']})"
        if config["mode"] == "fit":
            less = (
                f"data.batch_size (now {data['batch_size']}), with trainer.accumulate_grad_batches (now "
                f"{trainer['accumulate_grad_batches']}) as much larger, which keeps the global batch, or {less} if it "
                f"was in validation"
            )
        return (
            f"Out of memory. Make {less} smaller; or take trainer.precision=bf16-mixed, or more devices a replica "
            f"(model.num_devices). plan=true estimates what a run needs."
        )
    if isinstance(error, BdbQuit):
        return "breakpoint() needs a terminal, which a rank does not have: run with strategy=single, in one process."
    if isinstance(error, (RuntimeError, IndexError, ValueError, TypeError)):
        for pattern, text in _ADVICE.items():
            if found := re.search(pattern, text_of(error)):
                return text.format(*found.groups())
    return None
