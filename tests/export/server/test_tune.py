import shutil
import time

import pytest

from dsimg.errors import ConfigError, DsimgError
from dsimg_export import serve as serving
from dsimg_export.serve import ServeConfig, open_server
from dsimg_export.server import tune as tuning
from dsimg_export.server.model import load
from dsimg_export.server.tune import Setting, parse_goal, settings, tune
from tests.export.golden_runs import write_golden_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_golden_run(tmp_path_factory.mktemp("tuned") / "digits").path


def setting(**changes):
    values = {"workers": 1, "threads": 1, "decode_threads": 1, "max_batch": 4, "delay": 0.0}
    return Setting(**values | changes)


def tuned(run, goal, tried, said=None):
    return tune(
        goal,
        tried,
        load=lambda plan, pool: load(run, "x", plan, pool),
        say=([] if said is None else said).append,
        seconds=0.2,
    )


def test_a_goal_is_read():
    assert parse_goal("p99=50ms") == pytest.approx(0.05)
    for text in ("50", "p99=ms", "p99=0ms", "p50=3ms", "p99=1.2.3ms", "p99=-1ms"):
        with pytest.raises(ConfigError, match="--tune p99=50ms"):
            parse_goal(text)
    with pytest.raises(ConfigError, match="p99"):
        ServeConfig(source=("run",), tune="fast")


@pytest.mark.parametrize("cores", [1, 2, 3, 64])
def test_what_is_tried_uses_the_cores_and_no_more(cores):
    tried = list(settings(cores, 0.05))
    assert len(tried) == len(set(tried))
    assert all(1 <= one.workers * one.threads <= cores and 1 <= one.decode_threads <= cores for one in tried)
    assert {one.max_batch for one in tried} == set(tuning.BATCHES)


def test_the_setting_that_answers_most_within_the_goal_is_found(run, monkeypatch):
    monkeypatch.setattr(tuning, "CLIENTS", (1, 2))  # fewer than a batch: none is full
    said = []
    # A call that waits 600 ms for others cannot keep 400 ms.
    found = tuned(run, 0.4, [setting(delay=0.6), setting()], said)
    assert found.setting == setting()
    assert found.p99 <= 0.4
    assert found.images_per_second > 1
    assert [one.setting for one in said] == [setting()]


def test_a_goal_that_nothing_keeps_is_an_error(run):
    with pytest.raises(ConfigError, match="one client alone waits"):
        tuned(run, 1e-6, [setting()])


def test_more_clients_are_tried_until_the_goal_breaks(run, monkeypatch):
    monkeypatch.setattr(tuning, "CLIENTS", (1, 2, 4, 8))
    monkeypatch.setattr(tuning, "MIN_ANSWERS", 8)
    calls = []

    def slow(plan, pool):
        model = load(run, "x", plan, pool)
        network = model.batcher.network

        def sleeping(images):
            calls.append(len(images))
            time.sleep(0.1)
            return network(images)

        model.batcher.network = sleeping
        return model

    tried = [setting(workers=2, max_batch=1)]
    found = tune(0.17, tried, load=slow, say=lambda load: None, seconds=0.2)
    assert found.clients == 2  # a third one would wait for 200 ms
    assert 10 < found.images_per_second < 20
    assert len(calls) < 60  # eight were not tried


def test_measuring_ends(run, monkeypatch):
    monkeypatch.setattr(tuning, "CLIENTS", (1,))
    monkeypatch.setattr(tuning, "MOST_SECONDS", 0.1)
    tried = [setting(), setting(max_batch=8), setting(max_batch=16)]
    assert tuned(run, 10.0, tried).setting == tried[0]


def test_what_is_found_takes_the_place_of_the_flags(run, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "CLIENTS", (1,))
    monkeypatch.setattr(tuning, "SECONDS", 0.1)
    monkeypatch.setattr(tuning, "MOST_SECONDS", 0.05)
    monkeypatch.setattr(serving, "settings", lambda cores, goal: [setting(max_batch=2, delay=0.001), setting()])
    config = serving._tuned(ServeConfig(source=(run,), tune="p99=400ms"), 0.4)
    assert config.delay_ms == pytest.approx(1.0)
    flags = {"workers": 1, "threads": 1, "decode_threads": 1, "max_batch": 2, "delay_ms": config.delay_ms}
    assert config == ServeConfig(source=(run,), **flags)
    said = capsys.readouterr().out
    assert "1 of 2 settings" in said
    assert "--workers 1 --threads 1 --decode_threads 1 --max_batch 2 --delay_ms 1" in said


def test_a_run_that_says_something_else_here_is_refused_before_it_is_measured(run, tmp_path, monkeypatch):
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    (damaged / "labels.txt").write_text("other\n")
    monkeypatch.setattr(serving, "tune", None)
    with pytest.raises(DsimgError, match=r"labels\.txt"):
        serving._tuned(ServeConfig(source=(damaged,), tune="p99=400ms"), 0.4)


@pytest.mark.parametrize("flag", [{"workers": 1}, {"threads": 2}, {"max_batch": 4}, {"delay_ms": 1.0}])
def test_what_is_to_be_found_cannot_be_given(flag):
    (name,) = flag
    with pytest.raises(ConfigError, match=f"--tune finds --{name} itself"):
        ServeConfig(source=("run",), tune="p99=50ms", **flag)


def test_what_was_found_is_served(run):
    server = open_server(ServeConfig(source=(run,), workers=1, threads=2, max_batch=3, delay_ms=1.5))
    (model,) = server.models.values()
    assert (model.plan.workers, model.plan.threads, model.batcher.max_batch) == (1, 2, 3)
    assert model.plan.max_delay == pytest.approx(0.0015)
