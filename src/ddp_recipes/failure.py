"""How a rank fails: the others are told, the error is shown with what helps, and what it left is written down."""

import logging
import re
import traceback
from bdb import BdbQuit
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ddp_recipes._compat.messages import out_of_memory, text_of, timed_out
from ddp_recipes._compat.torch_ import recorded_collectives
from ddp_recipes.build.recipe import Recipe
from ddp_recipes.checkpointing.writing import disk_failure, removed
from ddp_recipes.devices import BUILT_FOR, dump_memory
from ddp_recipes.errors import RecipeError, RunFailed
from ddp_recipes.output import Output
from ddp_recipes.reporting.run_directory import in_ranks, write_flight_recorder, write_trace
from ddp_recipes.runtime.control import Control
from ddp_recipes.runtime.job import ASKS_TO_STOP
from ddp_recipes.runtime.process import disconnect, ignore_once
from ddp_recipes.runtime.tensors import digest

log = logging.getLogger(__name__)


def fail(recipe: Recipe, control: Control, output: Output, error: BaseException) -> NoReturn:
    """Record a failure for the other ranks and in the run directory, and raise the error to show."""
    if recipe.job.last:
        ignore_once(ASKS_TO_STOP)  # which torchrun sends where a rank has ended: this one has yet to say why
    error, text = _explained(recipe, output, error)
    me, culprit = recipe.world.rank, error.rank if isinstance(error, RunFailed) else None  # of what all ranks see alike
    rank, cause = control.fail(text, me if culprit is None else culprit)
    hung = timed_out(error) or recipe.strategy.exchanges.late
    if rank == me and hung and (unresponsive := control.unresponsive_ranks()):
        names = ", ".join(map(str, unresponsive))
        cause = text = (
            f"{text}Rank {names} of {recipe.world.world_size} did not respond within launcher.timeout_s="
            f"{control.timeout_s:g} seconds: stopped, stuck or cut off."
        )
        error = RunFailed(text, unresponsive=unresponsive)
    if (rank == me or recipe.world.is_main) and (peers := _told_of(control.unexpected_peers())):
        error.add_note(peers)
        text, cause = f"{text}{peers}\n", f"{cause}{peers}\n"
    disconnect(control.connections)  # what torch keeps of the group may outlive its end, and the others wait meanwhile
    if output.opened:
        write_trace(recipe.job.directory, me, text)
        if hung:
            write_flight_recorder(recipe.job.directory, me, recorded_collectives())
    last = cause.strip().splitlines()[-1]
    facts = output.facts(_digest(recipe)) | {"status": "failed", "error": f"rank {rank}: {last}"}
    output.finish(facts, cause)
    if rank != me:
        raise RunFailed(f"Rank {rank} failed, so rank {me} stopped: {last}", rank=rank) from error
    raise error


def refuse(recipe: Recipe, output: Output, error: RecipeError) -> None:
    """Record that a run is refused, if it has begun: some of what is wrong with a request shows in training alone."""
    if output.opened:
        last = str(error).strip().splitlines()[-1]
        output.finish(output.facts(_digest(recipe)) | {"status": "failed", "error": last}, str(error))


def _explained(recipe: Recipe, output: Output, error: BaseException) -> tuple[BaseException, str]:
    """Return the error to show, with what may help, and all that is to be shown of it."""
    if not isinstance(error, RecipeError):
        directory = recipe.job.directory
        error = (removed(error, directory) if output.opened else None) or disk_failure(error, directory) or error
    own = isinstance(error, RecipeError)  # whose message is enough; anything else needs its traceback
    remedy = None if own else recipe.strategy.explain(error, recipe.task)
    if not own and remedy is None:
        add_advice(error, recipe.job.config)
    if output.opened and out_of_memory(error) and (path := _leave_memory(recipe)) is not None:
        error.add_note(f"What was allocated is in {path}: drag it onto https://pytorch.org/memory_viz.")
    text = f"{error}\n" if own else "".join(traceback.format_exception(error))
    if remedy is None:
        return error, text
    return RunFailed(f"{text}{remedy}"), f"{text}{remedy}"


