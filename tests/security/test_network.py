"""A stranger at the store of torchrun or of ranks that meet at an address, which asks nobody who they are."""

import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from signal import SIGKILL, SIGTERM

import pytest
from torch.distributed import FileStore, TCPStore

from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.launchers.environment import find_key
from ddp_recipes.runtime.messages import Messages
from helpers.attacks import as_user, blame, forge, get_between, scribble, writes_into
from helpers.marks import at_night, slow_but
from helpers.patience import patience
from helpers.processes import ENDLESS, SMALL, START_S, TORCHRUN, TWO, Run, ran, started, summary, until, until_saved

KEY = "a secret of sixteen characters and more"


def port_of(rank: int) -> int:
    """Return where the ranks meet, by the process of one."""
    environ = Path(f"/proc/{rank}/environ").read_bytes().decode().split("\0")
    return int(next(line for line in environ if line.startswith("MASTER_PORT=")).partition("=")[2])


def attacked(port: int) -> bool:
    """Whether a stranger has written to the store."""
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return bool(store.check(["attacked"]))


# --- torchrun


@pytest.mark.slow
@pytest.mark.spawn
def test_ranks_take_neither_jobs_nor_log_lines_from_a_stranger(stranger: int, folder: Path) -> None:
    with started(folder, *ENDLESS, "launcher.timeout_s=10", command=TORCHRUN) as run:
        until_saved(run, folder / "run")
        port = port_of(run.rank(1))
        forgery = partial(forge, f"{folder}/touched", "a forged line")
        with as_user(stranger, partial(writes_into, "127.0.0.1", port, forgery)):
            until(lambda: attacked(port), START_S, "nothing was forged")
            run.signal(SIGTERM)
            ended = run.end()
    log = (folder / "run" / "train.log").read_text()
    assert "a forged line" not in log + ended.out + ended.err
    assert "rank 1: a line is left out. The message" in log
    assert not (folder / "touched").exists()
    assert summary(folder / "run")["status"] == "preempted"


