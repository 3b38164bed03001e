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

import pytest

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
        outcomes, ending = [], threading.Event()

        def client():
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)) as connection:
                while True:
                    ended = ending.is_set()
                    try:
                        connection.request("POST", "/predict", data)
                        answer = connection.getresponse()
                        answer.read()
                    except OSError as error:  # an idle connection was closed just then, which HTTP/1.1 cannot avoid
                        outcomes.append(type(error).__name__ if ended or ending.is_set() else "lost")
                        return
                    outcomes.append(answer.status)
                    if answer.getheader("connection") == "close":
                        return

        clients = [threading.Thread(target=client) for _ in range(6)]
        for one in clients:
            one.start()
        time.sleep(1.0)
        ending.set()
        code, _ = server.end()
        for one in clients:
            one.join(20)
        assert code == 0
        assert outcomes.count(200) > 50
        closed = {"RemoteDisconnected", "ConnectionResetError", "BrokenPipeError"}
        assert set(outcomes) <= ({200} if drain else {200, *closed})


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
