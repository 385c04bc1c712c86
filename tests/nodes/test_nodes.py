"""Several nodes: network namespaces with addresses of their own, torchrun on each."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.patience import patience
from helpers.processes import OWN_MODELS, until

pytestmark = pytest.mark.spawn

TINY = [
    "data=random",
    "data.num_samples=256",
    "data.global_batch_size=16",
    "model=toy",
    "trainer.progress=false",
    "logger=none",
    "launcher.device=cpu",
]
TIMEOUT_S = 8
# Trains for minutes, so that there is time to hurt it; leaves a checkpoint every few steps.
ENDLESS = [*TINY, "trainer.max_epochs=100000", "checkpoint.every_n_steps=20", f"launcher.timeout_s={TIMEOUT_S}"]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Nodes:
    """Two namespaces on one bridge, a third one for a stranger, and the processes started in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tag = f"{os.getpid() % 10_000:x}"
        self.bridge = f"rb{self.tag}"
        self.names = [f"rn{self.tag}-{number}" for number in (1, 2, 3)]
        self.processes: list[subprocess.Popen[bytes]] = []

    def set_up(self) -> None:
        ip("link", "add", self.bridge, "type", "bridge")
        ip("link", "set", self.bridge, "up")
        for number, name in enumerate(self.names, 1):
            ip("netns", "add", name)
            outer = f"rv{self.tag}-{number}"
            ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", outer, "master", self.bridge, "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")

    def tear_down(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for name in self.names:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in pids:
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        for link in (
            *(f"rv{self.tag}-{number}" for number in (1, 2, 3)),
            self.bridge,
        ):  # the kernel takes its time else
            subprocess.run(["ip", "link", "del", link], capture_output=True)

    def cut(self, node: int) -> None:
        ip("link", "set", f"rv{self.tag}-{node}", "down")

    def pids(self, node: int) -> list[int]:
        """Return the processes in a namespace that have not ended."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.names[node - 1]], capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in listed.stdout.split() if not _is_zombie(int(pid))]

    def add_interface_that_loses_packets(self) -> None:
        """Add an eth1 to each node, whose packets to the others never arrive, as behind a firewall that drops them."""
        for number, name in enumerate(self.names[:2], 1):
            outer = f"rw{self.tag}-{number}"
            ip("link", "add", outer, "type", "veth", "peer", "name", "eth1", "netns", name)
            ip("link", "set", outer, "up")
            ip("-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", "eth1")
            ip("-n", name, "link", "set", "eth1", "up")
            other = f"10.78.0.{3 - number}"
            ip("-n", name, "neigh", "add", other, "lladdr", "02:00:00:00:00:01", "dev", "eth1", "nud", "permanent")

    def torchrun(
        self,
        node: int,
        *overrides: str,
        nnodes: str = "2",
        options: tuple[str, ...] = (),
        interface: str = "eth0",
        host: int = 1,
        joins: bool = False,
    ) -> None:
        """Start torchrun with one rank on a node, in a folder that the nodes share; they meet at the ``host``."""
        command = [
            *("ip", "netns", "exec", self.names[node - 1], sys.executable, "-m", "torch.distributed.run"),
            *(
                f"--nnodes={nnodes}",
                "--nproc-per-node=1",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint=10.77.0.{host}:29400",
            ),
            *("--rdzv-id=test", f"--local-addr=10.77.0.{node}"),
            *(f"--rdzv-conf=is_host={int(node == host)},last_call_timeout=3", *options),
            *("-m", "ddp_recipes", *overrides),
        ]
        # Without the last one torch's own agents lose each other when a node joins.
        self.start(node, command, GLOO_SOCKET_IFNAME=interface, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=str(int(joins)))

    def supervise(self, node: int, *overrides: str) -> None:
        """Start ``launcher=nodes`` in a folder that the nodes share; they meet at the first, or as overrides say."""
        own = ["launcher=nodes", "launcher.rdzv_endpoint=10.77.0.1:29400", "ckpt_path=auto", "hydra.run.dir=run"]
        self.python(node, "-m", "ddp_recipes", *own, *overrides)

    def python(self, node: int, *arguments: str) -> None:
        """Start Python on a node, with the key that the nodes have."""
        command = ["ip", "netns", "exec", self.names[node - 1], sys.executable, *arguments]
        self.start(node, command, GLOO_SOCKET_IFNAME="eth0", DDP_RECIPES_KEY="a secret that these nodes have")

    def start(self, node: int, command: list[str], **environ: str) -> None:
        with (self.folder / f"node_{node}.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=os.environ | environ, stdout=log, stderr=subprocess.STDOUT
            )
        self.processes.append(process)

    def said(self, node: int) -> str:
        return (self.folder / f"node_{node}.log").read_text()

    def ended(self, number: int, seconds: float) -> int:
        """Wait for one of what was started; return its exit status."""
        return self.processes[number].wait(patience(seconds))

    def wait(self, seconds: float = 120) -> list[int]:
        """Wait for all torchruns; return their exit statuses."""
        deadline = time.monotonic() + patience(seconds)
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip (iproute2), which is not installed")
    made = Nodes(tmp_path)
    try:
        made.set_up()
    except (OSError, subprocess.CalledProcessError) as error:
        made.tear_down()
        pytest.skip(f"network namespaces cannot be made here: {error}")
    yield made
    made.tear_down()


def wait_for_checkpoint(folder: Path, after: int = 0, seconds: float = 90) -> int:
    """Wait until a checkpoint of a later step is there; return its step."""
    deadline = time.monotonic() + patience(seconds)
    while time.monotonic() < deadline:
        steps = [int(path.stem.split("_")[1]) for path in (folder / "checkpoints").glob("step_*.*")]
        if max(steps, default=0) > after:
            return max(steps)
        time.sleep(0.05)
    raise AssertionError(f"no checkpoint after step {after} in {folder}")


def wait_until_no_rank_is_left(nodes: Nodes, node: int, seconds: float) -> float:
    """Return after how many seconds no process of the package is left on a node."""
    began = time.monotonic()
    while time.monotonic() - began < patience(seconds):
        commands = [
            Path(f"/proc/{pid}/cmdline").read_bytes() for pid in nodes.pids(node) if Path(f"/proc/{pid}").exists()
        ]
        if not any(b"ddp_recipes" in command and b"torch.distributed.run" not in command for command in commands):
            return time.monotonic() - began
        time.sleep(0.1)
    raise AssertionError(f"ranks are left on node {node} after {seconds} s:\n{nodes.said(node)}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "devices_per_replica"), [("ddp", 1), pytest.param("ddp_pipeline", 2, marks=pytest.mark.nightly)]
)
def test_two_nodes_make_one_run_with_the_weights_of_a_local_one(
    strategy: str, devices_per_replica: int, nodes: Nodes, tmp_path: Path, python: str
) -> None:
    overrides = [*TINY, "trainer.max_epochs=2", f"strategy={strategy}"]
    for node in (1, 2):
        nodes.torchrun(node, *overrides)
    assert nodes.wait() == [0, 0], nodes.said(1) + nodes.said(2)
    (directory,) = tmp_path.glob("outputs/*/*")
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["world_size"], summary["nnodes"], summary["status"]) == (2, 2, "finished")
    assert summary["devices_per_replica"] == devices_per_replica

    local = [python, "-m", "ddp_recipes", *overrides, f"hydra.run.dir={tmp_path / 'local'}"]
    subprocess.run(local, cwd=tmp_path, check=True, capture_output=True, timeout=patience(120))
    here = json.loads((tmp_path / "local" / "summary.json").read_text())
    assert here["weights_sha256"] == summary["weights_sha256"]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_sweep_over_two_nodes_makes_one_directory_a_job(nodes: Nodes, tmp_path: Path) -> None:
    for node in (1, 2):
        nodes.torchrun(node, "-m", *TINY, "trainer.max_epochs=1", "optimizer.lr=0.1,0.01", "hydra.sweep.dir=sweep")
    assert nodes.wait() == [0, 0], nodes.said(1) + nodes.said(2)
    summaries = [json.loads((tmp_path / "sweep" / job / "summary.json").read_text()) for job in ("0", "1")]
    assert [summary["status"] for summary in summaries] == ["finished", "finished"]
    assert {path.name for path in (tmp_path / "sweep").iterdir()} == {"0", "1", "multirun.yaml", "sweep.csv"}


@pytest.mark.nightly
def test_both_sides_of_a_cut_link_end_soon_after_the_timeout(nodes: Nodes, tmp_path: Path) -> None:
    for node in (1, 2):
        nodes.torchrun(node, *ENDLESS, "hydra.run.dir=run")
    wait_for_checkpoint(tmp_path / "run")
    nodes.cut(2)
    for node in (1, 2):
        wait_until_no_rank_is_left(nodes, node, TIMEOUT_S + 5)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    assert "did not respond within launcher.timeout_s" in nodes.said(1)


@pytest.mark.nightly
def test_nodes_that_do_not_reach_each_other_are_named_with_their_addresses(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add_interface_that_loses_packets()
    for node in (1, 2):
        nodes.torchrun(node, *TINY, f"launcher.timeout_s={TIMEOUT_S}", "hydra.run.dir=run", interface="eth1")
    said = re.compile(r"rank 0 \(10\.78\.0\.1\) cannot reach rank 1 at 10\.78\.0\.2:\d+ \(no answer in 8 seconds\)")
    assert set(nodes.wait()) == {1}
    assert said.search(nodes.said(1)), nodes.said(1)
    assert "Open the ports between them in the firewall" in nodes.said(1)


@pytest.mark.nightly
def test_a_stranger_on_the_network_gives_no_job_and_writes_no_line(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDP_RECIPES_KEY", "a secret that these two nodes have")
    for node in (1, 2):
        nodes.torchrun(node, *ENDLESS, "hydra.run.dir=run")
    wait_for_checkpoint(tmp_path / "run")
    environs = [Path(f"/proc/{pid}/environ").read_bytes().decode() for pid in nodes.pids(1)]
    (port, *_) = (found[1] for environ in environs if (found := re.search(r"MASTER_PORT=(\d+)", environ)))
    code = (
        "from torch.distributed import TCPStore\nfrom helpers.attacks import forge\n"
        f"store = TCPStore('10.77.0.1', {port}, is_master=False, wait_for_workers=False)\n"
        f"forge('{tmp_path}/touched', 'a forged line', store)"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    stranger = ["ip", "netns", "exec", nodes.names[2], sys.executable, "-c", code]
    subprocess.run(stranger, check=True, timeout=patience(60), env=environ)
    for process in nodes.processes:
        process.send_signal(signal.SIGTERM)
    nodes.wait()
    log = (tmp_path / "run" / "train.log").read_text()
    assert "rank 1: a line is left out. The message" in log
    assert "a forged line" not in log + nodes.said(1) + nodes.said(2)
    assert not (tmp_path / "touched").exists()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "preempted"


@pytest.mark.slow
def test_the_other_node_ends_when_one_is_killed(nodes: Nodes, tmp_path: Path) -> None:
    for node in (1, 2):
        nodes.torchrun(node, *ENDLESS, "hydra.run.dir=run")
    wait_for_checkpoint(tmp_path / "run")
    for pid in nodes.pids(2):
        os.kill(pid, signal.SIGKILL)
    wait_until_no_rank_is_left(nodes, 1, 15)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_elastic_run_goes_on_with_the_node_that_is_left(
    number: signal.Signals, nodes: Nodes, tmp_path: Path
) -> None:
    overrides = [*ENDLESS, "trainer.max_steps=4000", "checkpoint.save_top_k=-1"]
    for node in (1, 2):
        nodes.torchrun(node, *overrides, nnodes="1:2", options=("--max-restarts=3",))
    deadline = time.monotonic() + patience(90)
    while not (found := list(tmp_path.glob("outputs/*/*/checkpoints/step_*.*"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    directory = found[0].parents[1]
    for pid in nodes.pids(2) if number == signal.SIGKILL else [nodes.processes[1].pid]:  # its torchrun alone
        os.kill(pid, number)
    assert nodes.wait(150)[0] == 0, nodes.said(1)
    assert [path.name for path in tmp_path.glob("outputs/*/*")] == [directory.name]
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["status"], summary["world_size"], summary["global_step"]) == ("finished", 1, 4000)
    assert summary["samples_seen"] == 4000 * 16


@pytest.mark.nightly
def test_a_node_that_joins_and_becomes_the_first_goes_on_in_the_directory_of_the_others(
    nodes: Nodes, tmp_path: Path
) -> None:
    shutil.copy(OWN_MODELS, tmp_path)
    slow = ["model._target_=own_models.Slow", "+model.sleep_s=0.02", "trainer.num_sanity_val_steps=0"]
    overrides = [*ENDLESS, *slow, "trainer.max_steps=1000"]
    nodes.torchrun(2, *overrides, nnodes="1:2", host=2, joins=True)
    deadline = time.monotonic() + patience(90)
    while not (found := list(tmp_path.glob("outputs/*/*/checkpoints/step_*.*"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    directory = found[0].parents[1]
    nodes.torchrun(1, *overrides, nnodes="1:2", host=2, joins=True)  # the lower address: rank 0 is on this node now
    assert nodes.wait(150) == [0, 0], nodes.said(1) + nodes.said(2)
    assert [path.name for path in tmp_path.glob("outputs/*/*")] == [directory.name]
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["status"], summary["world_size"], summary["global_step"]) == ("finished", 2, 1000)
    assert summary["samples_seen"] == 1000 * 16
    assert re.search(r"steps +1,000, from [1-9]", nodes.said(1)), nodes.said(1)


def wait_for_step(log: Path, step: int, seconds: float = 90) -> None:
    """Wait until the log tells of a step that is no earlier."""
    deadline = time.monotonic() + patience(seconds)
    while time.monotonic() < deadline:
        if log.exists() and max(map(int, re.findall(r" step (\d+) ", log.read_text())), default=0) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"no step {step} in {log}")


SAME = ("weights_sha256", "global_step", "samples_seen")


def see_bits_of_one_process(summary: dict[str, object], folder: Path, python: str, *overrides: str) -> None:
    """See that a run ended as one undisturbed process does."""
    own = ["+model.sleep_s=0", "launcher.nproc_per_node=1", "hydra.run.dir=whole"]
    others = [each for each in overrides if "in_memory" not in each and "sleep_s" not in each]
    subprocess.run(
        [python, "-m", "ddp_recipes", *others, *own], cwd=folder, check=True, capture_output=True, timeout=120
    )
    alone = json.loads((folder / "whole" / "summary.json").read_text())
    assert {fact: summary[fact] for fact in SAME} == {fact: alone[fact] for fact in SAME}


@pytest.mark.nightly
def test_an_elastic_run_goes_on_from_the_memory_of_the_node_that_is_left(
    nodes: Nodes, tmp_path: Path, python: str
) -> None:
    shutil.copy(OWN_MODELS, tmp_path)
    slow = ["model._target_=own_models.Slow", "+model.sleep_s=0.01"]
    overrides = [*TINY, *slow, "strategy=ddp_exact", "trainer.max_epochs=8", "checkpoint.every_n_steps=1000"]
    for node in (1, 2):
        kept = "checkpoint.in_memory_every_n_steps=4"
        nodes.torchrun(node, *overrides, kept, "hydra.run.dir=run", nnodes="1:2", options=("--max-restarts=3",))
    log = tmp_path / "run" / "train.log"
    wait_for_step(log, 34)
    for pid in nodes.pids(2):
        os.kill(pid, signal.SIGKILL)
    assert nodes.wait(150)[0] == 0, nodes.said(1)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["world_size"], summary["ranks_replaced"]) == ("finished", 1, 1)
    told = re.findall(
        r"torchrun started all ranks again\. All started again from memory, at the cost of [\d.]+ s until step (\d+)",
        log.read_text(),
    )
    assert len(told) == 1
    assert (int(told[0]) % 4, int(told[0]) > 32) == (1, True)
    wait_until_no_rank_is_left(nodes, 1, 5)

    see_bits_of_one_process(summary, tmp_path, python, *overrides)


# --- launcher=nodes


LOST = r"Node 1 \(10\.77\.0\.2\) was lost\. All started again from memory, at the cost of [\d.]+ s until step (\d+)"


def cut_the_second_node_off(nodes: Nodes, log: Path) -> None:
    """Wait until node 2 has ended, and hold node 1, which goes on alone."""
    wait_for_step(log, 32)
    nodes.cut(2)
    until(lambda: re.search(LOST, log.read_text()), 60, "the loss of node 2 is not told")
    (nodes.folder / "hold").touch()
    assert nodes.ended(1, 30) == 1
    assert "This node is cut off from 10.77.0.1:29400" in nodes.said(2)
    wait_until_no_rank_is_left(nodes, 2, 5)


def let_the_third_node_join(nodes: Nodes, *overrides: str) -> None:
    """Node 1 goes on when node 3 waits for it."""
    nodes.supervise(3, *overrides)
    until(lambda: "Waiting at 10.77.0.1:29400 for the other nodes" in nodes.said(3), 60, "node 3 does not wait")
    (nodes.folder / "hold").unlink()
    assert [nodes.ended(0, 120), nodes.ended(2, 20)] == [0, 0], nodes.said(1) + nodes.said(3)


@pytest.mark.nightly
def test_a_node_is_cut_off_for_good_and_another_one_joins_with_the_same_bits(
    nodes: Nodes, tmp_path: Path, python: str
) -> None:
    shutil.copy(OWN_MODELS, tmp_path)
    slow = ["model._target_=own_models.Slow", "+model.sleep_s=0.05", "strategy=ddp_exact", "trainer.max_epochs=12"]
    overrides = [*TINY, *slow, "launcher.timeout_s=300"]
    for node in (1, 2):
        nodes.supervise(node, *overrides, "launcher.nproc_per_node=2")
    log = tmp_path / "run" / "train.log"
    cut_the_second_node_off(nodes, log)
    let_the_third_node_join(nodes, *overrides, "launcher.nproc_per_node=1")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["world_size"], summary["ranks_replaced"]) == ("finished", 3, 1)
    assert len(re.findall(LOST, log.read_text())) == 1

    see_bits_of_one_process(summary, tmp_path, python, *overrides)


@pytest.mark.nightly
def test_a_node_that_waits_to_join_while_the_run_ends_has_its_result(nodes: Nodes, tmp_path: Path) -> None:
    shutil.copy(OWN_MODELS, tmp_path)
    held = ["strategy=ddp_exact", "+callbacks.held._target_=own_models.HeldAtEnd", "trainer.max_epochs=1"]
    nodes.supervise(1, *TINY, *held, "launcher.more_after_s=1")
    until((tmp_path / "held").exists, 60, "the run does not end")
    nodes.supervise(2, *TINY, *held, "launcher.more_after_s=1")
    until(lambda: "Waiting at 10.77.0.1:29400 for the other nodes" in nodes.said(2), 60, "node 2 does not wait")
    (tmp_path / "attacked").touch()
    assert nodes.wait(60) == [0, 0], nodes.said(1) + nodes.said(2)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["nnodes"] == 1


MEETS_AND_DIES = """
import os
import signal
from types import SimpleNamespace

from ddp_recipes.launchers.nodes.rendezvous import Rendezvous

two = {"local_addr": None, "min_nodes": 2, "nnodes": 2, "lost_after_s": 5, "more_after_s": 2}
Rendezvous(SimpleNamespace(rdzv_endpoint="10.77.0.1:29400", rdzv_id="ddp_recipes", **two), []).handler.next_rendezvous()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_a_node_that_dies_as_all_have_met_keeps_none_from_meeting_again(nodes: Nodes, tmp_path: Path) -> None:
    overrides = [*TINY, "trainer.max_epochs=1", "launcher.min_nodes=2", "launcher.nproc_per_node=1"]
    nodes.supervise(1, *overrides)
    until(lambda: "Waiting at" in nodes.said(1), 60, "node 1 does not wait")
    nodes.python(2, "-c", MEETS_AND_DIES)
    assert nodes.ended(1, 60) == -signal.SIGKILL, nodes.said(2)
    nodes.supervise(2, *overrides)
    assert [nodes.ended(each, 60) for each in (0, 2)] == [0, 0], nodes.said(1) + nodes.said(2)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["nnodes"], summary["ranks_replaced"]) == ("finished", 2, 0)


