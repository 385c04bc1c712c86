"""The recipe's own keys: what is allowed, and what is said of anything else."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal

import pytest
from hypothesis import assume, example, given as given_, settings, strategies as st
from omegaconf import OmegaConf

from ddp_recipes.config import compose
from ddp_recipes.config.keys import Range, parse
from ddp_recipes.config.settings import (
    AutoSettings,
    CheckpointSettings,
    DataSettings,
    RunSettings,
    TrainerSettings,
    batches,
    seconds,
)
from ddp_recipes.errors import RequestError
from ddp_recipes.main import CONF

SECTIONS: dict[str, tuple[type[Any], bool]] = {
    "": (RunSettings, True),
    "data": (DataSettings, True),
    "trainer": (TrainerSettings, False),
    "checkpoint": (CheckpointSettings, False),
    "launcher": (AutoSettings, False),
}


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    """The composed config without its interpolations resolved: these keys have none."""
    with compose.session(CONF) as hydra:
        config = compose.compose(hydra, "train", [])
    plain = OmegaConf.to_container(config)
    assert isinstance(plain, dict)
    del plain["launcher"]["_target_"]  # which leads to the class of the other keys
    return {str(name): value for name, value in plain.items() if name != "hydra"}


Parse = Callable[[str, Mapping[str, Any]], Any]


@pytest.fixture
def given(defaults: dict[str, Any]) -> Parse:
    """Parse a section's defaults with some values changed."""

    def parsed(section: str, changes: Mapping[str, Any]) -> Any:
        cls, others = SECTIONS[section]
        values = defaults[section] if section else defaults
        return parse(cls, section, {**values, **changes}, others=others)

    return parsed


def test_defaults_are_allowed(given: Parse) -> None:
    for section, (cls, _) in SECTIONS.items():
        assert isinstance(given(section, {}), cls)


def test_allowed(given: Parse) -> None:
    for key, value in (
        ("mode", "predict"),
        ("ckpt_path", "auto"),
        ("seed", 0),
        ("data.global_batch_size", 16),
        ("data.shard", "strided"),
        ("trainer.max_epochs", 0),
        ("trainer.max_steps", -1),
        ("trainer.max_time", "01:00"),
        ("trainer.max_time", 2.5),
        ("trainer.max_time", 60),
        ("trainer.val_check_interval", 10),
        ("trainer.val_check_interval", 0.25),
        ("trainer.limit_val_batches", 7),
        ("trainer.limit_val_batches", 0.5),
        ("trainer.fast_dev_run", 3),
        ("trainer.num_sanity_val_steps", -1),
        ("trainer.progress", "lines"),
        ("trainer.progress", False),
        ("trainer.gradient_clip_val", 1),
        ("checkpoint.save_top_k", -1),
        ("checkpoint.every_n_steps", 5),
        ("launcher.nproc_per_node", 3),
        ("launcher.init_method", "file:///tmp/store"),
        ("launcher.init_method", "tcp://host:29500"),
    ):
        section, _, name = key.rpartition(".")
        assert getattr(given(section, {name: value}), name) == value


def test_refused(given: Parse) -> None:
    for key, value, message in (
        ("mode", "fitt", "Allowed: fit, validate, test, predict, export. Did you mean 'fit'?"),
        ("seed", -1, "seed=-1 is not allowed. Allowed: a whole number from 0 to"),
        ("seed", "abc", "seed=abc is not allowed"),
        ("ckpt_path", 3, "ckpt_path=3 is not allowed. Allowed: text, or null."),
        ("data.batch_size", 0, "data.batch_size=0 is not allowed. Allowed: a whole number at least 1."),
        ("data.batch_size", 8.0, "data.batch_size=8.0 is not allowed"),
        ("data.batch_size", True, "data.batch_size=true is not allowed"),
        ("data.batch_size", None, "data.batch_size=null is not allowed"),
        ("data.num_workers", -1, "Allowed: a whole number at least 0."),
        ("data.drop_last", "yes", "data.drop_last=yes is not allowed. Allowed: true, false."),
        ("data.drop_last", 1, "data.drop_last=1 is not allowed"),
        ("data.shard", "stride", "Allowed: contiguous, strided. Did you mean 'strided'?"),
        ("trainer.max_epochs", -2, "Allowed: a whole number at least -1, or null."),
        ("trainer.max_time", "soon", 'trainer.max_time=soon is no time. Allowed: seconds, or "DD:HH:MM:SS".'),
        ("trainer.val_check_interval", 1.5, "Allowed: a number from 1e-06 to 1, or a whole number at least 1."),
        ("trainer.limit_train_batches", -0.1, "trainer.limit_train_batches=-0.1 is not allowed"),
        ("trainer.precision", "16mixed", "Did you mean '16-mixed'?"),
        ("trainer.progress", "ba", "Did you mean 'bar'?"),
        ("trainer.gradient_clip_algorithm", "value ", "Did you mean 'value'?"),
        ("trainer.accumulate_grad_batches", 0, "Allowed: a whole number at least 1."),
        ("trainer.max_epoch", 3, "trainer.max_epoch is not a key. Keys of trainer: accumulate_grad_batches, "),
        ("trainer.max_epoch", 3, "Did you mean 'max_epochs'?"),
        ("checkpoint.mode", "minimum", "checkpoint.mode=minimum is not allowed. Allowed: auto, min, max."),
        ("launcher.name", "slurmm", "launcher.name=slurmm is not allowed"),
        ("launcher.nproc_per_node", "two", "Allowed: auto, or a whole number at least 1."),
        ("launcher.timeout_s", 0, "Allowed: a number from 1 to 1e+09."),
        ("launcher.timeout_s", 1 << 63, "Allowed: a number from 1 to 1e+09."),
        ("launcher.timeout_s", "${oc.env:NO_SUCH}", "Allowed: a number from 1 to 1e+09."),
        ("launcher.init_method", "host:29500", "Allowed: file:///an/absolute/path, tcp://host:port, or null"),
        ("launcher.init_method", "file://relative", "launcher.init_method=file://relative is no rendezvous address."),
    ):
        section, _, name = key.rpartition(".")
        with pytest.raises(RequestError) as refusal:
            given(section, {name: value})
        assert message in str(refusal.value)


