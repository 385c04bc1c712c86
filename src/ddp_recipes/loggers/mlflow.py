"""MLflow."""

from __future__ import annotations

import errno
import logging
import os
import re
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from ddp_recipes.errors import RequestError, chain
from ddp_recipes.loggers.base import Logger, Parameter, kept_id, require

__all__ = ["MLflowLogger"]

log = logging.getLogger(__name__)

STATUS = {"finished": "FINISHED", "failed": "FAILED", "preempted": "KILLED"}
BATCH = 100  # parameters in a request; MLflow takes no more, and of metrics 1000
NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")


class MLflowLogger(Logger):
    """Log to MLflow, each point once; on resume the same run goes on there.

    Args:
        purge_step: on resume, the first step that comes again.
        tracking_uri: of a database or a server; if left out, a database in ``directory``.
        run_name: if left out, MLflow invents one.
        flush_secs: how long, in seconds, points may wait in memory.
    """

    folder: ClassVar[str] = "mlflow"

    @classmethod
    def check(cls, section: str, keys: Mapping[str, Any]) -> None:
        require("mlflow", section, cls.__name__)
        uri = keys.get("tracking_uri")
        if uri is None:
            return
        if urlsplit(str(uri)).scheme in ("", "file"):
            raise RequestError(
                f"{section}.tracking_uri={uri} is a folder, in which MLflow no longer keeps runs. Give a database, "
                f"{section}.tracking_uri=sqlite:////a/path/mlflow.db, or a server's address."
            )
        try:
            _client(uri).search_experiments(max_results=1)
        except Exception as error:  # of MLflow, of SQLAlchemy, of the network
            raise RequestError(f"{section}.tracking_uri={uri} does not answer: {error}") from error

    def __init__(
        self,
        directory: str | Path,
        purge_step: int | None = None,
        tracking_uri: str | None = None,
        experiment_name: str = "ddp_recipes",
        run_name: str | None = None,
        tags: Mapping[str, Any] | None = None,
        flush_secs: float = 5,
    ) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._uri = tracking_uri or f"sqlite:///{self._directory}/mlflow.db"
        self._flush_secs = flush_secs
        self._flushed = time.monotonic()
        self._status = "failed"  # unless we are told otherwise
        self._step = (purge_step or 1) - 1
        self._held: list[Any] = []
        self.client = client = _client(self._uri)
        self._experiment = self._experiment_id(experiment_name, None if tracking_uri else self._directory / "artifacts")

        def start() -> str:
            return str(client.create_run(self._experiment, run_name=run_name, tags=dict(tags or {})).info.run_id)

        self.run_id = kept_id(self._directory, start)
        client.update_run(self.run_id, status="RUNNING")
        data = client.get_run(self.run_id).data
        self._params: dict[str, str] = data.params
        # MLflow takes no point back: those it has do not go there again, lower numbers of batches neither.
        self._known = {
            (name, point.step)
            for name in (data.metrics if purge_step is not None else ())
            for point in client.get_metric_history(self.run_id, name)
        }
        if steps := [step for _, step in self._known if step >= (purge_step or 0)]:
            log.info("MLflow has the steps %d to %d already, and keeps them as they are.", min(steps), max(steps))

    def _experiment_id(self, name: str, artifacts: Path | None) -> str:
        """Return the id of the experiment, which is made if there is none."""
        found = self.client.get_experiment_by_name(name)
        if found is None:
            return str(self.client.create_experiment(name, artifacts and artifacts.as_uri()))
        return str(found.experiment_id)

    def parameters(self, params: Mapping[str, Parameter]) -> None:
        from mlflow.entities import Param

        given = {_name(name): str(value) for name, value in params.items()}
        changed = [name for name, value in given.items() if self._params.get(name, value) != value]
        if changed:
            log.info("MLflow keeps parameters as they were first: %s.", ", ".join(changed))
        new = [Param(name, value) for name, value in given.items() if name not in self._params]
        for first in range(0, len(new), BATCH):
            with self._writing():
                self.client.log_batch(self.run_id, params=new[first : first + BATCH])
        self._params = given | self._params

    @property
    def experiment(self) -> Any:
        return self.client

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        self._step = step
        when = int(time.time() * 1000)
        for name, value in values.items():
            if (_name(name), step) not in self._known:
                self._held.append(Metric(_name(name), value, when, step))
        if time.monotonic() - self._flushed > self._flush_secs:
            self.flush()

    def flush(self) -> None:
        self._flushed = time.monotonic()
        while self._held:
            with self._writing():
                self.client.log_batch(self.run_id, metrics=self._held[: 10 * BATCH])
            del self._held[: 10 * BATCH]

    def text(self, tag: str, text: str) -> None:
        self.client.log_text(self.run_id, text, f"{tag}.md")

    def hparams(
        self, params: Mapping[str, Parameter], metrics: Mapping[str, float], chosen: Collection[str] = ()
    ) -> None:
        self.parameters(params)

    def image(self, tag: str, png: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"step_{self._step:08d}.png"
            path.write_bytes(png)
            self.client.log_artifact(self.run_id, str(path), f"images/{tag}")

    def finish(self, status: str) -> None:
        self._status = status

    def close(self) -> None:
        try:
            self.flush()
        finally:
            with self._writing():
                self.client.set_terminated(self.run_id, STATUS[self._status])

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise what any other file raises on a full disk, where it is that of the database."""
        try:
            yield
        except Exception as error:
            names = [getattr(each, "sqlite_errorname", "") for each in chain(error)]
            if "SQLITE_FULL" not in names:
                raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._uri.removeprefix("sqlite:///")) from error

    def see_with(self, run_directory: str) -> str:
        if urlsplit(self._uri).scheme.startswith("http"):
            return f"{self._uri.rstrip('/')}/#/experiments/{self._experiment}/runs/{self.run_id}"
        own = self._uri == f"sqlite:///{self._directory}/mlflow.db"
        uri = f"sqlite:///{run_directory}/mlflow/mlflow.db" if own else self._uri
        return f"mlflow ui --backend-store-uri {uri}"


def _client(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    for package in ("alembic", "mlflow"):  # or they tell of each table that they make
        logging.getLogger(package).setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=uri)


def _name(name: str) -> str:
    """Return a name as MLflow takes it."""
    return NOT_IN_NAMES.sub("_", name)
