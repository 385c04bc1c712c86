"""What is known of a run before anything starts: the layout of its processes, and its resolved config."""

import re
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from omegaconf import DictConfig, OmegaConf

from ddp_recipes.config import compose
from ddp_recipes.config.compose import resolve
from ddp_recipes.config.overrides import spelled_out
from ddp_recipes.config.request import Request
from ddp_recipes.devices import Found, is_here, missing, of_gpus, seen
from ddp_recipes.errors import RequestError
from ddp_recipes.main import CONF


@cache
def _composed(*overrides: str) -> DictConfig:
    with compose.session(CONF) as hydra:
        config = compose.compose(hydra, "train", list(overrides))
    return OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])


def composed(*overrides: str) -> DictConfig:
    return deepcopy(_composed(*overrides))


def request_of(*overrides: str) -> Request:
    return Request.of(resolve(composed(*overrides)))


# --- dry run ---------------------------------------------------------------------------------------------------------


def test_a_cluster_is_stated_with_plan_in_any_order() -> None:
    for overrides, planned, nnodes in (
        ([], False, None),
        (["plan=true"], True, None),
        (["plan=true", "plan.nnodes=2"], True, 2),
        (["plan.nnodes=2", "plan=true"], True, 2),
        (["plan.nnodes=2"], True, 2),
        (["cluster.nnodes=2"], False, 2),
        (["plan.nnodes=2", "plan=false"], False, 2),
    ):
        request = request_of(*spelled_out(overrides))
        assert (request.run.plan, request.cluster.nnodes) == (planned, nnodes)


def test_an_unknown_key_of_a_plan_is_refused_with_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"there is no key cluster\.nodes\. Did you mean 'cluster\.nnodes'\?"):
        request_of(*spelled_out(["plan.nodes=2"]))


def test_the_layout_of_a_plan() -> None:
    from ddp_recipes.tools.dry_run.cluster import cluster_of

    for overrides, gpus, layout in (
        ((), 0, (1, 2, "cpu")),
        ((), 4, (1, 4, "cuda")),
        (("launcher.nnodes=3",), 4, (3, 12, "cuda")),
        (("cluster.nnodes=2", "cluster.gpus_per_node=8"), 0, (2, 16, "cuda")),
        (("cluster.nnodes=2", "cluster.gpus_per_node=8", "model=toy_mp"), 0, (2, 8, "cuda")),
        (("cluster.nnodes=2", "cluster.gpus_per_node=8", "strategy=single"), 0, (2, 1, "cuda")),
        (("cluster.nnodes=2", "cluster.gpus_per_node=8", "launcher.nproc_per_node=3"), 0, (2, 6, "cuda")),
        (("cluster.gpus_per_node=0",), 4, (1, 2, "cpu")),
        (("launcher=slurm", "launcher.nnodes=2", "launcher.gpus_per_node=4"), 0, (2, 8, "cuda")),
    ):
        found = cluster_of(request_of(*overrides), of_gpus(gpus))
        assert (found.nnodes, found.world.world_size, found.device_type) == layout


# --- layout ----------------------------------------------------------------------------------------------------------


def test_one_process_a_replica() -> None:
    for overrides, gpus, processes in (
        ((), 0, 2),
        ((), 4, 4),
        (("strategy=single",), 0, 1),
        (("strategy=single",), 4, 1),
        (("strategy=dp",), 0, 1),
        (("strategy=dp",), 4, 1),
        (("model=toy_mp",), 0, 2),
        (("model=toy_mp",), 4, 2),
        (("model=toy_mp",), 5, 2),
        (("launcher.device=cpu",), 4, 2),
        (("launcher.nproc_per_node=3",), 0, 3),
        (("launcher.nproc_per_node=3",), 4, 3),
        (("launcher.nproc_per_node=1", "strategy=single"), 0, 1),
    ):
        assert request_of(*overrides).processes(of_gpus(gpus)) == processes


