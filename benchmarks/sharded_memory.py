"""The most memory that a rank of ``strategy=fsdp`` takes for tensors, against its part of the state and one block.

It is what a rank has resident at most in a step, less what the same run has with a model of next to nothing. For that
the allocator gives each tensor pages of its own, which the system has back when the tensor is no more.
"""

import ctypes
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import Store

from benchmarks.player import peak_memory
from benchmarks.results import Group, Row, Settings, in_ranks
from benchmarks.turns import Spread
from ddp_recipes import rank
from ddp_recipes.callbacks import Callback
from ddp_recipes.models import GPT
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.world import World
from ddp_recipes.testing import make_job, on_ranks

GOAL = 1.05
LAYERS, WIDTH, HEADS, CONTEXT = 24, 256, 4, 32  # 19 million parameters; one sample a rank
FIRST, LAST = 3, 5  # steps: by then everything that stays is there
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, OWN_PAGES = -1, -3, 1 << 14  # of malloc.h; bytes
BYTES = 4  # of a number


@dataclass(frozen=True)
class Way:
    """How the model is held.

    Attributes:
        dealt, whole: tensors of the size of the model that are dealt to the ranks, and that each rank has whole.
    """

    name: str
    overrides: tuple[str, ...]
    dealt: int
    whole: int
    recomputed: bool = False


WAYS = (
    Way("level 3", ("strategy.level=3",), dealt=4, whole=0),
    Way("level 3, recomputed", ("strategy.level=3", "model.activation_checkpointing=true"), 4, 0, recomputed=True),
    Way("level 2", ("strategy.level=2",), dealt=4, whole=1),
    Way("level 1", ("strategy.level=1",), dealt=3, whole=2),
)


at_start = 0  # bytes that were resident when this rank had been forked


class Peak(Callback):
    """Writes down the most memory that this process has resident in a step, once it has taken some."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_step(self, step: int) -> None:
        """Count anew from ``FIRST`` on."""
        if step == FIRST:
            Path("/proc/self/clear_refs").write_text("5")
        if step == LAST:
            (self.folder / str(os.getpid())).write_text(str(peak_memory() - at_start))


def measure(settings: Settings) -> Group:
    """Measure each way at each number of ranks."""
    rows, raw = [], {}
    block = sum(parameter.numel() for parameter in model(1).blocks.parameters())
    size = sum(parameter.numel() for parameter in model(LAYERS).parameters())
    for ranks in settings.ranks:
        for way in WAYS:
            if settings.quick and way is not WAYS[0]:
                continue
            peaks = [resident(way, ranks, WIDTH) - resident(way, ranks, HEADS) for _ in range(settings.sessions)]
            expected = BYTES * (way.dealt * size / ranks + way.whole * size + block) + activations(way.recomputed)
            title = f"peak memory of a rank, {in_ranks(ranks)}"
            ratios = Spread.of([[peak / expected] for peak in peaks])
            rows.append(Row(title, f"{way.name} / its state, a block and activations", ratios, GOAL))
            rows.append(Row(title, way.name, Spread.of([[peak / 1e6] for peak in peaks]), unit="MB"))
            raw[f"{title}: {way.name}"] = {"peaks": peaks, "expected": expected}
    return Group(rows, raw)


def resident(way: Way, ranks: int, width: int) -> int:
    """Return the most that any rank has resident in a step, beyond what it was forked with."""
    with tempfile.TemporaryDirectory(prefix="ddp_recipes_bench_") as folder:
        sizes = (f"model.layers={LAYERS}", f"model.width={width}", f"model.heads={HEADS}")
        job = make_job(
            [
                *("data=text", f"data.context={CONTEXT}", "data.val=null", "data.batch_size=1", "model=gpt", *sizes),
                *("optimizer=adamw", f"trainer.max_steps={LAST}", "trainer.progress=false", "logger=none"),
                *("checkpoint=none", "launcher.device=cpu", "strategy=fsdp", *way.overrides),
                f"+callbacks.peak={{_target_: benchmarks.sharded_memory.Peak, folder: {folder}}}",
            ],
            Path(folder) / "run",
        )

        def train(world: World, store: Store | None) -> None:
            global at_start
            Path("/proc/self/clear_refs").write_text("5")
            at_start = peak_memory()
            os.environ["MALLOC_MMAP_THRESHOLD_"] = str(OWN_PAGES)  # so the run does not set the allocator up
            for name in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
                ctypes.CDLL(None).mallopt(name, OWN_PAGES)
            rank.run(job, world, None if store is None else Messages(store, private=True))

        on_ranks(train, ranks)
        return max(int(path.read_text()) for path in Path(folder).iterdir() if path.is_file())


def model(layers: int) -> GPT:
    """Return the model."""
    return GPT(context=CONTEXT, layers=layers, heads=HEADS, width=WIDTH)


def activations(recomputed: bool) -> int:
    """Return the bytes that one forward pass keeps for backward; ``recomputed``: one block's, and others' inputs."""
    tokens = torch.zeros(1, CONTEXT, dtype=torch.int64)
    everything = kept(model(LAYERS), tokens)
    if not recomputed:
        return everything
    inputs = torch.zeros(1, CONTEXT, WIDTH)
    of_block = kept(model(1).blocks, inputs)
    return everything - (LAYERS - 1) * (of_block - inputs.nbytes)


def kept(module: nn.Module, input: Tensor) -> int:
    """Return the bytes that autograd keeps of a forward pass, parameters aside."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    found: dict[int, int] = {}
    held: list[Tensor] = []  # so that no two have one address

    def note(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            held.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        module(input.requires_grad_(input.is_floating_point()))
    return sum(found.values())