# What rank 0 is held in; what rank 1 has written by then; what a stranger writes after that; which message is refused:
# none if the run goes on as it was.
PHASES = {
    "the start": (
        ["model._target_=own_models.HeldWhileMade"],
        "/ready/1",
        {"run/0/ready/0": '["ready", "", {}]', "run/0/verdict": '["refused", "go away", []]'},
        "ready",
    ),
    "a save": (
        ["+callbacks.held._target_=own_models.HeldInSave", "checkpoint.every_n_steps=5"],
        "/ready/1",
        {"run/0/log/1/1": "a forged line", "run/0/failed/1": "x", "run/0/failure": '[1, "forged"]'},
        None,
    ),
    "the end": (
        ["strategy._target_=own_models.EndsLate"],
        "/ended/1",
        {"run/0/ended/0": "x", "run/0/ended/1": "x", "run/0/left/0": "x"},
        "ended",
    ),
    "a sweep": (
        ["strategy._target_=own_models.EndsLate", "-m", "seed=42,43", "hydra.sweep.dir=."],
        "/ended/1",
        {"message/1": ""},
        "message/1",
    ),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the weights of a run that nobody attacks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert ran(folder, *SMALL, TWO).status == 0
    digest: str = summary(folder / "run")["weights_sha256"]
    return digest


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.parametrize("phase", slow_but([], PHASES, daily=["the start"]))
def test_a_stranger_changes_nothing_in(phase: str, stranger: int, folder: Path, undisturbed: str) -> None:
    held, written, forged, refused = PHASES[phase]
    with started(folder, *SMALL, *held, f"launcher.timeout_s={round(patience(20))}", command=TORCHRUN) as run:
        until(lambda: (folder / "held").exists() or run.process.poll() is not None, START_S, "it does not begin")
        port = port_of(run.rank(1))
        forgery = partial(scribble, f"{folder}/elsewhere", written, forged, refused is None)
        with as_user(stranger, partial(writes_into, "127.0.0.1", port, forgery)):
            until(lambda: attacked(port), START_S, "nothing was forged")
            (folder / "attacked").touch()
            ended = run.end()
    assert not (folder / "elsewhere").exists()
    directory = folder / ("0" if phase == "a sweep" else "run")
    if refused is None:
        assert ended.status == 0, ended.err
        log = (directory / "train.log").read_text()
        assert "forged" not in log
        assert "rank 1: a line is left out. The message" in log
    elif ended.status or phase != "a sweep":  # in which rank 0 may have written its own next job over the forged one
        assert ended.status == 1
        assert re.search(rf"The message \S.*/{refused}\S* in the store where ranks meet was not written", ended.err)
    if refused in (None, "message/1"):
        assert summary(directory)["weights_sha256"] == undisturbed


@pytest.mark.slow
@pytest.mark.spawn
def test_ranks_take_no_address_from_a_stranger(stranger: int, folder: Path) -> None:
    joins = ["strategy._target_=own_models.JoinsLate", f"launcher.timeout_s={round(patience(60))}"]
    with started(folder, *SMALL, *joins, command=TORCHRUN) as run:
        until(lambda: "1" in run.pids().values(), START_S, "no rank 1")
        port = port_of(run.rank(1))
        with as_user(stranger, partial(writes_into, "127.0.0.1", port, get_between)):
            until(lambda: attacked(port), START_S, "nothing was forged")
            (folder / "attacked").touch()
            ended = run.end()
    assert ended.status == 1
    assert re.search(r"The message \S.*/group/\S+/1 in the store where ranks meet was not written with", ended.err)


# --- ranks that meet at an address


@contextmanager
def ranks(folder: Path, *overrides: str, of_rank: Mapping[int, Mapping[str, str]]) -> Iterator[list[Run]]:
    """Start ranks that meet at a free port, each with variables of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                started(
                    folder,
                    *SMALL,
                    "launcher.timeout_s=10",
                    *overrides,
                    environ={"RANK": (at := str(number % 10)), "LOCAL_RANK": at, **shared, "HOME": str(folder), **more},
                )
            )
            for number, more in of_rank.items()
        ]


def variables(**more: str) -> dict[int, dict[str, str]]:
    return {0: more, 1: more}


@pytest.mark.spawn
@pytest.mark.slow
def test_ranks_with_one_key_train_and_with_none_say_what_to_do(folder: Path) -> None:
    with ExitStack() as stack:
        keyed = stack.enter_context(ranks(folder, of_rank=variables(DDP_RECIPES_KEY=KEY)))
        assert [run.end().status for run in keyed] == [0, 0]
        assert "there is no key" not in (folder / "run" / "train.log").read_text()
        without = stack.enter_context(ranks(folder, "hydra.run.dir=open", of_rank=variables()))
        assert [run.end().status for run in without] == [0, 0]
        log = (folder / "open" / "train.log").read_text()
        assert log.count("there is no key") == 1
        assert "(umask 077; openssl rand -hex 32 > ~/.ddp_recipes_key)" in log


@pytest.mark.slow
@pytest.mark.spawn
def test_a_key_may_be_required(folder: Path) -> None:
    with ranks(folder, "launcher.require_key=true", of_rank=variables()) as both:
        ends = [run.end() for run in both]
    assert ends[0].status == 2
    assert "launcher.require_key=true, but others who reach MASTER_ADDR" in ends[0].err
    assert not (folder / "run").exists()


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.parametrize("theirs", [*at_night(""), "another key of sixteen characters"])
def test_a_rank_with_another_key_is_refused(theirs: str, folder: Path) -> None:
    with ranks(folder, of_rank={0: {"DDP_RECIPES_KEY": KEY}, 1: {"DDP_RECIPES_KEY": theirs}}) as both:
        ends = [run.end() for run in both]
    assert [ended.status for ended in ends] == [1, 1]
    assert "was not written with this rank's key" in ends[1].err
    assert "Rank 1 of 2 did not arrive" in ends[0].err


@pytest.mark.slow
@pytest.mark.spawn
def test_a_rank_of_another_run_is_refused_and_changes_nothing(folder: Path) -> None:
    """Ports of Slurm's steps are computed, and may be the same."""
    steps = {1: {"SLURM_JOB_ID": "8", "SLURM_STEP_ID": "0"}, 2: {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0"}}
    late = ["strategy._target_=own_models.JoinsLate", f"launcher.timeout_s={round(patience(60))}"]
    with ranks(folder, *late, of_rank={11: steps[2], 0: steps[1], 1: steps[1]}) as (foreign, *own):
        ended = foreign.end()
        (folder / "attacked").touch()
        assert [run.end().status for run in own] == [0, 0]
    assert ended.status == 2
    assert "are of another run: Slurm step 8.0, 2 ranks. This is rank 1 of Slurm step 9.0, 2 ranks." in ended.err


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.spawn
def test_workers_go_on_without_a_dead_one_that_a_stranger_blames(stranger: int, folder: Path) -> None:
    servers = ["strategy=parameter_server", "strategy.staleness=2", *ENDLESS]
    own = {rank: {"DDP_RECIPES_KEY": KEY, "WORLD_SIZE": "3"} for rank in range(3)}
    with ranks(folder, *servers, of_rank=own) as (server, worker, dies):
        until_saved(server, folder / "run")
        port = port_of(server.process.pid)
        with as_user(stranger, partial(writes_into, "127.0.0.1", port, partial(blame, 2))):
            until(lambda: attacked(port), START_S, "nothing was forged")
            dies.signal(SIGKILL)
            log = folder / "run" / "train.log"
            until(lambda: "Rank 2 died; 1 of 2 workers go on." in log.read_text(), START_S, "it does not go on")
            server.signal(SIGTERM)
            assert [run.end().status for run in (server, worker)] == [75, 75]


# --- messages


def test_a_message_is_worth_nothing_elsewhere(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"))
    ours = Messages(store, b"key").under("run/0")
    ours.set("message/1", "go")
    assert Messages(store, b"key").under("run/0").get("message/1") == "go"
    raw = store.get("run/0//message/1") if store.check(["run/0//message/1"]) else store.get("run/0/message/1")
    for name in ("message/2", "verdict"):
        ours.store.set(name, raw)
        with pytest.raises(RunFailed, match=f"run/0/{name} in the store where ranks meet was not written"):
            ours.get(name)
    later = Messages(store, b"key").under("run/1")
    later.store.set("message/1", raw)
    with pytest.raises(RunFailed, match="was not written with this rank's key"):
        later.get("message/1")


@pytest.mark.parametrize(("writer", "reader"), [(b"", b"key"), (b"key", b""), (b"one", b"other")])
def test_a_message_takes_the_readers_key(writer: bytes, reader: bytes, tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"))
    Messages(store, writer).set("verdict", "ready")
    with pytest.raises(RunFailed, match="was not written with this rank's key"):
        Messages(store, reader).get("verdict")
    with pytest.raises(RunFailed, match="was not written with this rank's key"):
        Messages(store, reader).first("verdict", "mine")


def test_who_says_that_a_rank_failed_has_to_have_the_key(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"))
    Messages(store, b"key").set("failed/1", "")
    for name, text in (("failed/2", ""), ("failed/3", ":"), ("failed/4", store.get("failed/1").decode())):
        store.set(name, text)
    names = [f"failed/{rank}" for rank in range(5)]
    assert list(Messages(store, b"key").there(*names)) == ["failed/1"]
    assert Messages(store, b"key").claimed(*names) == names[1:]


@pytest.mark.parametrize("text", ["", ":", "\udcff:x", "0" * 32 + ":x", "no digest", "x" * 100_000])
def test_junk_is_no_message(text: str, tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"))
    store.set("verdict", text.encode(errors="surrogateescape").decode(errors="replace"))
    with pytest.raises(RunFailed, match="was not written with this rank's key"):
        Messages(store, b"key").get("verdict")


@pytest.mark.slow
def test_two_thousand_messages_with_a_byte_changed_are_refused(tmp_path: Path) -> None:
    random, store = Random(16), FileStore(str(tmp_path / "store"))
    Messages(store, b"key").set("verdict", json.dumps(["ready", "", []]))
    sound = store.get("verdict").decode()
    for _ in range(2000):
        at = random.randrange(len(sound))
        store.set("verdict", sound[:at] + random.choice([*"0:f[\n\x00é", "", "more"]) + sound[at + 1 :])
        if store.get("verdict").decode() != sound:
            with pytest.raises(RunFailed, match="was not written with this rank's key"):
                Messages(store, b"key").get("verdict")


# --- keys


def test_the_key_is_in_a_file_that_the_user_alone_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_key({}) == b""
    path = tmp_path / ".ddp_recipes_key"
    path.write_text(KEY + "\n")
    path.chmod(0o644)
    with pytest.raises(RequestError, match="nobody else can read"):
        find_key({})
    path.chmod(0o600)
    assert find_key({}) == find_key({"DDP_RECIPES_KEY": KEY}) != b""
    path.write_text("short\n")
    with pytest.raises(RequestError, match="is too short: give 16 characters"):
        find_key({})
