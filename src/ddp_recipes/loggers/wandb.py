"""Weights & Biases."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ddp_recipes.errors import RequestError, RunFailed, not_one_of
from ddp_recipes.loggers.base import Logger, Parameter, kept_id, picture_in, require
from ddp_recipes.loggers.csv import CSVLogger

__all__ = ["WandbLogger"]

log = logging.getLogger(__name__)

EXIT_CODES = {"finished": 0, "failed": 1, "preempted": 75}


def _free(path: Path) -> Path:
    """Return a path that nothing has yet: W&B names the records of one second alike."""
    names = (path.name, *(f"{path.name}.{number}" for number in range(1, 100)))
    return next(free for name in names if not (free := path.with_name(name)).exists())


class WandbLogger(Logger):
    """Log to W&B, one row a step; on resume the same run goes on there.

    W&B writes in a process of its own, up to 15 s later, and a kill takes that with it. So the points are kept in
    ``metrics.csv`` beside as well, and what W&B misses on resume it gets from there.

    Args:
        purge_step: on resume, the first step that comes again.
        mode: ``offline`` writes what ``wandb sync`` uploads.
        project: and the keys after it are W&B's own.
    """

    folder: ClassVar[str] = "wandb"

    @classmethod
    def check(cls, section: str, keys: Mapping[str, Any]) -> None:
        mode = keys.get("mode", "online")
        if mode not in ("online", "offline"):
            raise not_one_of(f"{section}.mode", mode, ("online", "offline"))
        require("wandb", section, cls.__name__)
        if mode == "offline":
            return
        import wandb

        try:
            known = wandb.login(prompt=False)
        except wandb.errors.Error as error:
            raise RequestError(
                f"{section}.mode=online, but W&B does not let us in: {error}. Check WANDB_API_KEY, WANDB_BASE_URL and "
                f"the network, or use {section}.mode=offline."
            ) from error
        if not known:
            raise RequestError(
                f"{section}.mode=online needs an API key, and there is none. Set WANDB_API_KEY, run `wandb login`, or "
                f"use {section}.mode=offline."
            )

    def __init__(
        self,
        directory: str | Path,
        purge_step: int | None = None,
        mode: str = "online",
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        notes: str | None = None,
    ) -> None:
        import wandb

        self._directory = Path(directory)
        self._offline = mode == "offline"
        self._points = CSVLogger(self._directory, purge_step)
        self._status = "failed"  # unless we are told otherwise
        self._step = (purge_step or 1) - 1
        # An offline record cannot be continued. A new one gets all points, and replaces it.
        for record in self._directory.glob("offline-run-*") if self._offline else ():
            (self._directory / "replaced").mkdir(exist_ok=True)
            record.rename(_free(self._directory / "replaced" / record.name))
        try:
            self.run: Any = wandb.init(
                dir=self._directory.parent,  # W&B adds a folder `wandb`
                id=kept_id(self._directory, lambda: secrets.token_hex(4)),
                resume=None if self._offline else "allow",
                mode="offline" if self._offline else "online",
                project=project,
                entity=entity,
                name=name,
                group=group,
                tags=tags or None,
                notes=notes,
                settings=wandb.Settings(console="off", quiet=True),
            )
        except wandb.errors.Error as error:
            raise RunFailed(
                f"W&B does not begin the run: {error}. Check the network, project and entity; mode=offline needs none."
            ) from error
        self._first: int = self.run.step  # W&B has what is before it, and takes none of that back
        if purge_step is not None and self._first > purge_step:
            log.info("W&B has the steps %d to %d already, and keeps them as they are.", purge_step, self._first - 1)
        for step, values in self._points.points():
            pictures = self._pictures(step)
            named = {str(path.relative_to(pictures).with_suffix("")): path for path in pictures.rglob("*.png")}
            self._log(values | {tag: wandb.Image(str(path)) for tag, path in named.items()}, step)

    def _pictures(self, step: int) -> Path:
        return self._directory / "pictures" / str(step)

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        self._step = step
        if step >= self._first:
            self.run.log(dict(values), step=step)

    def parameters(self, params: Mapping[str, Parameter]) -> None:
        self.run.config.update(dict(params), allow_val_change=True)

    def of_batch(self, values: Mapping[str, float], batch: int, step: int) -> None:
        self.scalars(values, step)  # W&B takes no step after a later one: of an evaluation it has the last batch

    @property
    def experiment(self) -> Any:
        return self.run

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._points.scalars(values, step)
        self._log(values, step)

    def text(self, tag: str, text: str) -> None:
        path = Path(self.run.dir) / f"{tag}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        self.run.save(str(path), base_path=self.run.dir, policy="now")

    def hparams(
        self, params: Mapping[str, Parameter], metrics: Mapping[str, float], chosen: Collection[str] = ()
    ) -> None:
        self.parameters(params)
        self.run.summary.update(dict(metrics))

    def image(self, tag: str, png: bytes) -> None:
        import wandb

        path = picture_in(self._pictures(self._step), tag)
        path.write_bytes(png)
        self._log({tag: wandb.Image(str(path))}, self._step)

    def flush(self) -> None:
        self._points.flush()

    def finish(self, status: str) -> None:
        self._status = status

    def close(self) -> None:
        import wandb

        self._points.close()
        if self._status == "preempted":
            self.run.mark_preempting()
        self.run.finish(exit_code=EXIT_CODES[self._status])
        wandb.teardown()  # W&B's process may still be writing: it would end with ours

    def see_with(self, run_directory: str) -> str:
        return f"wandb sync {run_directory}/wandb/offline-run-*" if self._offline else str(self.run.url)