def _digest(recipe: Recipe) -> str | None:
    """Return the SHA-256 of the weights, where this rank has all of them: others would have to be asked for a part."""
    if recipe.request.strategy.kind != "replicated" or not recipe.world.is_main:
        return None
    try:
        return digest(recipe.task.weights())
    except Exception:  # noqa: BLE001 - what is to be shown is what failed, which after a device-side error comes again here
        return None


def _leave_memory(recipe: Recipe) -> Path | None:
    """Write to ``ranks/`` what is allocated on this rank's devices; return the file, if there can be one."""
    path = in_ranks(recipe.job.directory, f"memory_{recipe.world.rank}.pickle")
    try:
        return path if dump_memory(recipe.device, path) else None
    except Exception:  # what is to be shown is why memory was exhausted
        log.warning("There is no snapshot of the memory.", exc_info=True)
        return None


def _told_of(unexpected: Mapping[int, Sequence[int]]) -> str:
    """Return what is to be said of other users who connected to ranks, a line for each of these."""
    return "\n".join(
        f"While the ranks met, user {', '.join(map(str, users))} of this machine connected to rank {met}, and was "
        "disconnected: if that was in a rank's place, this is why. Start again."
        for met, users in unexpected.items()
    )


# What to change here where torch alone words an error: it says what is wrong, not where that is set.
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
    r"process group is bound to device": (
        "The backend has one device a process group, and a replica spans several (model.num_devices). Choose one that "
        "takes them (of GPUs launcher.backend=nccl-legacy), or a strategy of stages, where a process has one device."
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
    r"Expected more than 1 (?:value per channel|spatial element) when training": (
        "A batch norm got a single sample in training, whose variance is none: mostly the last batch of an epoch "
        "leaves a rank, or a micro-batch, no more. Set data.drop_last=true, or another data.global_batch_size."
    ),
    r"element 0 of tensors does not require grad": (
        "No parameter that is trained led to the loss: torch.no_grad, detach, item or argmax on the way make it so, "
        "and so does model.freeze of all that the loss depends on."
    ),
    r"grad can be implicitly created only for scalar outputs": (
        "A loss is a single number, the mean over its batch: reduction=mean of task.loss, or mean() of what the step "
        "returns."
    ),
    r"env:// rendezvous|default process group twice": (
        "Something that the config makes joins a process group by itself while it is made. The run joins one, the "
        "default of torch.distributed, once all is made: have it wait for that, or for its first use."
    ),
    r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) (?:is killed by signal|exited unexpectedly)": (
        "A worker of data.num_workers ended: if nobody killed it, memory ran out (dmesg shows it). Use fewer, or "
        "smaller batches or samples."
    ),
    r"A different number of tensors was saved|Recomputed values for|trying to save more tensors": (
        "A block that is computed a second time (model.activation_checkpointing) did otherwise than before, as one "
        "does that keeps keys and values from pass to pass. Have it keep nothing in training (models of Hugging Face: "
        "use_cache=False), or leave model.activation_checkpointing false."
    ),
    r"SyncBatchNorm (?:expected input tensor|layers only work)": (
        "torch's SyncBatchNorm works on accelerators only. Give the model nn.BatchNorm: on the CPU each rank has the "
        "statistics of its own samples, elsewhere sync_batchnorm of the strategy takes them from all."
    ),
    r"argument '(?:input|indices)' \(position \d\) must be Tensor, not (\w+)": (
        "The model was given a {0}, as it came from the data set. Make tensors of it there or by data.collate_fn, or "
        "choose a task that takes such batches (task=model_loss gives a dict as keyword arguments)."
    ),
}
# Of GPUs, drivers and NCCL: those that say more come first, for an error of NCCL's quotes the one that it came of.
_ADVICE |= {
    r"device-side assert": (
        "An index is out of range on the GPU: mostly a label that is not 0 to outputs - 1, or a token beyond the "
        "vocabulary. The traceback ends where that was only with CUDA_LAUNCH_BLOCKING=1 in the environment; "
        "launcher.device=cpu says which index."
    ),
    r"/dev/shm|shared memory|to file </torch_": (
        "The memory that processes share ran out, /dev/shm: containers have 64 MB of it. Start the container with more "
        "(docker run --shm-size=8g, or --ipc=host), or use fewer data.num_workers."
    ),
    r"peer access is not supported": (
        "These GPUs cannot reach each other's memory, and NCCL takes it that they can: NCCL_P2P_DISABLE=1 in the "
        "environment has it go by way of the host."
    ),
    r"Duplicate GPU detected": (
        "Two ranks have one GPU, and NCCL wants one for each. Set launcher.nproc_per_node to the GPUs of a node, or "
        "have the scheduler give each task its own."
    ),
    r"invalid device ordinal": (
        "A GPU was asked for by a number that this process has not: it sees those of CUDA_VISIBLE_DEVICES, from 0 on. "
        "Code of your own takes the device of its inputs, not a fixed one (cuda:1)."
    ),
    r"no kernel image is available": (
        f"This torch was not built for GPUs of this kind: {BUILT_FOR} says for which. Install one that "
        "was, or choose other GPUs (CUDA_VISIBLE_DEVICES)."
    ),
    r"ncclRemoteError|remote process exited|Connection closed by remote peer": (
        "A rank that this one was connected to has ended, or the network between them broke. What came first is in the "
        "ranks/ of the run directory and in the log of its node."
    ),
    r"ncclSystemError|unhandled system error|ncclInternalError|NCCL.*internal error": (
        "NCCL could not connect ranks, mostly because of a network interface, a firewall, or a limit (ulimit -l, "
        "/dev/shm). NCCL_DEBUG=INFO in the environment says what failed, NCCL_SOCKET_IFNAME=eth0 chooses the "
        "interface, NCCL_IB_DISABLE=1 leaves InfiniBand alone."
    ),
    r"ncclUnhandledCudaError|unhandled cuda error": (
        "A call of CUDA's failed within NCCL: NCCL_DEBUG=INFO in the environment says which. It may be memory that ran "
        "out (smaller batches), or a driver that is older than this torch's CUDA (nvidia-smi)."
    ),
}

