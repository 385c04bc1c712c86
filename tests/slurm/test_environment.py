"""Whoever starts the ranks, each finds its place: Slurm's and MPI's names become torchrun's."""

import pytest

from ddp_recipes.config.settings import LauncherSettings
from ddp_recipes.errors import RequestError
from ddp_recipes.launchers import environment
from ddp_recipes.launchers.slurm import step
from ddp_recipes.runtime.world import World
from helpers.patience import patience

# What srun sets for the fourth of five tasks on three nodes.
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "127.0.0.[1-3]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def launcher(nproc_per_node: int | None = None, nnodes: int = 1) -> LauncherSettings:
    return LauncherSettings(
        name="auto",
        nproc_per_node=nproc_per_node or "auto",
        nnodes=nnodes,
        max_restarts=0,
        start_method="forkserver",
        timeout_s=patience(60),
        backend="auto",
        device="auto",
        init_method=None,
    )


def test_a_process_that_was_started_alone_has_no_place() -> None:
    assert environment.join({"HOME": "/root"}) is None


def test_torchruns_variables_stay_as_they_are() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **ADDRESS, **STEP}
    before = dict(environ)
    assert environment.join(environ) == World(1, 2, 1, 2, 0)
    assert environ == before


def test_a_task_of_srun_is_a_rank() -> None:
    environ = dict(STEP)
    assert environment.join(environ) == World(rank=3, world_size=5, local_rank=1, local_world_size=2, node_rank=1)
    assert environ["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize("started", [STEP, OPEN_MPI])
def test_a_script_may_set_some_of_torchruns_variables_for_the_ranks_that_it_starts(started: dict[str, str]) -> None:
    environ = {**started, **ADDRESS, "WORLD_SIZE": started.get("SLURM_STEP_NUM_TASKS", "4")}
    world = environment.join(environ)
    assert world is not None
    assert (world.rank, world.local_rank, str(world.world_size)) == (3, 1, environ["WORLD_SIZE"])
    assert ADDRESS.items() <= environ.items()


def test_all_tasks_of_a_step_agree_on_a_port_that_no_other_step_has() -> None:
    def port(**changed: str) -> str:
        environ = {**STEP, **changed}
        environment.join(environ)
        return environ["MASTER_PORT"]

    assert port() == port(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0")
    assert len({port(), port(SLURM_STEP_ID="3"), port(SLURM_JOB_ID="4712")}) == 3
    assert port(MASTER_PORT="29500") == "29500"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login1", "login1"),
        ("login1,gpu[07-09]", "login1"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu[12,07-09]", "gpu12"),
        ("rack[1-2]node[03-04]-ib", "rack1node03-ib"),
        ("127.0.0.[1-2]", "127.0.0.1"),
    ],
)
def test_the_first_node_of_the_step_is_where_ranks_meet(nodes: str, first: str) -> None:
    variables = environment.translate({**STEP, "SLURM_STEP_NODELIST": nodes})
    assert variables is not None
    assert variables["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    "environ",
    [
        {name: value for name, value in STEP.items() if "STEP" not in name},
        {**STEP, "SLURM_PTY_PORT": "40000", "SLURM_STEP_NUM_TASKS": "1"},
    ],
    ids=["batch script or salloc", "srun --pty bash"],
)
def test_a_shell_in_an_allocation_starts_processes_of_its_own(environ: dict[str, str]) -> None:
    assert environment.join(dict(environ)) is None


def test_a_rank_of_mpirun_is_a_rank() -> None:
    expected = World(rank=3, world_size=4, local_rank=1, local_world_size=2, node_rank=1)
    assert environment.join({**OPEN_MPI, **ADDRESS}) == expected
    names = zip(OPEN_MPI, ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), strict=True)
    assert environment.join({intel: OPEN_MPI[name] for name, intel in names} | ADDRESS) == expected


def test_mpirun_inside_an_allocation_counts_by_its_own_names() -> None:
    daemon = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}
    world = environment.join({**STEP, **daemon, **OPEN_MPI, **ADDRESS})
    assert world is not None
    assert (world.rank, world.world_size) == (3, 4)


def test_mpirun_on_one_host_needs_no_address() -> None:
    environ = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert environment.join(environ) == World(3, 4, 3, 4, 0)
    assert environ["MASTER_ADDR"] == "127.0.0.1"


def test_mpirun_on_several_hosts_is_told_to_give_an_address() -> None:
    with pytest.raises(RequestError, match="mpirun -x MASTER_ADDR=<first host> -x MASTER_PORT=29500"):
        environment.join(dict(OPEN_MPI))


def test_a_first_host_without_an_address_is_refused() -> None:
    with pytest.raises(RequestError, match=r"MASTER_ADDR=no-such-host\.invalid, has no address here"):
        environment.join({**STEP, "SLURM_STEP_NODELIST": "no-such-host.invalid"})


@pytest.mark.parametrize("port", ["99999", "0", "http", "-1"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(RequestError, match=rf"^MASTER_PORT={port} is no port\. Set one that is free"):
        environment.join({**OPEN_MPI, **ADDRESS, "MASTER_PORT": port})


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (launcher(nproc_per_node=4), "launcher.nproc_per_node=4, but Slurm started this step with --ntasks-per-node=2"),
        (launcher(nnodes=2), "launcher.nnodes=2, but Slurm started this step with --nodes=3"),
    ],
)
def test_another_layout_than_asked_for_is_refused(asked: LauncherSettings, message: str) -> None:
    with pytest.raises(RequestError) as refusal:
        step.refuse_other_tasks(World(3, 5, 1, 2, 1), asked, STEP)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("asked", "by_torchrun"),
    [
        (launcher(), {}),
        (launcher(nproc_per_node=2, nnodes=3), {}),
        (launcher(nproc_per_node=4), {"TORCHELASTIC_RUN_ID": "srun torchrun: ranks are its, not tasks"}),
    ],
)
def test_the_layout_asked_for_is_taken(asked: LauncherSettings, by_torchrun: dict[str, str]) -> None:
    assert step.refuse_other_tasks(World(3, 5, 1, 2, 1), asked, STEP | by_torchrun) is None
