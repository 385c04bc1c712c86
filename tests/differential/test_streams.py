"""Data of every kind under every strategy, with data workers, limits, resumes: what one plain rank gives, or refused.

A case is drawn at random. What it has to come to is the same data on one rank without data workers, uninterrupted: the
samples of each step, the rows that are skipped, and the weights, bit for bit where bits are promised.
"""

import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from differential import stream_parts

from ddp_recipes.checkpointing.files import newest_first
from ddp_recipes.checkpointing.reading import load
from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.tensors import put_together
from helpers.patience import patience
from helpers.ranks import run_recipe
from helpers.shards import write_shards

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more data workers than cores

SEED = int(os.environ.get("DDP_RECIPES_TEST_SEED", "5"))  # the same every day; others by night, by hand
LONGEST_S = 60  # of a run: most take less than one
ROWS = 47
GLOBAL_BATCH = 13
PARTS = "differential.stream_parts"
ON_THE_WAY = ("gives no batch", "none takes its place")  # refusals of what only shows when it is read
Seen = dict[int, Counter[str]]  # by step the samples, of all ranks


@dataclass(frozen=True)
class Data:
    """What is trained on.

    Attributes:
        kind: in a word, for the counts.
        needs: which of ``ranks`` and ``workers`` change the batches of it, where it says so.
        bits: whether ``ddp_exact`` takes it.
        model: in ``stream_parts``.
        skipped: whether some of its rows cannot be decoded.
    """

    kind: str
    overrides: tuple[str, ...]
    needs: tuple[str, ...] = ()
    bits: bool = True
    model: str = "Net"
    skipped: bool = False
    lightning: bool = False


@dataclass(frozen=True)
class Case:
    """A run: data, on some ranks, cut into two where ``resumed`` says how far and on how many ranks it begins."""

    data: Data
    trainer: tuple[str, ...]
    strategy: tuple[str, ...]
    ranks: int
    workers: tuple[str, ...] = ()
    resumed: tuple[float, int] | None = None

    @property
    def has_bits(self) -> bool:
        """Whether the bits of one rank of ``ddp_exact`` are promised."""
        return "strategy.shards=12" in self.strategy

    @property
    def overrides(self) -> tuple[str, ...]:
        return (*self.data.overrides, *self.trainer, *self.strategy, *self.workers)

    def __str__(self) -> str:
        resumed = f", resumed {self.resumed}" if self.resumed else ""
        return f"{self.data.kind} on {self.ranks} rank(s){resumed}: {' '.join(self.overrides)}"


# --- kinds of data ---------------------------------------------------------------------------------------------------


def cuts(choose: random.Random, rows: int = ROWS) -> tuple[int, ...]:
    """Cut rows into shards of any size; also of one row, or of none."""
    inside = sorted(choose.choices(range(1, rows), k=choose.randint(0, 6)))
    return (0, *inside, rows)


def shards(choose: random.Random, folder: Path, suffixes: Sequence[str], broken: bool = False) -> tuple[Path, bool]:
    """Write shards; return their folder, and whether some rows are broken."""
    suffix, rows = choose.choice(suffixes), [stream_parts.row(number) for number in range(ROWS)]
    broken = broken and suffix.startswith((".jsonl", ".csv"))
    if broken:
        for number in choose.sample(range(ROWS), choose.randint(1, 6)):
            rows[number]["a"] = "no number"
    if suffix.startswith((".csv", ".txt", ".tar")):
        rows = [{name: value for name, value in each.items() if name != "input_ids"} for each in rows]
    if suffix == ".txt":
        rows = [{"a": each["text"]} for each in rows]
    if suffix.startswith(".tar"):  # it names its samples by their column a
        rows = [{**each, "b": each["a"], "a": float(number)} for number, each in enumerate(rows)]
    at = cuts(choose)
    if suffix.startswith((".parquet", ".arrow", ".txt", ".tar")):  # of no row there is no column
        at = tuple(sorted({*at}))
    return write_shards(folder / f"set{suffix}", suffix, rows, at), broken


SUFFIXES = (".parquet", ".jsonl", ".tar", ".csv", ".txt", ".arrow", ".jsonl.gz", ".csv.zst", ".parquet", ".tar.gz")