@pytest.mark.nightly
def test_any_node_may_be_lost_where_all_meet_in_a_file(nodes: Nodes, tmp_path: Path, python: str) -> None:
    """The first one, which has the store of the ranks, then the one that has it after that; all meet there again."""
    shutil.copy(OWN_MODELS, tmp_path)
    slow = ["model._target_=own_models.Slow", "+model.sleep_s=0.02", "strategy=ddp_exact", "trainer.max_epochs=6"]
    meet = [f"launcher.rdzv_endpoint=file://{tmp_path}/meet", "launcher.nnodes=3", "launcher.more_after_s=5"]
    overrides = [*TINY, *slow, *meet, "launcher.timeout_s=300", "launcher.nproc_per_node=1"]
    for node in (1, 2, 3):
        nodes.supervise(node, *overrides, f"launcher.local_addr=10.77.0.{node}")
    log = tmp_path / "run" / "train.log"
    for node in (1, 2, 3):
        until(lambda node=node: len(nodes.pids(node)) > 2, 90, f"node {node} has no rank")  # type: ignore[misc]
    wait_for_step(log, 32)
    for count, node in enumerate((1, 2), 1):
        for pid in nodes.pids(node):
            os.kill(pid, signal.SIGKILL)
        told = rf"Node 0 \(10\.77\.0\.{node}\) was lost\. All started again from memory, at the cost of [\d.]+ s until"
        until(lambda told=told: re.search(told, log.read_text()), 60, f"loss {count} is not told")  # type: ignore[misc]
    assert nodes.ended(2, 120) == 0, nodes.said(3)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["world_size"], summary["ranks_replaced"]) == ("finished", 1, 2)
    see_bits_of_one_process(summary, tmp_path, python, *TINY, *slow)

    # The same command begins anew where the run is over, and the file is there.
    nodes.supervise(1, *overrides, "launcher.local_addr=10.77.0.1", "trainer.max_epochs=7")
    assert nodes.ended(3, 60) == 0, nodes.said(1)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["epoch"] == 7


