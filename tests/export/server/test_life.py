"""`dsimg serve` as a process: ready, under load, asked to end."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import uvicorn

from dsimg.errors import ConfigError
from dsimg_export.server import listening
from tests.export.golden_runs import edit_manifest, encoded_pictures, write_golden_run


class Process:
    """`dsimg serve` on a free port."""

    def __init__(self, *words):
        command = [sys.executable, "-m", "dsimg", "serve", "--port", "0", *map(str, words)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines = []
        self.port = None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith("ready: http://127.0.0.1:"):
                self.port = int(line.rsplit(":", 1)[1])
                break

    def ask(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def end(self, sig=signal.SIGTERM, timeout=20):
        self.process.send_signal(sig)
        rest = self.process.communicate(timeout=timeout)[0]
        return self.process.returncode, rest

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def run(tmp_path):
    return write_golden_run(tmp_path / "run").path


def test_a_run_is_verified_served_and_ended(run):
    with Process("--source", run) as server:
        said = "\n".join(server.lines)
        assert "says here what it said where it was made" in said
        assert "cores:" in said
        assert server.ask("POST", "/predict", encoded_pictures()[0])[0] == 200
        assert server.ask("GET", "/v2/health/ready") == (200, {"live": True, "ready": True})
        code, rest = server.end()
        assert code == 0
        assert "every request that was accepted has been answered" in rest


def test_a_run_that_says_something_else_here_is_not_served(run):
    edit_manifest(run, lambda manifest: manifest["model"]["preprocess"].update(mean=[0.1, 0.2, 0.3]))
    with Process("--source", run) as server:
        assert server.port is None
        assert server.process.wait(10) == 2
        assert "error: " in "\n".join(server.lines)


def test_a_port_that_is_taken_is_said_before_anything_is_loaded(run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with Process("--source", run, "--port", taken.getsockname()[1]) as server:
            assert server.process.wait(10) == 2
            (line,) = server.lines
            assert line.startswith("error: cannot listen on 127.0.0.1:")


@pytest.mark.parametrize("drain", [0, 1])
def test_no_accepted_request_is_lost_when_the_server_is_asked_to_end(run, drain):
    data = encoded_pictures()[1]
    with Process("--source", run, "--drain_seconds", drain) as server:
        answers, ends = [], []  # each with its time

        def client():
            while True:  # a connection after another, until none is taken
                with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)) as connection:
                    close = False
                    while not close:
                        try:
                            connection.request("POST", "/predict", data)
                            answer = connection.getresponse()
                            answer.read()
                        except OSError as error:
                            ends.append((type(error).__name__, time.monotonic()))
                            return
                        answers.append((answer.status, time.monotonic()))
                        close = answer.getheader("connection") == "close"

        clients = [threading.Thread(target=client) for _ in range(6)]
        for one in clients:
            one.start()
        time.sleep(1.0)
        assert not ends
        asked = time.monotonic()
        code, rest = server.end()
        for one in clients:
            one.join(20)
        assert code == 0
        assert "every request that was accepted has been answered" in rest
        assert {status for status, _ in answers} == {200}
        assert sum(when < asked for _, when in answers) > 50
        if drain:
            assert sum(when > asked + 0.2 for _, when in answers) > 50
        # Refused, or an idle connection was closed just then, which HTTP/1.1 cannot avoid.
        closed = {"ConnectionRefusedError", "RemoteDisconnected", "ConnectionResetError", "BrokenPipeError"}
        assert len(ends) == 6
        assert {name for name, _ in ends} <= closed
        assert min(when for _, when in ends) > asked + 0.95 * drain


def test_draining_says_that_it_is_not_ready_and_goes_on_answering(run):
    with Process("--source", run, "--drain_seconds", "1.5") as server:
        os.kill(server.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 1
        while server.ask("GET", "/v2/health/ready")[0] == 200:
            assert time.monotonic() < deadline
        assert server.ask("GET", "/v2/health/live")[0] == 200
        assert server.ask("POST", "/predict", encoded_pictures()[0])[0] == 200
        assert server.process.wait(10) == 0


def test_a_head_that_does_not_come_ends_the_connection(run):
    with Process("--source", run, "--head_seconds", "0.3", "--body_seconds", "0.5") as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as slow:
            slow.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\n")
            start = time.monotonic()
            assert slow.recv(100) == b""
            assert time.monotonic() - start < 3
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as silent:
            assert silent.recv(100) == b""
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as slow:
            slow.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc")
            assert slow.recv(1000).startswith(b"HTTP/1.1 408")
        # An idle connection between two requests stays open.
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
        for _ in range(2):
            connection.request("POST", "/predict", encoded_pictures()[0])
            assert connection.getresponse().read()
            time.sleep(0.6)
        connection.close()


def test_ctrl_c_ends_it_too(run):
    with Process("--source", run) as server:
        code, _ = server.end(signal.SIGINT)
        assert code == 0


def test_a_run_made_anew_takes_the_old_one_s_place_and_no_request_is_lost(tmp_path):
    first, second = write_golden_run(tmp_path / "first").path, write_golden_run(tmp_path / "second").path
    edit_manifest(second, lambda manifest: manifest.update(seed=7))  # another hash: another version
    link = tmp_path / "current"
    link.symlink_to(first)
    data = encoded_pictures()[1]
    with Process("--source", link, "--reload") as server:
        ended, statuses, versions = threading.Event(), [], [[] for _ in range(4)]

        def client(seen):
            while not ended.is_set():
                status, answer = server.ask("POST", "/predict", data)
                statuses.append(status)
                seen.append(answer["version"])

        clients = [threading.Thread(target=client, args=(seen,)) for seen in versions]
        for one in clients:
            one.start()
        time.sleep(0.5)
        new_link = tmp_path / "new"
        new_link.symlink_to(second)
        new_link.replace(link)
        deadline = time.monotonic() + 20
        while any(len(set(seen)) < 2 for seen in versions):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
        ended.set()
        for one in clients:
            one.join(20)
        assert set(statuses) == {200}
        for seen in versions:
            assert seen == sorted(seen, key=seen.index)  # no client is sent back to the old one
        code, rest = server.end()
        assert code == 0
        assert "serves in place of" in rest


def test_a_run_that_is_no_good_does_not_take_the_place(tmp_path):
    first, second = write_golden_run(tmp_path / "first").path, write_golden_run(tmp_path / "second").path
    edit_manifest(second, lambda manifest: manifest["model"]["preprocess"].update(mean=[0.1, 0.2, 0.3]))
    link = tmp_path / "current"
    link.symlink_to(first)
    with Process("--source", link, "--reload") as server:
        before = server.ask("POST", "/predict", encoded_pictures()[1])[1]
        link.unlink()
        link.symlink_to(second)
        lines = []
        for line in server.process.stdout:
            lines.append(line)
            if "is refused" in line:
                break
        assert "goes on serving" in lines[-1]
        assert "mean" in lines[-1]
        assert server.ask("POST", "/predict", encoded_pictures()[1])[1] == before
        assert server.end()[0] == 0


def test_the_access_log_is_json_that_no_request_can_forge(run):
    with Process("--source", run, "--access_log") as server:
        server.ask("POST", "/predict", encoded_pictures()[0])
        server.ask("GET", "/a%0A%7B%22status%22:200%7D")
        _, rest = server.end()
        lines = [json.loads(line) for line in rest.splitlines() if line.startswith("{")]
        assert [(line["status"], line["path"]) for line in lines] == [(200, "/predict"), (404, '/a\n{"status":200}')]
        assert lines[0]["infer_ms"] > 0


def send_half(server):
    """Return a connection whose request is accepted, and whose body does not come."""
    client = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    client.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc")
    time.sleep(0.3)
    return client


def test_what_was_cut_off_after_the_grace_is_counted(run):
    with Process("--source", run, "--grace_seconds", "1") as server, send_half(server) as client:
        code, rest = server.end()
        assert code == 1
        assert "requests that were accepted and cut off: 1." in rest
        assert "Traceback" not in rest
        assert client.recv(1000).startswith(b"HTTP/1.1 503 ")


def test_a_second_ctrl_c_ends_it_at_once_whatever_follows(run):
    with Process("--source", run) as server, send_half(server):
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)
        start = time.monotonic()
        code, rest = server.end(signal.SIGTERM)
        assert time.monotonic() - start < 3
        assert code == 1
        assert "cut off: 1." in rest


def test_sigterm_before_it_serves_ends_it_with_code_0(run):
    command = [sys.executable, "-m", "dsimg", "serve", "--port", "0", "--source", str(run), "--tune", "p99=900ms"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while not process.stdout.readline().startswith("measuring at most"):
            assert process.poll() is None
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=10)[0]
        assert process.returncode == 0
        assert "Traceback" not in rest


def test_a_signal_between_the_handler_and_the_first_connection_ends_it():
    answering = listening.Answering(uvicorn.Config(lambda: None), server=None, drain=0.0, url="")
    answering.handle_exit(signal.SIGTERM, None)
    assert answering.should_exit


def test_an_idle_server_sleeps(run):
    with Process("--source", run) as server:
        time.sleep(0.5)

        def wakes():
            status = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
            return int(next(line for line in status if line.startswith("voluntary_ctxt")).split()[1])

        before = wakes()
        time.sleep(2)
        assert wakes() - before < 5


def test_a_certificate_that_is_none_is_said_before_anything_is_loaded(run, tmp_path):
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    with Process("--source", run, "--ssl_certfile", bad, "--ssl_keyfile", bad) as server:
        assert server.process.wait(10) == 2
        assert server.lines[0].startswith(f"error: cannot serve HTTPS with --ssl_certfile {bad}")
        assert "in PEM" in "".join(server.lines)


def test_a_port_is_taken_while_the_first_server_still_loads():
    with listening.bind("127.0.0.1", 0) as first, pytest.raises(ConfigError, match="Give another --port"):
        listening.bind("127.0.0.1", first.getsockname()[1])


def test_localhost_is_not_open_to_others(run):
    with Process("--source", run, "--host", "localhost") as server:
        assert server.port is not None
        assert "api_key_file" not in "".join(server.lines)


def test_answers_on_one_connection_wait_for_no_acknowledgement(run):
    data, waits = encoded_pictures()[0], []
    with (
        Process("--source", run) as server,
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)) as connection,
    ):
        for _ in range(30):
            start = time.monotonic()
            connection.request("POST", "/predict", data)
            assert connection.getresponse().read()
            waits.append(time.monotonic() - start)
    assert sorted(waits)[10] < 0.035  # 40 ms more, each, without TCP_NODELAY
