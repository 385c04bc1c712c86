"""What ``launcher=nodes`` refuses, before anything is started or written."""

import os
import subprocess
from pathlib import Path

import pytest
from torch.distributed import HashStore

from ddp_recipes.launchers.nodes.rendezvous import SignedBackend, signed_backend
from helpers.marks import quick_each
from helpers.patience import patience

KEY = {"DDP_RECIPES_KEY": "a secret that these nodes have"}
TINY = ["data=random", "model=toy", "launcher=nodes", "hydra.run.dir=run"]
ENDPOINT = "launcher.rdzv_endpoint=127.0.0.1:29477"
LOCAL = "launcher.local_addr=127.0.0.1"


@pytest.mark.slow
def test_a_file_that_is_no_meeting_place_is_left_as_it_is(tmp_path: Path, python: str) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text('{"a": "b"}')
    os.utime(mine, (0, 0))
    command = [python, "-m", "ddp_recipes", *TINY, "strategy=ddp_exact", f"launcher.rdzv_endpoint=file://{mine}"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=os.environ | KEY, capture_output=True, text=True, timeout=patience(60)
    )
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False)
    assert "mine.json is another file, in which no nodes have met" in ended.stderr
    assert mine.read_text() == '{"a": "b"}'


@pytest.mark.parametrize(
    ("overrides", "environ", "message"),
    quick_each(
        3,
        [
            (["strategy=ddp_exact"], KEY, "launcher=nodes needs launcher.rdzv_endpoint: host:port of one of the nodes"),
            (["strategy=ddp_exact", ENDPOINT], {}, "DDP_RECIPES_KEY to the same secret for every rank"),
            (["strategy=ddp", ENDPOINT], KEY, "with ddp the result depends on how many there are"),
            (["strategy=ddp_exact", ENDPOINT, "launcher.min_nodes=3"], KEY, "launcher.min_nodes=3 is more than"),
            (["strategy=ddp_exact", ENDPOINT, "launcher.max_restarts=1"], KEY, "launcher.max_restarts=1 is not taken"),
            (["strategy=ddp_exact", "launcher.rdzv_endpoint=no-such-host.invalid"], KEY, "has no address here"),
            (["strategy=ddp_exact", "launcher.rdzv_endpoint=no.invalid", LOCAL], KEY, "no.invalid has no address here"),
            (
                ["strategy=ddp_exact", "launcher.rdzv_endpoint=node1:"],
                KEY,
                "launcher.rdzv_endpoint=node1: is not allowed",
            ),
            (
                ["strategy=ddp_exact", "launcher.rdzv_endpoint=file://here"],
                KEY,
                "file:///an/absolute/path that all nodes",
            ),
            (["strategy=ddp_exact", "launcher.rdzv_endpoint=file:///proc/no"], KEY, "Give a file on a file system"),
        ],
    ),
)
def test_it_refuses(overrides: list[str], environ: dict[str, str], message: str, tmp_path: Path, python: str) -> None:
    # Without a home folder there is no key in it.
    own = {**os.environ, "HOME": str(tmp_path), "DDP_RECIPES_KEY": "", **environ}
    command = [python, "-m", "ddp_recipes", *TINY, *overrides]
    ended = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=patience(60))
    assert ended.returncode == 2, ended.stderr
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists()


class Kept:
    """A backend that keeps its state here."""

    name = "kept"

    def __init__(self) -> None:
        self.state = b""

    def get_state(self) -> tuple[bytes, int] | None:
        return (self.state, len(self.state)) if self.state else None

    def set_state(self, state: bytes, token: object = None) -> tuple[bytes, int, bool]:
        self.state = state
        return state, len(state), True


def test_a_state_of_the_rendezvous_that_was_written_without_the_key_is_never_unpickled() -> None:
    kept = Kept()
    signed, other = (SignedBackend(kept, key, b"run") for key in (b"a key", b"another"))  # type: ignore[arg-type]
    assert signed.get_state() is None
    assert signed.set_state(b"the state") == (b"the state", len(kept.state), True)
    assert signed.get_state() == (b"the state", len(kept.state))
    for state in (kept.state[:-1] + b"E", b"the state", b""):
        kept.state = state or b"x"
        with pytest.raises(Exception, match="was not written with this node's key"):
            signed.get_state()
    signed.set_state(b"the state")
    with pytest.raises(Exception, match="was not written with this node's key"):
        other.get_state()


def test_a_state_of_the_rendezvous_that_an_earlier_run_left_is_taken_by_none_with_its_name_and_key() -> None:
    earlier, later = HashStore(), HashStore()
    first, second = (signed_backend(store, b"a key", "run") for store in (earlier, later))
    first.set_state(b"who is there")
    assert signed_backend(earlier, b"a key", "run").get_state() == first.get_state(), "of this run it is"
    (name,) = (each for each in ("torch.rendezvous.run", "torch_rendezvous.run") if earlier.check([each]))
    later.set(name, earlier.get(name))
    with pytest.raises(Exception, match="was not written with this node's key for this run"):
        second.get_state()
