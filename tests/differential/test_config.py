"""Overrides at random: a run is finished or refused, whatever is asked of it.

Each case is a command, in a process of its own that is forked from this one: a recipe that takes a tenth of a second,
and one or two overrides, of all keys that it has and some that it has not. It exits with 0, or with 2 and one message,
in time, without a traceback; and where it was refused nothing is left. Only data and a model of sizes that do not go
together end in training, with 1 and what to change.
"""

import json
import os
import random
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
from omegaconf import OmegaConf

from ddp_recipes import main
from ddp_recipes.config import compose
from helpers.patience import patience

SEED = int(os.environ.get("DDP_RECIPES_TEST_SEED", "27"))
BOUND_S = 3  # for a case where nothing else runs
MEMORY = 8 << 30  # of a process, beyond which torch finds none: a key may ask for any amount

QUICKEST = (
    *("trainer.max_epochs=1", "trainer.fast_dev_run=1", "trainer.max_time=5", "trainer.progress=false"),
    *("launcher.device=cpu", "strategy=single", "data.batch_size=8", "hydra.run.dir=run"),
)
# What a case starts from, besides QUICKEST.
RECIPES: tuple[tuple[str, ...], ...] = (
    ("data=random", "data.num_samples=64", "data.val_samples=21", "model=toy"),
    (
        "data=random",
        "data.num_samples=64",
        "data.val_samples=21",
        "model=mlp",
        "optimizer=adamw",
        "scheduler=one_cycle",
    ),
    ("data=digits", "model=linear", "optimizer=adam", "scheduler=step", "callbacks=ema"),
    ("data=csv", "data.path=table.csv", "data.inputs=[a,b]", "data.target=kind", "model=mlp", "callbacks=lr_monitor"),
    (
        *("data=csv", "data.path=table.csv", "data.inputs=[a]", "data.target=b", "model=mlp", "task=regression"),
        *("scheduler=cosine", "callbacks=early_stopping", "logger=csv", "trainer.fast_dev_run=false"),
    ),
    ("data=fake_images", "data.image_size=8", "model=mlp", "callbacks=model_summary", "logger=tensorboard"),
    (
        "data=text",
        "data.path=text.txt",
        "data.context=8",
        "model=gpt",
        "model.layers=1",
        "model.width=8",
        "model.heads=1",
    ),
)
# What is not asked for: so many processes, a sweep (which prints), and what another process or machine answers.
LEFT_OUT = re.compile(
    r"launcher\.(nproc_per_node|nnodes)|cluster|data\.(num_workers|root)|hydra\.(mode|searchpath|job_logging|hydra_logging)"
)
GROUPS = (
    *("model", "data", "task", "optimizer", "scheduler", "strategy", "launcher", "trainer", "logger", "checkpoint"),
    *("callbacks", "experiment", "debug"),
)
OPTIONS = (
    *("linear", "mlp", "toy", "toy_mp", "random", "csv", "text", "lightning", "classification", "model_loss", "sgd"),
    *("cosine", "ddp", "ddp_exact", "fsdp", "parameter_server", "dp", "env", "local", "csv", "none", "default"),
    *("early_stopping", "sample_text", "fast_dev_run", "overfit", "no_such", "", "null", "[]", "[csv,tensorboard]"),
    *("[none]", "a/b", "../model/mlp", "é", "{a: 1}", "1", "'a b'"),
)
VALUES = (
    *("abc", "1", "0", "-1", "2", "1.5", "-0.5", "true", "false", "null", "nan", "inf", "-inf", "1e308", "1e-320"),
    *(
        "2147483648",
        "9223372036854775808",
        "1" + "0" * 400,
        "-9223372036854775809",
        "''",
        "' '",
        "'é✓日本'",
        "'\u202e'",
    ),
    *("[]", "[1]", "[abc, null]", "[[1], {a: 2}]", "{}", "{a: 1}", "{1: 2}", "{_target_: torch.nn.Linear}", "???"),
    *("{_target_: os.remove, path: x}", "{_target_: 1}", "{_partial_: true}", "a" * 300, "'../x'", "'a.b'", "a.b.c"),
    *(
        "'${no_such}'",
        "'${seed}'",
        "'${oc.env:NO_SUCH}'",
        "${seed}",
        "'\x1b[2J'",
        "'a\nb'",
        "'%s {} {0}'",
        "'~'",
        "1:30",
    ),
)
GARBAGE = ("", "=", "a", "==1", "~", "+", "++=1", "seed", "seed=", "seed==1", "a b=1", "'seed=1", "[", "é=1", "~~seed")


# What a run ends with that has begun, and what to change, where sizes of data and model, or numbers, go not together.
MISFIT = re.compile(
    "(The data have the label|A linear layer takes|An embedding takes|An index is beyond|At step [0-9]+ the loss is|"
    "The model's forward takes|"
    "[A-Za-z]+Loss (compares|takes)) "
)


@dataclass(frozen=True)
class Ended:
    """How a case ended; ``status`` is minus a signal's number where it was killed."""

    status: int
    out: str
    err: str
    seconds: float


@pytest.fixture(scope="module")
def keys() -> dict[tuple[str, ...], list[str]]:
    """Return the dotted keys of each recipe, those of Hydra with them."""
    found = {}
    for recipe in RECIPES:
        with compose.session(main.CONF) as hydra:
            config: Any = OmegaConf.to_container(compose.compose(hydra, "train", [*QUICKEST, *recipe]))
        found[recipe] = [key for key in dotted(config) if not LEFT_OUT.match(key)]
    return found