def test_what_does_not_fit_is_refused() -> None:
    for overrides, gpus, message in (
        (
            ("model=toy_mp",),
            1,
            "One replica of 2 device(s) (model.num_devices) cannot run on 1 visible GPU(s): 0 fit(s)",
        ),
        (
            ("model=toy_mp", "launcher.nproc_per_node=2"),
            3,
            "2 replicas of 2 device(s) (model.num_devices) cannot run on 3",
        ),
        (("model=toy_mp", "launcher.nproc_per_node=2"), 3, "1 fit(s). Use launcher.nproc_per_node=1"),
        (("launcher.nproc_per_node=5",), 4, "4 fit(s). Use launcher.nproc_per_node=4"),
        (("launcher.device=cuda",), 0, "launcher.device=cuda, but no GPU is visible"),
        (("launcher.backend=nccl",), 0, "launcher.backend=nccl needs GPUs, and this run is on the CPU"),
        (("strategy=dp", "launcher.nproc_per_node=2"), 0, "this strategy runs in one process"),
        (("launcher.nnodes=2",), 0, "Start train.py with torchrun on each node"),
    ):
        request = request_of(*overrides)
        with pytest.raises(RequestError) as refusal:
            request.processes(of_gpus(gpus))
        assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("strategy", "backend", "refused"),
    [
        ("ddp", "gloo", ""),
        ("ddp_exact", "gloo", ""),
        ("fsdp", "gloo", ""),
        ("ddp_pipeline", "gloo", "exchanges what is on GPUs in collectives alone"),
        ("ddp_pipeline", "auto", ""),
        ("ddp", "xccl", "takes tensors on xpu, and this run's are on cuda. Use launcher.backend=nccl (or auto)"),
        ("parameter_server", "nccl", "Use launcher.backend=gloo (or auto)."),
        ("parameter_server", "auto", ""),
    ],
)
def test_a_backend_that_does_not_carry_what_a_strategy_exchanges_is_refused(
    strategy: str, backend: str, refused: str
) -> None:
    from ddp_recipes.tools.dry_run.cluster import cluster_of, devices

    request = request_of(f"strategy={strategy}", f"launcher.backend={backend}", "cluster.gpus_per_node=2")
    layout = cluster_of(request, of_gpus(0))
    if refused:
        with pytest.raises(RequestError, match=re.escape(refused)):
            devices(request, layout)
    else:
        wanted = "gloo" if strategy == "parameter_server" or backend == "gloo" else "nccl"
        assert devices(request, layout).backend == wanted


def test_what_torch_and_the_driver_have_of_a_device_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, RuntimeError)) as torchs:
        torch.empty(0, device="xpu")
    assert f"({str(torchs.value).splitlines()[0].rstrip('.')}). Use launcher.device=cpu" in missing("xpu")
    monkeypatch.setattr("ddp_recipes.devices._of_driver", lambda: 4)
    assert seen(of_gpus(4)) == "4 are visible"
    assert seen(of_gpus(2)) == "2 are visible to torch, and 4 to the driver"
    assert seen(Found("xpu", 2)) == "2 are visible"


