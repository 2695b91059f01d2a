from __future__ import annotations

import importlib.util
import socket

import pytest
from support.models import assert_unchanged, composed
from support.profiled_steps import train

from composer3d import ManifestError
from composer3d.testing import run_ranks

FSDP = "[sharding.fsdp2]\n"
needs_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs the package mlflow-skinny")


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table whose runs are in a folder, which the library takes where it is asked to."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return f'[profiling.mlflow]\ntracking_uri = "file:{tmp_path}/mlruns"\nexperiment = "short"\nname = "first"\n'


def stored(tmp_path):
    """Return the run that was stored, and the history of a metric by its name."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"file:{tmp_path}/mlruns")
    experiment = client.get_experiment_by_name("short")
    (run,) = client.search_runs([experiment.experiment_id])
    return run, lambda name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]


@needs_mlflow
def test_gradients_equal_one_device_and_collectives_stay(table):
    assert_unchanged(2, FSDP, table)


@needs_mlflow
def test_every_metric_of_every_step_is_logged_once(table, tmp_path):
    rows, _ = run_ranks(train, 2, FSDP + table + 'tags = { team = "speech" }\n')[0]
    run, history = stored(tmp_path)
    for name in rows[0]:
        assert history(name) == [(step, row[name]) for step, row in enumerate(rows)]
    assert (run.info.run_name, run.info.status, run.data.tags["team"]) == ("first", "FINISHED", "speech")
    (manifest,) = (tmp_path / "mlruns").rglob("manifest.toml")
    assert "[profiling.mlflow]" in manifest.read_text()


@needs_mlflow
def test_a_run_that_ends_in_an_error_is_logged_as_failed(table, tmp_path):
    def failed():
        run = composed(table)
        run.report(0, {"loss": float("nan")})
        run.close(ValueError("stopped"))

    run_ranks(failed, 1)
    run, history = stored(tmp_path)
    assert run.info.status == "FAILED" and [str(value) for _, value in history("loss")] == ["nan"]


@needs_mlflow
def test_a_store_that_is_gone_ends_no_run_and_its_losses_are_counted(table, tmp_path, caplog):
    def lost():
        from mlflow.tracking import MlflowClient

        run = composed(table)
        run.report(0, {"loss": 1.0})
        (sender,) = run.context.state.values()
        sender._rows.join()
        found, _ = stored(tmp_path)
        MlflowClient(f"file:{tmp_path}/mlruns").delete_run(found.info.run_id)  # it takes no metrics from now on
        run.report(1, {"loss": 0.5})
        run.close()
        return [record.getMessage() for record in caplog.records]

    messages = run_ranks(lost, 1)[0]
    assert messages[0].startswith("[profiling.mlflow] a step's metrics could not be sent: ")
    assert "[profiling.mlflow] steps whose metrics could not be sent: 1" in messages


@needs_mlflow
@pytest.mark.parametrize("answers", [False, True], ids=["nobody listens", "nobody answers"])
def test_a_server_that_is_gone_from_the_start_delays_no_step(answers, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr("composer3d_plugins.profiling.mlflow._LONGEST_WAIT_S", 0.2 if answers else 60.0)

    def lost():
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            if answers:
                server.listen()  # connections are made, and wait for a word until the library gives up after minutes
            run = composed(f'[profiling.mlflow]\ntracking_uri = "http://127.0.0.1:{server.getsockname()[1]}/"\n')
            run.report(0, {"loss": 1.0})
            run.report(1, {"loss": 0.5})
            run.close()
            return [record.getMessage() for record in caplog.records]

    assert run_ranks(lost, 1)[0][-1] == "[profiling.mlflow] steps whose metrics could not be sent: 2"


def test_refuses_to_run_without_the_library(table, monkeypatch):
    def refused():
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ManifestError) as caught:
            composed(table)
        return str(caught.value)

    assert run_ranks(refused, 1)[0].endswith('mlflow is not installed; pip install "composer3d[mlflow]"')
