"""Names that other packages keep private: what each entry of ``_compat`` promises, and the public way without it."""

import runpy
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import hydra.utils
import pytest
import torch
import torch.distributed as dist
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import InstantiationException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError
from torch import Tensor, nn
from torch.autograd import profiler
from torch.distributed import TCPStore
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

from ddp_recipes import _compat
from ddp_recipes._compat import dispatch, hydra_, messages, torch_
from ddp_recipes.config import compose, kinds
from ddp_recipes.main import CONF
from ddp_recipes.runtime.world import World
from ddp_recipes.testing import on_ranks
from helpers.patience import patience

# --- torch -----------------------------------------------------------------------------------------------------------


def test_pytree_takes_containers_apart_and_puts_them_together() -> None:
    batch = {"a": torch.ones(2), "b": [1, (torch.zeros(3), None)]}
    leaves, form = torch_.tree_flatten(batch)
    assert leaves == torch_.tree_leaves(batch)
    assert torch_.tree_unflatten(leaves, form) == batch
    doubled: Any = torch_.tree_map_only(Tensor, lambda tensor: tensor * 2, batch)
    assert doubled["b"][0] == 1
    assert doubled["a"].tolist() == [2, 2]


def test_dispatch_mode_sees_operations_and_tells_moves() -> None:
    seen = []

    class Seen(dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: dispatch.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seen():  # type: ignore[no-untyped-call]
        torch.ones(2).to("meta").add(1)
    assert all(isinstance(each, dispatch.OpOverload) for each in seen)
    assert len(dispatch.MOVES.intersection(seen)) == 1


def test_fake_tensors_have_a_device_that_is_not_there() -> None:
    with dispatch.FakeTensorMode():
        assert torch.ones(2, device="cuda:1").device == torch.device("cuda", 1)


def test_storage_key_is_that_of_views_and_of_no_other() -> None:
    for device in ("cpu", "meta"):
        tensor, other = torch.empty(4, device=device), torch.empty(4, device=device)
        assert torch_.storage_key(tensor) == torch_.storage_key(tensor[2:]) != torch_.storage_key(other)


@pytest.mark.parametrize("without", [False, True], ids=["private", "public"])
def test_tensors_are_copied_and_added_each(without: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if without:
        monkeypatch.delattr(torch, "_foreach_copy_")
        monkeypatch.delattr(torch, "_foreach_add_")
    into = [torch.zeros(2), torch.zeros(3)]
    torch_.copy_each(into, [torch.ones(2), torch.ones(3)])
    torch_.add_each(into, [torch.ones(2), torch.ones(3)])
    assert [tensor.tolist() for tensor in into] == [[2, 2], [2, 2, 2]]


@pytest.mark.parametrize("without", [False, True], ids=["private", "public"])
def test_run_backward_adds_gradients(without: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from ddp_recipes._compat import fast_paths

    if without:
        monkeypatch.setattr(fast_paths, "Variable", object)  # for torch itself needs the name
    weight = torch.ones(3, requires_grad=True)
    for _ in range(2):
        fast_paths.run_backward(weight.square().sum())
    assert weight.grad is not None
    assert weight.grad.tolist() == [4, 4, 4]


def test_nodes_are_numbered_as_they_come() -> None:
    from ddp_recipes._compat import model_parallel

    before = model_parallel.next_sequence_number()
    loss = torch.ones(2, requires_grad=True).square().sum()
    assert loss.grad_fn is not None
    assert before < model_parallel.sequence_number(loss.grad_fn) + 1 == model_parallel.next_sequence_number()
    assert [list(each.shape) for each in model_parallel.metadata_of(loss.grad_fn)] == [[]]


def test_a_checkpoint_is_known_from_others_by_what_it_runs() -> None:
    from ddp_recipes._compat import model_parallel

    seen: list[Any] = []

    def block(inputs: Tensor) -> Tensor:
        seen.append(model_parallel.current_checkpoint())
        return inputs.sin()

    inputs = torch.ones(2, requires_grad=True)
    checkpoint(lambda each: block(block(each)), inputs, use_reentrant=False)
    checkpoint(block, inputs, use_reentrant=False)
    with torch.autograd.graph.save_on_cpu():  # type: ignore[no-untyped-call]
        block(inputs)
    first, second, other, outside = seen
    assert first is second
    assert first is not None
    assert other not in (first, None)
    assert outside is None


def test_current_node_is_there_in_backward_alone() -> None:
    from ddp_recipes._compat import model_parallel

    seen = []
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda gradient: seen.append(model_parallel.current_node()))
    assert model_parallel.current_node() is None
    weight.square().sum().backward()  # type: ignore[no-untyped-call]
    assert seen != [None]


def test_a_numbered_pass_recomputes_a_checkpoint_once() -> None:
    from ddp_recipes._compat import model_parallel

    calls = []

    def block(tensor: Tensor) -> Tensor:
        calls.append(1)
        return (tensor.square() * tensor).sin()

    weight = torch.ones(2, requires_grad=True)
    output: Any = torch.utils.checkpoint.checkpoint(block, weight, use_reentrant=False)
    node = output.grad_fn
    assert len(calls) == 1
    with model_parallel.pass_numbered(1 << 41):
        gradient = node(torch.ones(2))
        node.next_functions[0][0](gradient)
    assert len(calls) == 2


def test_profiler_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddp_recipes._compat import fast_paths

    assert not fast_paths.is_profiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        assert fast_paths.is_profiled()
    monkeypatch.delattr(profiler, "_is_profiler_enabled")
    assert fast_paths.is_profiled()


@pytest.mark.parametrize("without", [False, True], ids=["private", "public"])
def test_kinds_of_modules_are_known(without: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if without:
        monkeypatch.delattr(nn.modules.batchnorm, "_BatchNorm")
        monkeypatch.delattr(nn.modules.dropout, "_DropoutNd")
    found = runpy.run_path(str(torch_.__file__))
    batch_norm, dropout_kinds = found["BatchNorm"], found["Dropout"]
    for norm in (nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)):
        assert isinstance(norm, batch_norm)
    for dropout in (nn.Dropout(), nn.Dropout2d(), nn.FeatureAlphaDropout()):
        assert isinstance(dropout, dropout_kinds)
    assert not isinstance(nn.LayerNorm(2), batch_norm)
    assert not isinstance(nn.LayerNorm(2), dropout_kinds)


def test_buffers_are_read_and_written() -> None:
    norm = nn.BatchNorm1d(2)
    torch_.buffers_of(norm)["running_mean"] = torch.ones(2)
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [1, 1]
    assert list(torch_.buffers_of(norm)) == ["running_mean", "running_var", "num_batches_tracked"]


def test_tensors_are_shared_with_a_copy() -> None:
    from ddp_recipes._compat import model_parallel

    one, other = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    model_parallel.share_tensors(one, other)
    assert other.weight is one.weight
    assert other.running_mean is one.running_mean


def test_only_a_modules_own_tensors_are_changed() -> None:
    outer = nn.Sequential(nn.Linear(2, 2))
    outer.register_parameter("own", nn.Parameter(torch.ones(2)))
    torch_.apply_to_own(outer, partial(Tensor.to, device="meta"))
    assert [name for name, each in outer.named_parameters() if each.is_meta] == ["own"]


def test_chosen_forward_pre_hooks_are_removed() -> None:
    from ddp_recipes._compat import model_parallel

    called: list[str] = []
    layer = nn.Linear(2, 2)
    layer.register_forward_pre_hook(lambda *_: called.append("kept"))
    layer.register_forward_pre_hook(first := lambda *_: called.append("removed"), with_kwargs=True)
    model_parallel.remove_forward_pre_hooks(layer, lambda hook: hook is first)
    layer(torch.ones(2))
    assert called == ["kept"]


def test_observers_of_an_optimizer_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddp_recipes._compat import fast_paths

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert not fast_paths.is_observed(optimizer)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    assert fast_paths.is_observed(optimizer)
    handle.remove()
    monkeypatch.delattr(fast_paths.optimizers, "_global_optimizer_pre_hooks")
    assert fast_paths.is_observed(optimizer)


def test_data_workers_end_at_once() -> None:
    loader = DataLoader([1, 2], num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    worker = next(thread for thread in iter(loader)._workers)  # type: ignore[attr-defined]
    assert worker.is_alive()
    torch_.shut_down(loader)
    assert not worker.is_alive()
    torch_.shut_down(DataLoader([1]))
    torch_.shut_down(None)
    torch_.shut_down(object())  # type: ignore[arg-type]  # as a loader without the private names


@pytest.mark.parametrize("without", [False, True], ids=["private", "public"])
def test_file_writer_of_tensorboard(without: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SummaryWriter(str(tmp_path)) as writer:  # type: ignore[no-untyped-call]
        if without:
            monkeypatch.delattr(SummaryWriter, "_get_file_writer")
        assert torch_.file_writer(writer).get_logdir() == str(tmp_path)
        monkeypatch.undo()


def test_ddp_loads_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_.load_what_ddp_needs()
    assert "torch._dynamo" in sys.modules
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # its import fails now
    torch_.load_what_ddp_needs()


# --- Python ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("without", ["", "del threading._shutdown; "], ids=["private", "public"])
def test_threads_are_joined_and_exit_handlers_run(without: str) -> None:
    code = f"""
import atexit, os, threading, time
from ddp_recipes import _compat
{without}
atexit.register(print, "handler", flush=True)
threading.Thread(target=lambda: (time.sleep(0.2), print("thread", flush=True))).start()
_compat.join_threads()
assert _compat.can_run_exit_handlers()
_compat.run_exit_handlers()
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(60))
    assert done.stdout.split() == ["thread", "handler"], done.stderr


def test_leaving_without_the_private_name_is_sys_exit() -> None:
    code = """
import atexit
from ddp_recipes.runtime.process import leave
del atexit._run_exitfuncs
atexit.register(print, "handler")
leave(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(60))
    assert (done.returncode, done.stdout.split()) == (3, ["handler"]), done.stderr


def test_can_run_exit_handlers_says_no_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("atexit._run_exitfuncs")
    assert not _compat.can_run_exit_handlers()


# --- Hydra -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("without", [False, True], ids=["private", "public"])
def test_locate_finds_by_dotted_name(without: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if without:
        monkeypatch.delattr("hydra._internal.utils._locate")
        monkeypatch.setattr("hydra.utils.get_object", lambda path: eval(path))  # which would ask the deleted name
    assert hydra_.locate("torch.nn.Linear") is nn.Linear


def test_locate_raises_what_is_not_there() -> None:
    with pytest.raises(ImportError):
        hydra_.locate("torch.nn.NoSuchThing")


def test_outcome_of_a_job_without_the_private_name() -> None:
    class Public:  # what another version's JobReturn would have
        return_value = 0.5

    assert hydra_.outcome(Public()) == 0.5  # type: ignore[arg-type]


def test_outcome_of_a_job_is_returned_or_raised_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    done = JobReturn(status=JobStatus.COMPLETED)
    done.return_value = 0.5
    assert hydra_.outcome(done) == 0.5
    failed = JobReturn(status=JobStatus.FAILED)
    failed.return_value = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        hydra_.outcome(failed)
    assert capsys.readouterr().err == ""


def test_command_line_and_session_of_hydra() -> None:
    parsed = hydra_.get_args_parser().parse_args(["a=1", "-m"])
    assert (parsed.overrides, parsed.multirun) == (["a=1"], True)
    with compose.session(CONF) as hydra:
        assert isinstance(hydra, hydra_.Hydra)
        config = compose.compose(hydra, "train", [])
        hydra_.Callbacks(config).on_run_start(config=config, config_name="train")
    assert hydra_.create_config_search_path(CONF).get_path()


OWN = """
import os

from torch import nn, relu
from torchvision.transforms import Compose


class Net(nn.Module):
    def __init__(self, activation=None, path=None):
        super().__init__()


def relu_of_torch():
    return relu


def transform():
    return Compose([])
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module of a user's own, and the same one in a folder that is no package."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "own_folder").mkdir()
    for path in ("own_module.py", "own_folder/inner.py"):
        (tmp_path / path).write_text(OWN)
    yield
    for name in ("own_module", "own_folder", "own_folder.inner"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("without", [False, True], ids=["whitelist", "without"])
@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 2},
        {"_target_": "own_module.Net"},
        {"_target_": "own_folder.inner.Net"},
        {"_target_": "own_module.Compose", "transforms": []},
        {"_target_": "own_module.Net", "activation": {"_target_": "own_module.relu_of_torch"}},
        {"_target_": "own_module.Net", "activation": {"_target_": "torch.nn.functional.gelu", "_partial_": True}},
        {"_target_": "own_module.Net", "activation": {"_target_": "hydra.utils.get_method", "path": "torch.relu"}},
        {"_target_": "own_module.Net", "path": {"_target_": "fractions.Fraction", "_args_": [1, 3]}},
        {"_target_": "own_folder.inner.transform"},
        {"_target_": "collections.OrderedDict", "a": 1},
        {"_target_": "datetime.timedelta", "seconds": 1},
    ],
    ids=str,
)
@pytest.mark.usefixtures("own")
def test_instantiate_makes_what_is_installed_or_a_users_own(
    node: dict[str, Any], without: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without:  # as with Hydra 1.3, in silence
        monkeypatch.delattr("hydra.utils.execution_whitelist", raising=False)
        warnings.filterwarnings("ignore", r"\s*hydra\.utils\.instantiate\(\) resolved _target_")
    assert hydra_.instantiate(node, kinds.check_calls(node, "")) is not None


@pytest.mark.parametrize("target", ["builtins.eval", "os.remove", "shutil.rmtree", "own_module.os.system"])
@pytest.mark.usefixtures("own")
def test_what_hydra_refuses_stays_refused(target: str) -> None:
    for node in ({"_target_": target, "_args_": ["1"]}, {"_target_": "own_module.Net", "path": {"_target_": target}}):
        with pytest.raises(InstantiationException, match=target.rpartition(".")[2]):
            hydra_.instantiate(node, ["own_module.Net"])


@pytest.mark.skipif(not hasattr(hydra.utils, "execution_whitelist"), reason="Hydra 1.4 asks for a whitelist")
@pytest.mark.parametrize("target", ["pathlib.Path.write_text", "subprocess.Popen", "os.mkdir", "no_such_module.f"])
def test_the_whitelist_has_the_names_that_were_looked_at_alone(target: str) -> None:
    with pytest.raises(InstantiationException, match="whitelist"):
        hydra_.instantiate({"_target_": target, "_args_": ["1"]}, ["torch.nn.Linear"])


def test_resolvers_are_registered_and_replaced() -> None:
    for value in (1, 2):
        hydra_.register_resolver("compat_test", lambda value=value: value, replace=True)
        assert OmegaConf.create({"a": "${compat_test:}"}).a == value
    OmegaConf.clear_resolver("compat_test")


# --- wording ---------------------------------------------------------------------------------------------------------


def test_a_store_that_times_out_says_so() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RuntimeError) as raised:
        store.wait(["never"], timedelta(milliseconds=50))
    assert messages.timed_out(raised.value)
    assert not messages.timed_out(RuntimeError("Connection closed by peer"))
    assert not messages.timed_out(ValueError("timed out"))


def test_a_collective_that_times_out_says_so() -> None:
    def wait(world: World, store: Any) -> bool:
        if world.is_main:
            torch.distributed.init_process_group("gloo", None, timedelta(seconds=1), 2, 0, store)
            try:
                torch.distributed.all_reduce(torch.ones(1))
            except RuntimeError as error:
                store.set("over", "")
                return messages.timed_out(error)
        else:
            torch.distributed.init_process_group("gloo", None, timedelta(seconds=1), 2, 1, store)
            store.wait(["over"], timedelta(seconds=30))
        return True

    assert on_ranks(wait, 2) == [True, True]


def test_a_port_that_is_taken_is_seen() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RuntimeError) as raised:
            TCPStore("127.0.0.1", taken.getsockname()[1], is_master=True, wait_for_workers=False)
    assert messages.address_in_use(raised.value)


@pytest.mark.slow
def test_parameters_without_gradients_are_known_by_number() -> None:
    code = """
import torch
from torch import nn
from ddp_recipes._compat import messages
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, world_size=1, rank=0)
model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
model.forward = lambda batch: model["used"](batch)
module = nn.parallel.DistributedDataParallel(model)
try:
    for _ in range(2):
        module(torch.ones(1, 2)).sum().backward()
except RuntimeError as error:
    print(messages.without_gradient(error))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(60))
    assert done.stdout.strip() == "[2, 3]", done.stderr
    assert messages.without_gradient(RuntimeError("no")) == []


def test_what_torch_load_refuses_is_named(tmp_path: Path) -> None:
    torch.save(threading.Barrier, tmp_path / "file.pt")
    with pytest.raises(Exception, match="Weights only") as raised:
        torch.load(tmp_path / "file.pt", weights_only=True)
    assert messages.refused_global(raised.value) == "GLOBAL threading.Barrier"
    assert messages.refused_global(ValueError("no")) is None


@pytest.mark.parametrize("override", ["trainer.max_epoch=1", "~trainer.nothing", "nothing=1"])
def test_an_unknown_override_is_named(override: str) -> None:
    with compose.session(CONF) as hydra, pytest.raises(Exception, match="ould not") as raised:
        hydra.config_loader.load_configuration("train", [override], RunMode.RUN)
    assert messages.unknown_override(raised.value) == override.lstrip("~").split("=")[0]
    assert messages.unknown_override(ValueError("no")) is None


@pytest.mark.parametrize("override", ["+trainer.max_epochs=1", "+optimizer=adam"])
def test_what_is_added_twice_is_named(override: str) -> None:
    with compose.session(CONF) as hydra, pytest.raises(Exception, match=r"already|Multiple") as raised:
        hydra.config_loader.load_configuration("train", [override], RunMode.RUN)
    assert messages.added_twice(raised.value) == override.lstrip("+").split("=")[0]
    assert messages.added_twice(ValueError("no")) is None


def test_a_choice_of_the_wrong_type_is_told(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "own.yaml").write_text("defaults: [nothing]")
    with compose.session(CONF, str(tmp_path)) as hydra:
        with pytest.raises(ValueError, match="group") as raised:
            hydra.config_loader.load_configuration("train", ["optimizer=5"], RunMode.RUN)
        assert messages.is_about_a_choice(raised.value)
        with pytest.raises(Exception, match="nothing") as raised:
            hydra.config_loader.load_configuration("train", ["model=own"], RunMode.RUN)
        assert messages.config_of_error(raised.value) == "model/own"
    assert not messages.is_about_a_choice(ValueError("no"))
    assert messages.config_of_error(ValueError("no")) is None


def test_a_missing_primary_config_is_named_without_the_search_path() -> None:
    with compose.session(CONF) as hydra, pytest.raises(Exception, match="Config search path") as raised:
        hydra.config_loader.load_configuration("no_such", [], RunMode.RUN)
    message = messages.without_search_path(raised.value)
    assert "no_such" in message
    assert "Config search path" not in message


def test_the_key_that_an_interpolation_misses_is_named() -> None:
    config = OmegaConf.create({"a": "${b.c}", "b": {}})
    with pytest.raises(InterpolationKeyError) as raised:
        OmegaConf.to_container(config, resolve=True)
    assert messages.missing_interpolation_key(raised.value) == "b.c"


@pytest.mark.parametrize(
    ("known", "call"),
    [
        (messages.out_of_memory, lambda: torch.empty(1 << 50)),
    ],
)
def test_errors_that_a_user_s_sizes_cause_are_known(
    known: Callable[[BaseException], bool], call: Callable[[], object]
) -> None:
    with pytest.raises((RuntimeError, IndexError)) as raised:
        call()
    assert known(raised.value)
    assert not known(RuntimeError("no"))


def test_devices_that_an_operation_mixes_are_named() -> None:
    from ddp_recipes._compat import model_parallel

    with dispatch.FakeTensorMode(), pytest.raises(RuntimeError) as raised:
        _ = torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:2")
    assert model_parallel.stages_named(raised.value) == {0, 2}


def test_a_group_that_did_not_come_about_does_not_count() -> None:
    with pytest.raises(RuntimeError):  # nobody else comes
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(seconds=0.2))
    torch_.count_groups_anew()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        assert dist.group.WORLD.group_name == "0"
    finally:
        dist.destroy_process_group()