def stream(choose: random.Random, folder: Path) -> Data:
    path, broken = shards(choose, folder, SUFFIXES, broken=choose.random() < 0.5)
    keys = [f"data.path={path}", f"data.cache.folder={folder / 'cache'}", "data=stream"]
    if path.suffix == ".txt":
        keys += ["data.inputs=text", f"data.collate_fn={PARTS}.of_text"]
    elif ".tar" in path.name:
        keys += ["data.inputs=[a.json,b.json]", "data.targets=[y.json]"]
    else:
        keys += ["data.inputs=[a,b]", "data.targets=[y]"]
    if path.suffix != ".txt" and choose.random() < 0.5:
        keys.append(f"data.train.transform={{_target_: {PARTS}.Noise}}")
    keys += [f"data.window={choose.choice((1, 5, 12, 999))}", f"data.interleave={choose.choice((1, 2, 3, 60))}"]
    keys += [f"data.memory_mb={choose.choice((0, 0.001, 256))}", f"data.val_fraction={choose.choice((0.1, 0.3))}"]
    keys += ["data.on_error=skip"] if broken else []
    return Data(f"stream{path.name.removeprefix('set')}", tuple(keys), skipped=broken)


def node_of_stream(path: Path, folder: Path, **more: Any) -> str:
    given = {"path": str(path), "on_error": "skip", "cache": {"folder": str(folder / "cache")}, "window": 12, **more}
    return as_override({"_target_": "ddp_recipes.streams.Stream", **given})