@pytest.mark.nightly
def test_nodes_that_reach_the_file_but_not_each_other_end_the_run(nodes: Nodes, tmp_path: Path) -> None:
    """In each start a rank waits for another one that cannot answer: it is not by chance."""
    shutil.copy(OWN_MODELS, tmp_path)
    slow = ["model._target_=own_models.Slow", "+model.sleep_s=0.05", "strategy=ddp_exact", "trainer.max_epochs=1000"]
    meet = [f"launcher.rdzv_endpoint=file://{tmp_path}/meet", "launcher.min_nodes=2", "launcher.nproc_per_node=1"]
    for node in (1, 2):
        nodes.supervise(node, *TINY, *slow, *meet, f"launcher.local_addr=10.77.0.{node}", "launcher.timeout_s=3")
    wait_for_step(tmp_path / "run" / "train.log", 8)
    nodes.cut(2)
    assert nodes.wait(150) == [1, 1], nodes.said(1) + nodes.said(2)
    assert "3 times no step came after" in nodes.said(1) + nodes.said(2)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    for node in (1, 2):
        wait_until_no_rank_is_left(nodes, node, 5)


UNSAVED = ["checkpoint.every_n_steps=100000", "checkpoint.in_memory_every_n_steps=5"]
SHARDED = [
    *("model._target_=own_models.Slow", "+model.sleep_s=0.05", "strategy=fsdp", "strategy.shards=4"),
    "strategy.wrap=[net1,net2]",
    *("trainer.max_epochs=8", "launcher.timeout_s=300", *UNSAVED),
]