_ADVICE |= {
    r"InvalidCxxCompiler": (
        "trainer.compile has C++ compiled, and there is no compiler for it. Install g++ or clang, name yours in the "
        "environment (CXX), or leave trainer.compile false."
    ),
    r"TORCHDYNAMO_VERBOSE": (
        "torch's compiler met this. With trainer.compile=false the model runs as it is written: what it does wrong has "
        "an error of its own then, and what is wrong with the compiler is left out."
    ),
}


def add_advice(error: BaseException, config: Mapping[str, Any]) -> None:
    """Add a line on what to change to an error, where it is of a kind that users meet."""
    if (line := _advice(error, config)) is not None:
        error.add_note(line)


def _advice(error: BaseException, config: Mapping[str, Any]) -> str | None:
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
            f"Out of memory. Make {less} smaller; or take trainer.precision=bf16-mixed, "
            f"model.activation_checkpointing=true, or more devices a replica (model.num_devices). plan=true estimates "
            f"what a run needs."
        )
    if isinstance(error, BdbQuit):
        return "breakpoint() needs a terminal, which a rank does not have: run with strategy=single, in one process."
    if isinstance(error, (RuntimeError, IndexError, ValueError, TypeError)):
        for pattern, text in _ADVICE.items():
            if found := re.search(pattern, text_of(error)):
                return text.format(*found.groups())
    return None
