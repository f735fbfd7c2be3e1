"""MLflow tracker; a resumed run continues the same MLflow run."""

from __future__ import annotations

from hyper_parallel.errors import ConfigError
from hyper_parallel.train.trackers.tracker import Record, RunInfo


class MLflow:
    """A run of the experiment `hyper-parallel`, on the server that MLFLOW_TRACKING_URI names."""

    def __init__(self, run: RunInfo) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise ConfigError(
                "trackers: 'mlflow' is not installed; pip install 'hyper-parallel[mlflow]', or leave it out"
            ) from error
        self._mlflow = mlflow
        mlflow.set_experiment("hyper-parallel")
        known = run.out / "mlflow-id"
        identity = known.read_text().strip() if run.start and known.exists() else None
        active = mlflow.start_run(run_id=identity, run_name=None if identity else run.out.name)
        known.write_text(active.info.run_id)
        if identity is None:
            mlflow.log_dict(run.config, "run.json")

    def log(self, step: int, record: Record) -> None:
        """The record at its step."""
        self._mlflow.log_metrics(dict(record), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """The text, as an artifact."""
        self._mlflow.log_text(text, f"{name}.txt")

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()
