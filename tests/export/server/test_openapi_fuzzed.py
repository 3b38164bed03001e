"""Whether the server keeps what its OpenAPI document promises, by schemathesis: requests made from the document alone.

It is a program of its own here (`uv tool install schemathesis`, or pip in any environment), not of the dev extra: it
brings eleven packages, two of which would hook themselves into each run of pytest.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.export.server.live import serving

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,negative_data_rejection,positive_data_acceptance,missing_required_header,"
    "unsupported_method,allow_header_conformance,ignored_auth"
)
# A valid request is answered, unless it gave too little time.
CONFIG = """
hooks = "tests.export.server.schemathesis_hooks"
seed = 1
continue-on-failure = true
[generation]
database = "none"
deterministic = true
[checks.not_a_server_error]
expected-statuses = ["2xx", "4xx", 503]
[checks.positive_data_acceptance]
expected-statuses = ["2xx", 503]
"""
ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "examples"), [((), 160), ((b"secret",), 10)], ids=["open", "with keys"])
def test_the_server_keeps_what_its_document_promises(run, tmp_path, keys, examples):
    program = shutil.which("schemathesis")
    if program is None:
        pytest.skip("schemathesis is not installed: uv tool install schemathesis")
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    with serving(run.path, keys=keys, max_queue=2000, deadline_ms=60_000) as live:
        (model,) = live.server.models.values()
        words = [program, "--config-file", "schemathesis.toml", "run", f"http://127.0.0.1:{live.port}/openapi.json"]
        words += ["--checks", CHECKS, "--max-examples", str(examples), "--no-color"]
        for key in keys:
            words += ["--header", f"Authorization: Bearer {key.decode()}"]
        known = {"DSIMG_MODEL": model.name, "DSIMG_VERSION": model.version, "PYTHONPATH": str(ROOT)}
        found = subprocess.run(
            words, cwd=tmp_path, env={**os.environ, **known}, capture_output=True, text=True, timeout=900
        )
        assert live.get("/v2/health/ready").status == 200
    assert found.returncode == 0, found.stdout[-20_000:] + found.stderr
    assert "Tested: 24" in found.stdout
    print(found.stdout[found.stdout.index("SUMMARY") :])
