"""A run and a server of it, shared by the tests of a file."""

import pytest

from tests.export.golden_runs import write_golden_run
from tests.export.server.live import serving


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_golden_run(tmp_path_factory.mktemp("served") / "digits")


@pytest.fixture(scope="module")
def live(run):
    with serving(run.path) as found:
        yield found