def as_override(value: Any) -> str:
    """Return a value as Hydra reads it on a command line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {as_override(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_override, value)) + "]"
    return f"'{value}'" if isinstance(value, str) else json.dumps(value)


def mixture(choose: random.Random, folder: Path) -> Data:
    path, broken = shards(choose, folder, (".parquet", ".jsonl", ".csv"), broken=choose.random() < 0.5)
    one = node_of_stream(path, folder, inputs=["a", "b"], targets=["y"])
    two = f"{{_target_: {PARTS}.Indexed, size: {choose.choice((1, 5, 30))}, first: 200}}"
    if choose.random() < 0.3:  # a mixture in it
        inner = f"{{x: {{_target_: {PARTS}.Indexed, size: 4, first: 300}}, y: {two}}}"
        two = f"{{_target_: ddp_recipes.streams.Mixture, sources: {inner}, num_samples: {choose.choice((3, 9, 50))}}}"
    keys = ["data=mixture", f"data.sources={{a: {one}, b: {two}}}", f"data.block={choose.choice((4, 16, 1024))}"]
    keys += ["data.source_weights={a: 3, b: 1}"] if choose.random() < 0.5 else []
    keys += [f"data.num_samples={choose.choice((29, 40, 90))}"] if choose.random() < 0.6 else []
    return Data("mixture", (*keys, val("Indexed")), skipped=broken)


def packed(choose: random.Random, folder: Path) -> Data:
    documents, skipped = f"{{_target_: {PARTS}.Documents, knows_lengths: {choose.choice(('true', 'false'))}}}", False
    if choose.random() < 0.4:
        path, _ = shards(choose, folder, (".parquet", ".jsonl"))
        documents = node_of_stream(path, folder, inputs="input_ids")
    options = f"length: {choose.choice((4, 7, 16))}, group: {choose.choice((1, 6, 1024))}"
    options += f", window: {choose.choice((2, 999))}"
    node = f"{{_target_: ddp_recipes.streams.Packed, dataset: {documents}, {options}}}"
    if choose.random() < 0.3:
        node = f"{{_target_: ddp_recipes.streams.Mixture, sources: {{a: {node}, b: {node}}}, num_samples: 31}}"
    # By samples a batch of which no target counts has no loss: NaN, as torch has it.
    keys = [*of_random(), f"+data.train={node}", f"+data.val={node}", "task.mean_over=targets"]
    return Data("packed", tuple(keys), model="Tokens", skipped=skipped)


def buckets(choose: random.Random, folder: Path) -> Data:
    documents, skipped = f"{{_target_: {PARTS}.Documents}}", False
    if choose.random() < 0.4:
        path, _ = shards(choose, folder, (".parquet", ".jsonl"))
        documents = node_of_stream(path, folder, inputs="input_ids")
    node = f"{{_target_: ddp_recipes.streams.LengthBuckets, dataset: {documents}, batch: {GLOBAL_BATCH}, window: 2}}"
    keys = (*of_random(), f"+data.train={node}", f"+data.val={node}", f"data.collate_fn={PARTS}.padded")
    return Data("buckets", keys, model="Bag", skipped=skipped)


def sampled(choose: random.Random, folder: Path) -> Data:
    skipped = False
    keys = [*of_random(), f"+data.train={{_target_: {PARTS}.Indexed, size: {choose.choice((27, 40))}}}", val("Indexed")]
    if choose.random() < 0.4:
        path, skipped = shards(choose, folder, (".parquet", ".jsonl", ".csv"), broken=choose.random() < 0.5)
        keys = [
            *of_random(),
            f"+data.train={node_of_stream(path, folder, inputs=['a', 'b'], targets=['y'])}",
            val("Indexed"),
        ]
    name = choose.choice(("Turned", "Drawn", "Lots", "", ""))
    node = f"{{_target_: {PARTS}.{name}, keep: {choose.choice((5, 26, 33))}, told: {choose.choice(('true', 'false'))}}}"
    if name:
        keys.append(f"data.{'batch_sampler' if name == 'Lots' else 'sampler'}={node}")
    if not name or choose.random() < 0.3:
        keys.append(f"data.group_by_length={PARTS}.lengths_of")
    return Data(f"sampled {name}", tuple(keys), skipped=skipped)


def iterable(choose: random.Random, folder: Path) -> Data:
    name = choose.choice(("Numbers", "Shuffled", "ByWorker", "Stateful", "Batches"))
    noise = choose.choice(("true", "false"))
    keys = [*of_random(), f"+data.train={{_target_: {PARTS}.{name}, noise: {noise}}}", val("Numbers", "Indexed")]
    needs = ["workers"] if name == "ByWorker" else []
    if name == "Batches":
        needs.append("ranks")  # as many whole batches as ranks are a global one
    if name in ("Shuffled", "ByWorker", "Stateful") and choose.random() < 0.5:
        method = choose.choice(("", "_method_: shard, "))
        keys.append(f"data.shard_arguments={{{method}num_shards: world, index: rank}}")
        needs.append("ranks")
    keys += ["data.replay=true"] if name == "Stateful" and choose.random() < 0.4 else []
    return Data(f"iterable {name}{' by shards' if 'ranks' in needs else ''}", tuple(keys), tuple(needs), bits=False)


def hugging_face(choose: random.Random, folder: Path) -> Data:
    path, _ = shards(choose, folder, (".jsonl",))
    for file in path.glob("*"):
        if not file.stat().st_size:
            file.unlink()
    buffer = choose.choice((0, 0, 7))
    keys = [*of_random(), f"+data.train={{_target_: {PARTS}.hugging_face, files: '{path}/*.jsonl', buffer: {buffer}}}"]
    keys += [f"data.collate_fn={PARTS}.of_rows", f"data.replay={str(buffer > 0).lower()}", "+data.val=null"]
    needs = ["workers"]
    if choose.random() < 0.4:
        keys.append("data.shard_arguments={_method_: shard, num_shards: world, index: rank}")
        needs.append("ranks")
    return Data(f"hugging face{' by shards' if 'ranks' in needs else ''}", tuple(keys), tuple(needs), bits=False)


def lightning(choose: random.Random, folder: Path) -> Data:
    own: dict[str, Any] = {"shuffle": choose.random() < 0.7, "num_workers": choose.choice((0, 0, 1, 3))}
    own["drop_last"] = choose.random() < 0.3
    needs, skipped, kind = [], False, choose.choice(("shards", "shards", "Indexed", "Stateful", "ByWorker"))
    if kind == "shards":
        path, skipped = shards(choose, folder, (".parquet", ".jsonl", ".csv"), broken=choose.random() < 0.5)
        own |= {"path": str(path), "on_error": "skip", "parts": choose.choice((0, 0, 9))}
    else:
        own["kind"] = kind
        needs += ["workers"] if kind == "ByWorker" else []
    node = {"_target_": f"{PARTS}.module", "folder": "???", **own}
    model = f"+model={as_override(node)}"
    keys = ("task=lightning", "data=lightning", "model=toy", "~model", model)
    return Data(f"lightning {kind}", keys, tuple(needs), kind in ("shards", "Indexed"), skipped=skipped, lightning=True)


def of_random() -> tuple[str, ...]:
    """Return overrides that leave a place for a set of one's own."""
    return ("data=random", "~data.train", "~data.val")


