"""What a run left in W&B's offline records and in MLflow, and the environment in which neither calls home."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QUIET = {
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_X_DISABLE_STATS": "true",
    "WANDB_MODE": "offline",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",  # SQLite forbids a connection that a fork inherits
    "DO_NOT_TRACK": "true",
}
BLOCK = 32768  # a record does not cross a block of W&B's file: it is cut there
WHOLE_OR_LAST = (1, 4)  # kinds of a record's parts


def wandb_records(run: Path) -> Iterator[Any]:
    """Yield what ``wandb sync`` would upload for a run directory, as W&B's own messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        data, at, text = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if BLOCK - at % BLOCK < 7:
                at += BLOCK - at % BLOCK
            size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            text += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in WHOLE_OR_LAST:
                yield Record.FromString(text)
                text = b""


def wandb_rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's history."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(run)
        if record.WhichOneof("record_type") == "history"
    ]


def wandb_points(run: Path, name: str) -> list[tuple[int, float]]:
    """Return a number of a run by step."""
    return [(row["_step"], row[name]) for row in wandb_rows(run) if name in row]


def wandb_exit_code(run: Path) -> int:
    """Return how a run ended."""
    (code,) = (each.exit.exit_code for each in wandb_records(run) if each.WhichOneof("record_type") == "exit")
    return int(code)


def mlflow_client(run: Path, uri: str | None = None) -> tuple[Any, str]:
    """Return MLflow's client and the id of its one run in a run directory."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri or f"sqlite:///{run}/mlflow/mlflow.db")
    ids = [
        found.info.run_id for each in client.search_experiments() for found in client.search_runs([each.experiment_id])
    ]
    own = (run / "mlflow" / "run_id").read_text()
    assert own in ids
    assert uri or len(ids) == 1
    return client, own


def mlflow_points(run: Path, name: str, uri: str | None = None) -> list[tuple[int, float]]:
    """Return a number of a run by step."""
    client, run_id = mlflow_client(run, uri)
    return [(point.step, point.value) for point in client.get_metric_history(run_id, name)]
