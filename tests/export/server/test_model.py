"""A model in memory: its sessions, and what it says of an image."""

from dataclasses import replace

import numpy as np
import pytest

from dsimg.errors import DsimgError
from dsimg.metrics import best_classes
from dsimg.preprocess import normalise
from dsimg_export.serve import ServeConfig, open_server
from dsimg_export.server.model import Answer, Plan, load, open_pool


def test_a_lone_call_has_a_session_of_its_own(run):
    plan = Plan(workers=1, threads=1, max_batch=2, max_delay=0.0, max_queue=9)
    for threads, opened in ((2, True), (None, False)):
        model = load(run.path, "x", replace(plan, lone_threads=threads), open_pool(plan, 1))
        assert (model.batcher.lone_network is not None) == opened


@pytest.mark.parametrize(("threads", "lone", "expected"), [(1, 1, None), (2, 2, None), (1, 3, 3), (2, 1, 1)])
def test_a_lone_call_with_as_many_threads_needs_no_session_of_its_own(run, threads, lone, expected):
    server = open_server(ServeConfig(source=(run.path,), workers=1, threads=threads, lone_threads=lone))
    (model,) = server.models.values()
    assert model.plan.lone_threads == expected
    assert (model.batcher.lone_network is None) == (expected is None)


def test_the_best_classes_of_an_image():
    logits = np.random.default_rng(0).normal(size=(3, 9)).astype(np.float32)
    logits[1, 4] = np.nan
    answers = [Answer(row, top) for row, top in zip(logits, best_classes(logits, 5), strict=True)]
    for k in (1, 5, 7, 9):
        assert [answer.best(k) for answer in answers] == best_classes(logits, k)


@pytest.mark.parametrize("pixels", ["pixels", "tensors", "both"])
def test_pixels_and_what_the_network_takes_are_one_batch(run, pixels):
    plan = Plan(workers=1, threads=1, max_batch=2, max_delay=0.0, max_queue=9)
    model = load(run.path, "x", plan, open_pool(plan, 1))
    raw = list(np.random.default_rng(0).integers(0, 256, (2, *model.served.preprocess.input_size[1:], 3), np.uint8))
    ready = [normalise(image[None], model.served.preprocess)[0] for image in raw]
    given = {"pixels": raw, "tensors": ready, "both": [raw[0], ready[1]]}[pixels]
    np.testing.assert_array_equal(model._gather(given), np.stack(ready))


def test_a_run_that_is_not_there_is_missed_before_another_is_verified(run, tmp_path, capsys):
    with pytest.raises(DsimgError, match="no_such_run"):
        open_server(ServeConfig(source=(run.path, tmp_path / "no_such_run")))
    assert "says here what it said" not in capsys.readouterr().out
