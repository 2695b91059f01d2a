from __future__ import annotations

import pytest
from support.models import assert_unchanged, composed
from support.profiled_steps import train

from composer3d import ManifestError
from composer3d.testing import run_ranks

FSDP = "[sharding.fsdp2]\n"


def table(folder):
    return f'[profiling.tensorboard]\nfolder = "{folder}"\n'


def test_gradients_equal_one_device_and_collectives_stay(tmp_path):
    assert_unchanged(2, FSDP, table(tmp_path))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_metric_is_there_once_a_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows, _ = run_ranks(train, 2, FSDP + table(tmp_path))[0]
    assert len(list(tmp_path.iterdir())) == 1  # the first rank's
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(rows[0])
    read = [(event.step, event.value) for event in events.Scalars("loss")]
    assert read == [(number, pytest.approx(row["loss"])) for number, row in enumerate(rows)]


def test_nothing_is_written_outside_a_run(tmp_path):
    def checked():
        run = composed(table(tmp_path / "none"), purpose="verify")
        run.report(0, {"loss": 1.0})
        run.close()

    run_ranks(checked, 1)
    assert not (tmp_path / "none").exists()


def test_refuses_to_run_without_the_library(monkeypatch, tmp_path):
    def refused():
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ManifestError) as caught:
            composed(table(tmp_path))
        return str(caught.value)

    assert run_ranks(refused, 1)[0].endswith('tensorboard is not installed; pip install "composer3d[tensorboard]"')