def val(*names: str) -> str:
    return f"+data.val={{_target_: {PARTS}.{names[-1]}, size: 11}}"


KINDS: dict[str, Callable[[random.Random, Path], Data]] = {
    each.__name__: each for each in (stream, mixture, packed, buckets, sampled, iterable, hugging_face, lightning)
}


# --- cases -----------------------------------------------------------------------------------------------------------

STRATEGIES: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...] = (
    (("strategy=ddp_exact", "strategy.shards=12"), (1, 2, 3, 4)),
    (("strategy=fsdp", "strategy.shards=12", "strategy.wrap=1"), (1, 2, 3, 4)),
    (("strategy=ddp_exact", "strategy.shards=12"), (1, 2, 3, 4)),
    (("strategy=ddp",), (1, 2, 3, 4)),
    (("strategy=ddp",), (2, 3)),
    (("strategy=fsdp", "strategy.wrap=1"), (1, 2, 3, 4)),
    (("strategy=ddp_pipeline", "strategy.stages=2", "+model.split=[2]"), (2, 4)),
    (("strategy=parameter_server",), (2, 3, 4)),
    (("strategy=single",), (1,)),
)


def drawn(choose: random.Random, folder: Path, kind: str | None = None) -> Case:
    """Draw a case; some keys do not go together, and have to be refused."""
    made = KINDS[kind or choose.choice([*KINDS, "stream", "stream"])](choose, folder)
    exact = made.bits or choose.random() < 0.1
    strategy, sizes = choose.choice([each for each in STRATEGIES if exact or "strategy.shards=12" not in each[0]])
    number = choose.choice((0, 0, 1, 3))
    workers: list[str] = []
    if not made.lightning and number:
        workers = [f"data.num_workers={number}"]
        workers += choose.choice(([], [], ["data.prefetch_factor=4"], ["data.persistent_workers=false"]))
    elif made.lightning and number:
        workers = [f"model.num_workers={number}"]
    ranks = choose.choice(sizes)
    resumed = (choose.random(), choose.choice(sizes)) if choose.random() < 0.5 else None
    return Case(made, tuple(trainer(choose, made)), strategy, ranks, tuple(workers), resumed)


def trainer(choose: random.Random, data: Data) -> list[str]:
    keys = [f"trainer.accumulate_grad_batches={choose.choice((1, 1, 2, 3))}", "trainer.max_epochs=3"]
    keys += choose.choice(([], [], ["trainer.max_steps=7"], ["trainer.max_steps=4"]))
    keys += choose.choice(([], ["trainer.val_check_interval=2"], ["trainer.check_val_every_n_epoch=2"]))
    keys += choose.choice(([], [], ["trainer.limit_train_batches=2"], ["trainer.limit_train_batches=0.6"]))
    keys += choose.choice(([], [], ["trainer.limit_val_batches=1"], ["trainer.num_sanity_val_steps=0"]))
    keys += choose.choice(([], [], [], [], [], ["trainer.overfit_batches=2"]))
    if data.lightning:  # whose loaders have a batch_size for each rank
        keys = [each for each in keys if each not in ("trainer.limit_val_batches=1", "trainer.overfit_batches=2")]
    keys += choose.choice(([], [], ["checkpoint.async_save=true"]))
    if not data.lightning:
        keys += choose.choice(([], [], [], ["data.drop_last=true"], ["data.shuffle=false"], ["data.shard=strided"]))
        keys += choose.choice(([], [], ["data.shard=contiguous"]))
    return keys


COMMON = (
    *(f"data.global_batch_size={GLOBAL_BATCH}", "trainer.progress=false", "logger=none", "launcher.device=cpu"),
    *("checkpoint.every_n_steps=1", "trainer.log_every_n_steps=1"),
)
TASKS = {
    "Net": ("task=regression", f"task._target_={PARTS}.Seen"),
    "Bag": ("task=regression", f"task._target_={PARTS}.Seen"),
    "Tokens": ("task=language_modeling", f"task._target_={PARTS}.SeenText"),
}