@dataclass(frozen=True, kw_only=True)
class Keys:
    """One key of each kind."""

    whole: Annotated[int, Range(-3, 9)] = 1
    real: Annotated[float, Range(0)] = 1.0
    flag: bool = True
    choice: Literal["a", "b", 3] | None = None
    names: list[str] | None = None
    text: str = ""


FITS: dict[str, Callable[[Any], bool]] = {
    "whole": lambda value: type(value) is int and -3 <= value <= 9,
    "real": lambda value: type(value) in (int, float) and value >= 0,
    "flag": lambda value: type(value) is bool,
    "choice": lambda value: value is None or (type(value) in (str, int) and value in ("a", "b", 3)),
    "names": lambda value: (
        value is None or (isinstance(value, list) and all(type(name) in (int, str) for name in value))
    ),
    "text": lambda value: isinstance(value, str),
}
VALUES = (
    st.none() | st.booleans() | st.integers(-5, 12) | st.floats() | st.sampled_from(["", "a", "b", "c", "3", "true"])
)


@settings(max_examples=200)
@given_(st.sampled_from([*FITS]), VALUES | st.lists(VALUES, max_size=2) | st.dictionaries(st.just("a"), VALUES))
def test_a_value_is_taken_as_it_is_or_refused_by_name(name: str, value: Any) -> None:
    if FITS[name](value):
        taken = getattr(parse(Keys, "here", {name: value}), name)
        numbered = name == "names" and value and any(type(each) is int for each in value)
        assert taken == [str(each) for each in value] if numbered else taken is value
    else:
        with pytest.raises(RequestError, match=rf"^here\.{name}=.* is not allowed\. Allowed: "):
            parse(Keys, "here", {name: value})


def test_missing_key_is_refused(defaults: dict[str, Any]) -> None:
    values = {name: value for name, value in defaults["checkpoint"].items() if name != "save_top_k"}
    with pytest.raises(
        RequestError, match=r"checkpoint\.save_top_k is missing from the config\. Allowed: a whole number"
    ):
        parse(CheckpointSettings, "checkpoint", values)


def test_nccl_on_cpu_is_refused(given: Parse) -> None:
    with pytest.raises(RequestError, match=r"Use launcher\.backend=gloo"):
        given("launcher", {"backend": "nccl", "device": "cpu"})


def test_training_without_a_limit_is_refused(given: Parse) -> None:
    for unlimited in (None, -1):
        with pytest.raises(RequestError, match="all unlimited: set one of them"):
            given("trainer", {"max_epochs": unlimited, "max_steps": unlimited})
    given("trainer", {"max_epochs": -1, "max_time": 5})


def test_effective_spells_out_what_is_short(given: Parse) -> None:
    effective = given("trainer", {"max_epochs": -1, "max_steps": 5}).effective()
    assert (effective.max_epochs, effective.max_steps) == (None, 5)

    overfit = given("trainer", {"overfit_batches": 3}).effective()
    assert overfit.limit_train_batches == 3
    assert given("trainer", {}).effective().limit_train_batches == 1.0

    for short in ({}, {"fast_dev_run": True}):
        assert given("trainer", {**short, "gradient_clip_val": 0}).effective().gradient_clip_val is None, "as Lightning"

    for fast, number in ((True, 1), (4, 4)):
        effective = given("trainer", {"fast_dev_run": fast, "overfit_batches": 9, "max_epochs": 50}).effective()
        assert (effective.max_epochs, effective.max_steps, effective.overfit_batches) == (1, number, 0)
        assert effective.limit_train_batches == effective.limit_val_batches == number
        assert effective.num_sanity_val_steps == 0
    assert given("trainer", {"fast_dev_run": 0}).effective().max_epochs == 10


@given_(st.none() | st.integers(0) | st.floats(0) | st.lists(st.integers(0, 99), min_size=1, max_size=4))
def test_seconds(limit: float | list[int] | None) -> None:
    if not isinstance(limit, list):
        assert seconds(limit) == limit
        return
    parts = dict(zip(("seconds", "minutes", "hours", "days"), reversed(limit), strict=False))
    for text in (":".join(map(str, limit)), ":".join(f"{part:02}" for part in limit)):
        assert seconds(text) == timedelta(**parts).total_seconds()


@given_(st.text("0123456789:.-+_²٣a ", max_size=12))
@example("1:2:3:4:5")
@example("²")
def test_what_is_no_time_is_refused(limit: str) -> None:
    assume(not re.fullmatch(r"\d+(:\d+){0,3}", limit))
    with pytest.raises(RequestError, match="is no time"):
        seconds(limit)


def test_a_float_is_a_share_of_the_batches_and_an_int_a_number_of_them() -> None:
    assert [batches(limit, 10) for limit in (1.0, 0.5, 0.25, 0.0, 1, 7, 99, 0)] == [10, 5, 2, 0, 1, 7, 10, 0]
