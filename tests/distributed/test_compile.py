"""``trainer.compile``: what is compiled learns the same, under the same names, and blocks are compiled once."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.run_directory import Summary
from helpers.ranks import run_recipe

# torch's compiler hides it where it is shown, which an error is not.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

Run = Callable[..., Summary]

needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="compiling needs a C++ compiler"
)
DEEP = [
    *("model._target_=own_parts.Deep", "+model.blocks=4", "data.global_batch_size=16", "trainer.max_steps=4"),
    *("trainer.num_sanity_val_steps=0", "data.val=null"),
]
NORM = ["model._target_=own_parts.Norm", "trainer.compile=true", "trainer.max_steps=3", "data.val=null"]
BLOCKS = ["trainer.compile=true", "trainer.compile_blocks=[blocks.*]", "trainer.compile_dynamic=false"]


@pytest.mark.slow
@needs_a_compiler
def test_a_compiled_model_learns_the_same(run: Run, weights: Callable[[Summary], dict[str, Tensor]]) -> None:
    overrides = ["model=linear", "trainer.max_steps=2", "data.val=null"]
    expected = weights(run(*overrides))
    compiled = run(*overrides, "trainer.compile=default", "trainer.compile_dynamic=true")
    torch.testing.assert_close(weights(compiled), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("own", [[], ["model.activation_checkpointing=true"]], ids=["kept", "computed again"])
def test_alike_blocks_are_compiled_once(
    own: list[str], run: Run, weights: Callable[[Summary], dict[str, Tensor]], tmp_path: Path
) -> None:
    graphs = tmp_path / "graphs"
    counting = f"+callbacks.graphs={{_target_: own_parts.Graphs, file: {graphs}}}"
    expected = weights(run(*DEEP, *own, "strategy=single"))
    compiled = run(*DEEP, *own, *BLOCKS, counting, "strategy=single")
    assert graphs.read_text() == "1"
    torch.testing.assert_close(weights(compiled), expected, rtol=0, atol=1e-5)  # names, too


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("blocks", ["false", "true"])
def test_blocks_that_are_computed_again_take_a_single_sample(blocks: str, run: Run) -> None:
    """As the last batch of an epoch leaves it."""
    own = ["model.activation_checkpointing=true", "trainer.compile=true", f"trainer.compile_blocks={blocks}"]
    assert (
        run("model._target_=own_parts.Widths", *own, "data.num_samples=9", "data.val=null", "strategy=single")["status"]
        == "finished"
    )


@pytest.mark.slow
@needs_a_compiler
def test_compiled_blocks_resume_exactly_and_are_dealt(run: Run, tmp_path: Path) -> None:
    exact = ["strategy=ddp_exact", "strategy.shards=2"]
    whole = run(*DEEP, *BLOCKS, *exact, world_size=2)
    for steps in (2, 4):
        overrides = [*exact, f"trainer.max_steps={steps}", "ckpt_path=auto"]
        resumed = run(*DEEP, *BLOCKS, *overrides, world_size=2, directory=tmp_path / "resumed")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    dealt = ["strategy=fsdp", "strategy.shards=2"]
    assert run(*DEEP, *BLOCKS, *dealt, world_size=2)["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        "ddp_exact strategy.shards=2",
        "fsdp strategy.shards=2 strategy.wrap=[net1,net2]",
        "fsdp model._target_=own_parts.Widths",
        "parameter_server",
    ],
)
def test_every_batch_of_several_ranks_runs_compiled(strategy: str, run: Run, tmp_path: Path) -> None:
    """While we look at a step's collectives, too: in the first ones, and where batches are uneven."""
    uneven = ["data.global_batch_size=12", "data.num_samples=45", "data.val_samples=21", "data.val_batch_size=6"]
    overrides = ["model._target_=own_parts.Compiled", "trainer.compile=true", f"strategy={strategy}", *uneven]
    run(*" ".join(overrides).split(), world_size=2, directory=tmp_path)
    assert "compiled nothing" not in (tmp_path / "train.log").read_text()


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize(
    "overrides",
    [
        "model._target_=own_parts.Widths trainer.compile_blocks=true",
        "model._target_=own_parts.Sizes trainer.compile_blocks=block trainer.compile_dynamic=false data.batch_size=11",
        "model._target_=own_parts.Steps task=lightning",
        "model._target_=own_parts.Steps task=lightning trainer.compile_blocks=nets.*",
    ],
    ids=["blocks of many widths", "many sizes", "parts that steps call", "blocks that steps call"],
)
def test_all_that_is_to_run_compiled_does(overrides: str, run: Run) -> None:
    """In its validation on trial, in steps, and in a validation, the last batch of each being smaller."""
    few = ["data.num_samples=37", "data.val_samples=24", "trainer.max_epochs=1", "strategy=single"]
    assert run(*overrides.split(), "trainer.compile=true", *few)["status"] == "finished"


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (
            "task._target_=own_parts.OfParts trainer.max_steps=2",
            r"nothing in the first step: it does not call Toy itself, .* trainer\.compile_blocks=\[net1,relu,net2\]",
        ),
        (
            "model._target_=own_parts.Anew trainer.compile_dynamic=false trainer.max_steps=10",
            r"something in 8 steps so far, .* trainer\.compile_dynamic=true",
        ),
    ],
    ids=["nothing", "in each step"],
)
def test_steps_that_compile_nothing_or_all_the_time_are_told_of(
    overrides: str, warning: str, run: Run, tmp_path: Path
) -> None:
    run("trainer.compile=true", "data.val=null", *overrides.split(), directory=tmp_path)
    assert len(re.findall(warning, (tmp_path / "train.log").read_text())) == 1