@pytest.mark.nightly
def test_a_sharded_model_goes_on_without_a_checkpoint_when_a_node_is_cut_off(
    nodes: Nodes, tmp_path: Path, python: str
) -> None:
    shutil.copy(OWN_MODELS, tmp_path)
    for node in (1, 2):
        nodes.supervise(node, *TINY, *SHARDED, "launcher.nproc_per_node=1")
    log = tmp_path / "run" / "train.log"
    cut_the_second_node_off(nodes, log)
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))
    let_the_third_node_join(nodes, *TINY, *SHARDED, "launcher.nproc_per_node=1")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["world_size"], summary["ranks_replaced"]) == ("finished", 2, 1)
    (step,) = map(int, re.findall(LOST, log.read_text()))
    assert step % 5 == 1
    assert "from the last checkpoint" not in nodes.said(1) + nodes.said(3)
    see_bits_of_one_process(summary, tmp_path, python, *TINY, *SHARDED)


@pytest.mark.nightly
def test_a_sharded_model_goes_on_without_a_checkpoint_when_all_of_a_node_is_killed(
    nodes: Nodes, tmp_path: Path, python: str
) -> None:
    shutil.copy(OWN_MODELS, tmp_path)
    for node in (1, 2):
        nodes.supervise(node, *TINY, *SHARDED, "launcher.nproc_per_node=2")
    log = tmp_path / "run" / "train.log"
    wait_for_step(log, 32)
    for pid in nodes.pids(2):
        os.kill(pid, signal.SIGKILL)
    assert nodes.ended(0, 120) == 0, nodes.said(1)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["world_size"], summary["ranks_replaced"]) == ("finished", 2, 1)
    assert len(re.findall("All started again from memory, at the cost of", log.read_text())) == 1
    see_bits_of_one_process(summary, tmp_path, python, *TINY, *SHARDED)


