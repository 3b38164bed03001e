"""What is loaded in place of a run: the one that was verified, in a thread that nobody waits for."""

import asyncio
import time

import pytest

from dsimg.errors import RunError
from dsimg_export import serve as serving
from dsimg_export.serve import ServeConfig, open_server
from dsimg_export.server import reload
from dsimg_export.server.reload import hash_of, watch
from tests.export.golden_runs import edit_manifest, write_golden_run


@pytest.fixture
def first(tmp_path):
    return write_golden_run(tmp_path / "first").path


@pytest.fixture
def second(tmp_path):
    run = write_golden_run(tmp_path / "second").path
    edit_manifest(run, lambda manifest: manifest.update(seed=7))
    return run


def turn(link, run):
    link.unlink(missing_ok=True)
    link.symlink_to(run)


def after_verify(monkeypatch, change):
    verify_but = serving.verify_but

    def and_then(config, **flags):
        verify_but(config, **flags)
        change()

    monkeypatch.setattr(serving, "verify_but", and_then)


def test_a_link_that_turns_while_it_is_loaded_gives_the_run_that_was_verified(tmp_path, first, second, monkeypatch):
    link = tmp_path / "current"
    turn(link, first)
    after_verify(monkeypatch, lambda: turn(link, second))
    (model,) = open_server(ServeConfig(source=(link,))).models.values()
    assert model.name == "current"
    assert model.served.run.path == first
    assert model.version == hash_of(first)[:12]


def test_a_run_that_changes_while_it_is_loaded_is_refused(first, monkeypatch):
    after_verify(monkeypatch, lambda: edit_manifest(first, lambda manifest: manifest.update(seed=7)))
    with pytest.raises(RunError, match="changed while it was loaded"):
        open_server(ServeConfig(source=(first,)))


def test_a_run_is_read_only_where_it_has_changed(first, second, monkeypatch):
    server, read, looks, loads = open_server(ServeConfig(source=(first,))), [], [], []
    monkeypatch.setattr(reload, "hash_of", lambda path: read.append(path) or hash_of(path))

    async def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 5:
            edit_manifest(first, lambda manifest: manifest.update(seed=8))
        if len(looks) == 10:
            raise asyncio.CancelledError

    def load(name, path):
        loads.append(name)
        raise RunError("no good")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(watch(server, {"first": first}, load=load, say=lambda text: None, sleep=sleep))
    assert len(read) == 2
    assert loads == ["first"]


def test_the_end_does_not_wait_for_a_run_that_is_being_loaded(first):
    server = open_server(ServeConfig(source=(first,)))
    edit_manifest(first, lambda manifest: manifest.update(seed=8))
    begun = []

    def load(name, path):
        begun.append(name)
        time.sleep(5)

    async def body():
        watching = asyncio.create_task(watch(server, {"first": first}, load=load, say=lambda text: None, seconds=0.01))
        while not begun:
            await asyncio.sleep(0.01)
        watching.cancel()

    start = time.monotonic()
    asyncio.run(body())
    assert time.monotonic() - start < 3