def test_a_replica_of_several_gpus_has_a_communicator_for_each() -> None:
    from ddp_recipes.tools.dry_run.cluster import cluster_of, devices

    request = request_of("model=toy_mp", "cluster.gpus_per_node=2")
    backend = devices(request, cluster_of(request, of_gpus(0))).backend
    assert backend == ("nccl-legacy" if is_here("nccl-legacy") else "nccl")


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The resolved config of no overrides."""
    return resolve(composed())


def with_keys(config: dict[str, Any], group: str, **keys: Any) -> dict[str, Any]:
    return {**config, group: {**config[group], **keys}}


@given(st.none() | st.booleans() | st.integers(max_value=0) | st.floats() | st.text("a1", max_size=2))
def test_num_devices_is_a_whole_number(plain: dict[str, Any], value: Any) -> None:
    with pytest.raises(
        RequestError, match=r"model\.num_devices=.* is not allowed\. Allowed: a whole number at least 1"
    ):
        Request.of(with_keys(plain, "model", num_devices=value))


@given(st.integers(1, 20), st.integers(1, 5), st.none() | st.integers(1, 12))
def test_as_many_replicas_run_as_gpus_hold(plain: dict[str, Any], gpus: int, devices: int, wanted: int | None) -> None:
    fit = gpus // devices
    config = with_keys(with_keys(plain, "model", num_devices=devices), "launcher", nproc_per_node=wanted or "auto")
    if (wanted or 1) <= fit:
        assert Request.of(config).processes(of_gpus(gpus)) == (wanted or fit)
    else:
        with pytest.raises(RequestError, match=rf"cannot run on {gpus} visible GPU\(s\): {fit} fit\(s\)"):
            Request.of(config).processes(of_gpus(gpus))


def test_a_model_without_num_devices_has_one() -> None:
    assert request_of("~model.num_devices").num_devices == 1


def test_missing_group_is_refused() -> None:
    config = resolve(composed())
    for group in ("trainer", "model"):
        without = {name: value for name, value in config.items() if name != group}
        with pytest.raises(RequestError, match=f"The config has no section {group}"):
            Request.of(without)


# --- resolved --------------------------------------------------------------------------------------------------------


def resolved(config: dict[str, Any]) -> dict[str, Any]:
    return resolve(OmegaConf.create(config))


def test_interpolations_are_resolved() -> None:
    config = resolve(composed("data=random", "data.out_features=3", "model=toy"))
    assert config["model"]["out_features"] == config["data"]["train"]["out_features"] == 3


def test_the_environment_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    config = {
        "token": "${oc.env:SECRET}",
        "url": "https://user:${oc.env:SECRET}@host/",
        "fallback": "${oc.env:ABSENT,none}",
        "empty": "${oc.env:ABSENT,null}",
        "follows": "${token}",
        "number": "${oc.decode:${oc.env:NUMBER}}",
        "known": "${oc.decode:'[1, 2]'}",
        "nested": [{"deep": "${url}"}],
    }
    plain = resolved(config)
    assert "hunter2" not in repr(plain)
    assert plain["token"] == plain["follows"] == "${oc.env:SECRET}"
    assert plain["known"] == [1, 2]
    # Whoever uses it resolves it.
    monkeypatch.setenv("NUMBER", "7")
    used = OmegaConf.create(plain)
    assert used.token == used.follows == "hunter2"
    assert used.url == used.nested[0].deep == "https://user:hunter2@host/"
    assert used.fallback == "none"
    assert used.empty is None
    assert used.number == 7


def test_numbers_switches_and_choices_of_the_environment_are_taken_where_they_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"SEED": "7", "CPUS": "2", "PATH_TO": "9", "WRONG": "1.5"}.items():
        monkeypatch.setenv(name, value)
    plain = resolved(
        {
            "seed": "${oc.decode:${oc.env:SEED}}",
            "ckpt_path": "${oc.env:PATH_TO}",
            "data": {"num_workers": "${oc.env:CPUS}", "batch_size": "${oc.env:WRONG}", "root": "${oc.env:PATH_TO}"},
            "trainer": {"deterministic": "${oc.env:ABSENT,true}", "precision": "${oc.env:ABSENT,bf16-mixed}"},
            "model": {"width": "${oc.env:CPUS}"},
        }
    )
    assert plain == {
        "seed": 7,
        "ckpt_path": "${oc.env:PATH_TO}",
        "data": {"num_workers": 2, "batch_size": "${oc.env:WRONG}", "root": "${oc.env:PATH_TO}"},
        "trainer": {"deterministic": True, "precision": "bf16-mixed"},
        "model": {"width": "${oc.env:CPUS}"},
    }


def test_resolving_leaves_the_resolvers_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    resolved({"token": "${oc.env:SECRET}"})
    with pytest.raises(RequestError):
        resolved({"wrong": "${nowhere}"})
    assert OmegaConf.create({"token": "${oc.env:SECRET}"}).token == "hunter2"


def test_an_image_model_on_a_table_says_which_choice_does_not_fit() -> None:
    with pytest.raises(RequestError) as refusal:
        resolve(composed("model=resnet18", "data=digits"))
    assert str(refusal.value) == (
        "model.in_channels follows data.in_channels, which this choice of data does not have. Did you mean "
        "'data.in_features'? Choose another data, or set model.in_channels yourself."
    )
    assert resolve(composed("model=resnet18", "data=digits", "model.in_channels=1"))["model"]["in_channels"] == 1


def test_missing_values_are_named_all_at_once() -> None:
    with pytest.raises(RequestError, match=r"^data\.path must be given: this choice has no default for it\.$"):
        resolve(composed("data=csv", "data.inputs=[a]", "data.target=y", "data.out_features=1"))
    with pytest.raises(RequestError, match=r"^data\.path, data\.inputs, data\.target must be given: "):
        resolve(composed("data=csv"))


def test_other_failures_name_their_key() -> None:
    with pytest.raises(RequestError, match=r"^a\.b: "):
        resolved({"a": {"b": "${no_such_resolver:1}"}})