SLOW_STEPS = """
import time

from ddp_recipes import Callback


class Slow(Callback):
    def on_step(self, step):
        time.sleep(0.2)
"""


@pytest.mark.nightly
def test_stages_of_a_lost_node_are_in_the_memory_of_the_other_one(nodes: Nodes, tmp_path: Path, python: str) -> None:
    (tmp_path / "slow.py").write_text(SLOW_STEPS)
    overrides = [*TINY, "strategy=ddp_pipeline", "trainer.max_epochs=4", "launcher.min_nodes=2", *UNSAVED]
    slow = ["+callbacks.slow._target_=slow.Slow", "launcher.timeout_s=300", "launcher.nproc_per_node=1"]
    for node in (1, 2):
        nodes.supervise(node, *overrides, *slow)
    log = tmp_path / "run" / "train.log"
    wait_for_step(log, 32)
    for pid in nodes.pids(2):
        os.kill(pid, signal.SIGKILL)
    nodes.supervise(3, *overrides, *slow)
    assert [nodes.ended(0, 120), nodes.ended(2, 20)] == [0, 0], nodes.said(1) + nodes.said(3)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["world_size"], summary["ranks_replaced"]) == ("finished", 2, 1)
    assert len(re.findall("All started again from memory, at the cost of", log.read_text())) == 1
    local = [python, "-m", "ddp_recipes", *TINY, "strategy=ddp_pipeline", "trainer.max_epochs=4"]
    whole = [*local, "hydra.run.dir=whole", "launcher.nproc_per_node=2"]
    subprocess.run(whole, cwd=tmp_path, check=True, capture_output=True, timeout=patience(120))
    alone = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert {fact: summary[fact] for fact in SAME} == {fact: alone[fact] for fact in SAME}