def overrides_of(case: Case, folder: Path) -> list[str]:
    """Return what a run of a case is given, which notes in a folder what it sees."""
    overrides = [*case.data.overrides, *COMMON, *case.trainer, *case.strategy, *case.workers]
    if case.data.lightning:
        return [*overrides, f"model.folder={folder}"]
    own = [f"+model={{_target_: {PARTS}.{case.data.model}}}", "data.in_features=2", "data.out_features=1"]
    return [*overrides, *TASKS[case.data.model], f"+task.folder={folder}", "model=toy", "~model", *own]


class Outcome:
    """What came of a run: a summary and what was seen, or why it was refused."""

    def __init__(self, summary: Summary | None, seen: Seen, refused: str = "") -> None:
        self.summary, self.seen, self.refused = summary, seen, refused


class Runs:
    """Runs cases in a folder, and compares them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count, self.counts, self.refusals = folder, 0, Counter[str](), Counter[str]()

    def run(self, case: Case) -> Outcome:
        """Run a case, in two parts where it is resumed."""
        self.count += 1
        folder = self.folder / f"run_{self.count}"
        folder.mkdir()
        if case.resumed is None:
            return self._start(case, folder, folder / "run")
        steps, first = case.resumed
        begun = self._start(replace(case, ranks=first), folder, folder / "run", f"trainer.max_steps={round(steps)}")
        return begun if begun.refused else self._start(case, folder, folder / "run", "ckpt_path=auto")

    def _start(self, case: Case, folder: Path, directory: Path, *more: str) -> Outcome:
        overrides = [*overrides_of(case, folder), *more]
        try:
            summary = run_recipe(overrides, case.ranks, directory, timeout_s=patience(LONGEST_S))
        except RequestError as error:
            refused = str(error).strip().splitlines()[-1]
            assert not re.search(r"\b\w+(Error|Exception): ", refused), f"{case}: {refused}"
            return Outcome(None, {}, refused)
        except (RunFailed, RuntimeError) as error:
            if any(each in str(error) for each in ON_THE_WAY):
                return Outcome(None, {}, str(error).strip().splitlines()[-1])
            if "hugging face by shards" not in str(case) or "list index out of range" not in str(error):
                raise
            return Outcome(None, {}, "Hugging Face's own shard fails where ranks are more than files")
        # Each stage of a pipeline is given the batch.
        return Outcome(summary, seen_in(folder, 2 if "strategy=ddp_pipeline" in case.strategy else 1))

    def check(self, case: Case) -> None:
        """Run a case and what it has to come to; fail where it is something else."""
        kind, began = case.data.kind, time.monotonic()
        plain = self.run(self.reference(case))
        if plain.refused:  # as the case itself has to be
            found = self.run(replace(case, resumed=None))
            assert found.refused, f"{case}: runs, and one rank is refused: {plain.refused}"
        else:
            assert plain.summary is not None
            if case.resumed is not None:
                last = plain.summary["global_step"]
                case = replace(case, resumed=(1 + int(case.resumed[0] * max(1, last - 1)), case.resumed[1]))
            found = self.run(case)
        outcome = "refused" if found.refused else "same"
        if not found.refused:
            self.compare(case, found, plain)
        self.counts[outcome] += 1
        self.refusals[found.refused[:100]] += bool(found.refused)
        print(f"{outcome} {kind} {case.strategy[0]} x {case.ranks} {time.monotonic() - began:.1f} s {found.refused}")

    def reference(self, case: Case) -> Case:
        """Return the plain case that another one has to come to."""
        plain = replace(case, resumed=None)
        if "workers" not in case.data.needs:
            own = ("model.num_workers=0",) if case.data.lightning else ()
            plain = replace(plain, workers=own)
        if "ranks" in case.data.needs or "strategy=parameter_server" in case.strategy:
            return plain
        if "strategy=ddp_pipeline" in case.strategy:
            return replace(plain, strategy=("strategy=single",), ranks=1)
        if case.has_bits:
            return replace(plain, strategy=STRATEGIES[0][0], ranks=1)
        return replace(plain, strategy=("strategy=single",), ranks=1)

    def compare(self, case: Case, found: Outcome, plain: Outcome) -> None:
        """See that a run came to what it has to."""
        assert found.summary is not None
        assert plain.summary is not None
        one, two = found.summary, plain.summary
        for name in ("samples_seen", "global_step", "epoch", "skipped_samples"):
            assert one.get(name) == two.get(name), f"{case}: {name} is {one.get(name)}, not {two.get(name)}"
        if found.seen and "strategy=parameter_server" not in case.strategy:
            assert found.seen.keys() == plain.seen.keys(), f"{case}: steps {[*found.seen]}, not {[*plain.seen]}"
            for step, samples in plain.seen.items():
                lost, more = samples - found.seen[step], found.seen[step] - samples
                # A rank without a sample is given one that does not count, of its own from before.
                allowed = 12 * 3 if samples.total() % GLOBAL_BATCH or "workers" in case.data.needs else 0
                again = {*plain.seen.get(step - 1, ()), *(samples - Counter({*samples}))} if allowed else set()
                assert {*lost} <= again, f"{case}: step {step} lacks {lost}"
                assert more.total() <= allowed, f"{case}: step {step} has {more} besides"
        if case.has_bits:
            assert one["weights_sha256"] == two["weights_sha256"], f"{case}: other bits"
        else:
            mine, its = weights(one), weights(two)
            torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-5, msg=lambda text: f"{case}: {text}")
        assert one["metrics"].keys() == two["metrics"].keys(), f"{case}: {one['metrics']}, not {two['metrics']}"
        for name in ("val/loss", "train/loss"):
            if name in two["metrics"]:
                expected = pytest.approx(two["metrics"][name], rel=1e-3, abs=1e-6)
                assert one["metrics"][name] == expected, f"{case}: {name}"


def seen_in(folder: Path, times: int) -> Seen:
    """Return the samples of each step, of all ranks, which note each of them so many times."""
    found: Seen = {}
    for file in folder.glob("seen_*"):
        for line in file.read_text().splitlines():
            step, *samples = line.split()
            if int(step):  # before the first one a pipeline looks at what the stages hand on
                found.setdefault(int(step), Counter()).update(samples)
    return {step: Counter({each: count // times for each, count in found[step].items()}) for step in sorted(found)}


def weights(summary: Summary) -> dict[str, torch.Tensor]:
    """Return what a run has learned."""
    last = newest_first(Path(summary["run_directory"]) / "checkpoints")[0]
    model: dict[str, torch.Tensor] = put_together(load(last)["model"])
    return {name.removeprefix("model."): value for name, value in model.items()}


@pytest.fixture(autouse=True)
def shown() -> None:
    """Show the seed with what fails, and load once what ranks would each load."""
    print(f"DDP_RECIPES_TEST_SEED={SEED}")


def available() -> list[str]:
    missing = {"hugging_face": "datasets", "lightning": "lightning"}
    return [kind for kind in KINDS if find_spec(missing.get(kind, "torch")) is not None]


@pytest.mark.slow
def test_a_sample_of_cases_comes_to_what_one_rank_does(tmp_path: Path) -> None:
    choose, runs = random.Random(SEED), Runs(tmp_path)
    for number, kind in enumerate(("stream", "mixture", "packed", "iterable")):
        folder = tmp_path / f"data_{number}"
        folder.mkdir()
        runs.check(drawn(choose, folder, kind))
    print(dict(runs.counts))
    assert runs.counts["same"] + runs.counts["refused"] == 4


@pytest.mark.nightly
@pytest.mark.parametrize("kind", available())
def test_all_kinds_come_to_what_one_rank_does(kind: str, tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    for number in range(int(os.environ.get("DDP_RECIPES_TEST_CASES", "24"))):
        folder = tmp_path / f"data_{number}"
        folder.mkdir()
        runs.check(drawn(random.Random(f"{SEED} {kind} {number}"), folder, kind))
    print(dict(runs.counts), *(f"\n{count} x {text}" for text, count in runs.refusals.most_common() if text))
    assert runs.counts["same"] >= 1