def dotted(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a config, sections as well."""
    for name, value in config.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{name}.")


def override(chance: random.Random, keys: list[str]) -> str:
    """Return an override of one of these keys, or of one that is not there."""
    key, value = chance.choice(keys), chance.choice(VALUES)
    if key.startswith("hydra") and chance.random() < 0.8:
        key = chance.choice([each for each in keys if not each.startswith("hydra")])
    at = chance.randrange(len(key))
    match chance.choices(range(8), (10, 1, 1, 1, 2, 2, 3, 0.5))[0]:
        case 0:
            return f"{key}={value}"
        case 1:
            return f"~{key}"
        case 2:
            return f"+{key}.more={value}"
        case 3:
            return f"++{key}={value}"
        case 4:  # a letter too few, or two that are swapped
            return (
                f"{key[:at]}{key[at + 1 :]}={value}"
                if at % 2
                else f"{key[:at]}{key[at : at + 2][::-1]}{key[at + 2 :]}=1"
            )
        case 5:
            name = chance.choice(("x", "lr", "é", "a-b", "name", "_target_"))
            return f"+{key.rpartition('.')[0] or 'more'}.{name}={value}"
        case 6:
            sign = chance.choices(("", "+", "~", "++"), (6, 1, 1, 1))[0]
            return f"{sign}{chance.choice(GROUPS)}={chance.choice(OPTIONS)}"
        case _:
            return chance.choice(GARBAGE)


def cases(seed: str, count: int, keys: dict[tuple[str, ...], list[str]]) -> Iterator[list[str]]:
    """Yield the arguments of so many commands."""
    chance = random.Random(seed)
    for _ in range(count):
        recipe = chance.choice(RECIPES)
        more = [override(chance, keys[recipe]) for _ in range(chance.choice((1, 1, 2)))]
        yield [*QUICKEST, *recipe, *more]


def command(arguments: list[str], folder: Path) -> Ended:
    """Run a command in a process that is forked from this one, in an empty folder but for a table and a text."""
    folder.mkdir()
    (folder / "table.csv").write_text("a,b,kind\n" + "1,2,x\n3,4,y\n" * 20)
    (folder / "text.txt").write_text("some text\n" * 40)
    began, process = time.monotonic(), os.fork()
    if process == 0:
        become(arguments, folder)
    while not (waited := os.waitpid(process, os.WNOHANG))[0]:
        if time.monotonic() > began + patience(10 * BOUND_S):
            os.kill(process, signal.SIGKILL)
        time.sleep(0.005)
    out, err = ((folder / name).read_text(errors="replace") for name in ("out", "err"))
    for name in ("out", "err"):
        (folder / name).unlink()
    return Ended(os.waitstatus_to_exitcode(waited[1]), out, err, time.monotonic() - began)


def become(arguments: list[str], folder: Path) -> NoReturn:
    """Be what the command line would be."""
    status = 70
    try:
        os.chdir(folder)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), number)
        sys.stdout, sys.stderr = (
            open(number, "w", buffering=1, closefd=False)  # noqa: SIM115
            for number in (1, 2)
        )
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        sys.argv = ["train.py", *arguments]
        main.main()
    except SystemExit as exited:
        status = exited.code if isinstance(exited.code, int) else 0 if exited.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wrong(ended: Ended, left: set[Path]) -> str | None:
    """Return what of an end is not as it should be."""
    lines = ended.err.splitlines()
    if ended.status in (1, 2) and lines and MISFIT.match(lines[-1]):
        return None  # the data and the model are both fine, and go not together
    if ended.status not in (0, 2):
        return f"exit status {ended.status}"
    if "Traceback" in ended.err or '  File "' in ended.err or re.search(r"frame #|Exception raised from", ended.err):
        return "a traceback"
    if ended.status == 0:
        return None
    if ended.out:
        return "something is printed before it is refused"
    if not 1 <= len(lines) <= 6 or len({*lines}) < len(lines):
        return "no one message"
    if left:
        return f"left behind: {', '.join(map(str, sorted(left)))}"
    return None


def campaign(seed: str, count: int, folder: Path, keys: dict[tuple[str, ...], list[str]]) -> None:
    """Run so many cases, and fail with all that were not right."""
    found, statuses, slowest = [], Counter[int](), 0.0
    began = time.monotonic()
    for number, arguments in enumerate(cases(seed, count, keys)):
        ended = command(arguments, folder / str(number))
        there = {path.relative_to(folder / str(number)) for path in (folder / str(number)).rglob("*")}
        statuses[ended.status] += 1
        slowest = max(slowest, ended.seconds)
        if (what := wrong(ended, there - {Path("table.csv"), Path("text.txt")})) is not None:
            found.append(f"{what}: {json.dumps(arguments[len(QUICKEST) :], ensure_ascii=False)}\n{ended.err[-2000:]}")
    print(f"seed {seed}: {count} cases, {dict(statuses)}, {time.monotonic() - began:.0f} s, slowest {slowest:.1f} s")
    assert not found, f"seed {seed}: {len(found)} of {count}\n" + "\n".join(found)


@pytest.mark.slow
def test_some_dozens_are_finished_or_refused(tmp_path: Path, keys: dict[tuple[str, ...], list[str]]) -> None:
    campaign(f"{SEED}", 10, tmp_path, keys)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(10))
def test_two_thousand_are_finished_or_refused(
    part: int, tmp_path: Path, keys: dict[tuple[str, ...], list[str]]
) -> None:
    campaign(f"{SEED} nightly {part}", 200, tmp_path, keys)