@pytest.mark.slow
@needs_a_compiler
def test_text_that_a_model_writes_is_of_no_consequence_to_what_is_compiled(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("to be or not to be, that is the question; " * 9)
    data = ["data=text", f"data.path={tmp_path / 'words.txt'}", "data.context=16", "data.val_fraction=0.2"]
    letters = ["model=linear", "model._target_=own_parts.Letters", "~model.in_features", "~model.out_features"]
    graphs = f"+callbacks.graphs={{_target_: own_parts.Graphs, file: {tmp_path / 'graphs'}}}"
    writes = ["callbacks=sample_text", "callbacks.sample_text.new_tokens=9", graphs, "logger=none"]
    compiled = ["trainer.compile=true", "trainer.compile_dynamic=false", "trainer.max_epochs=1", "launcher.device=cpu"]
    run_recipe([*data, *letters, *writes, *compiled])
    assert int((tmp_path / "graphs").read_text()) <= 4  # in training and in a validation, two sizes each


@pytest.mark.slow
def test_what_fails_while_torch_compiles_ends_with_what_to_change(run: Run, tmp_path: Path) -> None:
    overrides = ["trainer.compile=true", "model.in_features=9", "trainer.num_sanity_val_steps=0"]
    with pytest.raises(RuntimeError, match="same reduction dim"):
        run(*overrides, directory=tmp_path)
    assert "With trainer.compile=false" in json.loads((tmp_path / "summary.json").read_text())["error"]


@pytest.mark.slow
def test_where_there_is_no_compiler_it_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    absent = (None, str(tmp_path / "none"))
    with config.patch({"cpp.cxx": absent}), pytest.raises(RuntimeError, match="Install g\\+\\+ or clang"):
        run("trainer.compile=true", warm=False)


@pytest.mark.slow
@needs_a_compiler
def test_a_run_before_in_the_process_is_of_no_consequence(run: Run) -> None:
    """Jobs of a sweep by torchrun or Slurm share one; batch norms show which sizes there were before."""
    of_7, of_5, again = (run(*NORM, "strategy=single", f"data.batch_size={size}") for size in (7, 5, 7))
    assert of_7["weights_sha256"] == again["weights_sha256"] != of_5["weights_sha256"]


@pytest.mark.slow
@needs_a_compiler
def test_uneven_shards_have_the_same_bits_on_any_number_of_ranks(run: Run) -> None:
    uneven = ["strategy=ddp_exact", "strategy.shards=3", "data.global_batch_size=20"]
    alone, spread = (run(*NORM, *uneven, world_size=size) for size in (1, 3))
    assert spread["weights_sha256"] == alone["weights_sha256"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.compile=fastest"], r"trainer\.compile=fastest is not allowed\. Allowed: .*reduce-overhead"),
        (["trainer.compile_blocks=true"], r"trainer\.compile=false\. Set trainer\.compile=true"),
        (["trainer.compile_dynamic=true"], r"trainer\.compile=false\. Set trainer\.compile=true"),
        (["trainer.compile=true", "trainer.compile_blocks=true"], r"compile_blocks=true takes .* Toy has none"),
        (["trainer.compile=true", "trainer.compile_blocks=net3"], r"compile_blocks: net3 matches no module"),
        (["trainer.compile=max-autotune", "trainer.deterministic=true"], r"picks kernels by what they take"),
        (["trainer.compile=true", "strategy=dp"], r"trainer\.compile=true does not go with strategy=dp"),
        (["trainer.compile=true", "strategy=ddp", "strategy.bucket_cap_mb=0.5"], r"=true: there torch takes 1 or more"),
        (["trainer.compile=default", "strategy=ddp_pipeline"], r"trainer\.compile=default does not go with"),
        (
            ["model._target_=own_parts.Norm", "model.activation_checkpointing=true", "trainer.compile=true"],
            r"1 has buffers \(running_mean, .* Leave out one",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused(overrides: list[str], message: str, run: Run) -> None:
    with pytest.raises(RequestError, match=message):
        run("strategy=single", *overrides)