DYING = """
import os
import signal
from pathlib import Path

from ddp_recipes import Callback


class Dying(Callback):
    def on_step(self, step):
        mark = Path("died_" + os.environ["RANK"])
        if step == 9 and os.environ["RANK"] in "03" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(["strategy=ddp"], id="ddp"),
        pytest.param(["strategy=fsdp", "strategy.shards=4", "strategy.wrap=[net1,net2]", *UNSAVED], id="fsdp"),
        pytest.param(["strategy=ddp_pipeline", *UNSAVED], id="ddp_pipeline"),
    ],
)
def test_ranks_of_two_nodes_die_at_once_and_all_go_on_with_the_same_bits(
    strategy: list[str], nodes: Nodes, tmp_path: Path
) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    overrides = [*TINY, *strategy, "trainer.max_epochs=2", "launcher.min_nodes=2", "launcher.nproc_per_node=2"]
    weights = []
    for name, own in (("run", ["+callbacks.dying._target_=dying.Dying"]), ("whole", [])):
        for node in (1, 2):
            nodes.supervise(node, *overrides, *own, f"hydra.run.dir={name}")
        assert nodes.wait() == [0, 0], nodes.said(1) + nodes.said(2)
        nodes.processes.clear()
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert (summary["world_size"], summary["ranks_replaced"]) == (4, 2 if own else 0)
        weights.append(summary["weights_sha256"])
    assert weights[0] == weights[1]
    log = (tmp_path / "run" / "train.log").read_text()
    for rank in (0, 3):
        told = rf"Rank {rank} \(process \d+\) was killed by SIGKILL, .* All started again from memory, at the cost of"
        assert len(re.findall(told, log)) == 1
