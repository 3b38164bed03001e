import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnxruntime.quantization import QuantType, quantize_static

from dsimg.errors import ConfigError, ModelError
from dsimg_export import session
from dsimg_export.session import Int8Share, int8_share, latency, open_session, operators_run
from tests.export.files import INPUT_SIZE, noise, write_network

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("module", ["session", "int8"])
def test_the_onnx_side_loads_no_torch(module):
    heavy = "{'torch', 'torchvision', 'deepspeed', 'safetensors', 'sympy'}"
    code = f"import sys, dsimg_export.{module}; found = {heavy} & sys.modules.keys(); assert not found, found"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert answer.returncode == 0, answer.stderr


def test_a_session_runs_any_batch_with_the_threads_asked_for(tmp_path):
    opened = open_session(write_network(tmp_path / "model.onnx"), threads=2)
    images = noise(3)
    together = opened.run(["logits"], {"images": images})[0]
    single = opened.run(["logits"], {"images": images[1:2]})[0]
    assert together.shape == (3, 5)
    np.testing.assert_allclose(single, together[1:2], rtol=1e-5)
    options = opened.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (2, 1)
    assert opened.get_providers() == ["CPUExecutionProvider"]


def test_a_missing_and_a_damaged_file_are_named(tmp_path):
    path = tmp_path / "model.onnx"
    with pytest.raises(ModelError, match=r"model\.onnx does not exist\. Give the path of an ONNX file\."):
        open_session(path)
    write_network(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=rf"cannot be run by ONNX Runtime {onnxruntime.__version__} \(.+\)\. Copy"):
        open_session(path)


def test_latency_of_a_wide_network_is_longer(tmp_path):
    files = {name: write_network(tmp_path / name, width=width) for name, width in {"wide": 128, "narrow": 4}.items()}
    found = latency(files, input_size=INPUT_SIZE, batch=2, seconds=0.1)
    assert list(found) == ["wide", "narrow"]
    assert found["wide"].repeats == found["narrow"].repeats >= session.MIN_REPEATS
    for value in found.values():
        assert value.cpu > 0
        assert 0 < value.median <= value.p99
    assert found["wide"].cpu > 3 * found["narrow"].cpu


def test_what_is_measured_together_runs_in_turn_each_round_in_another_order():
    calls = []
    found = session.in_turn({name: lambda name=name: calls.append(name) for name in "abc"}, seconds=0)
    first = 3 * session.WARM_UP_ROUNDS
    assert calls[:first] == ["a", "b", "c"] * session.WARM_UP_ROUNDS
    a_turn = session.UNCOUNTED + 1
    turns = [calls[start : start + a_turn] for start in range(first, len(calls), a_turn)]
    assert all(len(set(turn)) == 1 for turn in turns)
    rounds = ["".join(turn[0] for turn in turns[start : start + 3]) for start in range(0, len(turns), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert len(rounds) == session.MIN_REPEATS
    assert len(set(rounds)) > 1
    assert list(found) == ["a", "b", "c"]
    assert all(len(times.wall) == len(times.cpu) == session.MIN_REPEATS for times in found.values())


def test_a_call_is_counted_once_the_caches_are_its_own_again():
    last = []

    def step(name):
        def call():
            time.sleep(0.02 if last[-1:] != [name] else 0.001)  # what another one ran before is slow
            last.append(name)

        return call

    found = session.in_turn({name: step(name) for name in "ab"}, seconds=0)
    assert all(float(np.median(times.wall)) < 0.01 for times in found.values())


def test_a_call_that_is_not_short_counts_each_time(monkeypatch):
    monkeypatch.setattr(session, "SHORT", 0.004)
    calls = []
    steps = {"short": lambda: calls.append("short"), "long": lambda: (calls.append("long"), time.sleep(0.005))}
    found = session.in_turn(steps, seconds=0)
    assert calls.count("short") == session.WARM_UP_ROUNDS + (session.UNCOUNTED + 1) * session.MIN_REPEATS
    assert calls.count("long") == session.WARM_UP_ROUNDS + session.MIN_REPEATS
    assert all(len(times.wall) == session.MIN_REPEATS for times in found.values())


def test_onnxruntime_keeps_no_record_of_the_user(tmp_path):
    model = write_network(tmp_path / "model.onnx")
    code = "import sys, pathlib; from dsimg_export.session import open_session; open_session(pathlib.Path(sys.argv[1]))"
    places = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    command = [sys.executable, "-c", code, str(model)]
    assert subprocess.run(command, env=environment | places, cwd=ROOT, timeout=60).returncode == 0
    assert [entry.name for entry in tmp_path.rglob("*")] == ["model.onnx"]


def test_what_is_measured_alone_counts_every_call():
    calls = []
    session.in_turn({"a": lambda: calls.append("a")}, seconds=0)
    assert len(calls) == session.WARM_UP_ROUNDS + session.MIN_REPEATS


def test_a_bound_session_says_what_a_plain_one_says(tmp_path):
    opened = open_session(write_network(tmp_path / "model.onnx"))
    images = session.noise_for(opened, 3, INPUT_SIZE)
    answers = []

    class Binding:
        def __init__(self, real):
            self.real = real

        def __getattr__(self, name):
            return getattr(self.real, name)

        def synchronize_outputs(self):
            self.real.synchronize_outputs()
            answers.append(self.real.copy_outputs_to_cpu()[0])

    class Session:
        def io_binding(self):
            return Binding(opened.io_binding())

        def run_with_iobinding(self, binding):
            opened.run_with_iobinding(binding.real)

    step = session.repeatable(Session(), images.copy())
    step()
    step()
    assert len(answers) == 2
    for answer in answers:
        np.testing.assert_array_equal(answer, opened.run(["logits"], {"images": images})[0])


class Batches:
    def __init__(self):
        self.rest = iter([{"images": noise(4)}])

    def get_next(self):
        return next(self.rest, None)


def test_a_layer_kept_in_float_stays_in_float_when_the_session_loads(tmp_path):
    source, target = write_network(tmp_path / "fp32.onnx"), tmp_path / "int8.onnx"
    assert int8_share(operators_run(source)) == Int8Share(int8=0, total=3)
    options = {"per_channel": True, "activation_type": QuantType.QUInt8, "nodes_to_exclude": ["conv2"]}
    quantize_static(source, target, Batches(), **options)
    assert int8_share(operators_run(target)) == Int8Share(int8=2, total=3)


def test_tensorrt_is_refused_for_int8_before_anything_is_tried(tmp_path):
    source, target = write_network(tmp_path / "fp32.onnx"), tmp_path / "int8.onnx"
    quantize_static(source, target, Batches(), per_channel=True, activation_type=QuantType.QUInt8)
    with pytest.raises(ConfigError, match=r"--provider tensorrt: .*int8\.onnx is in int8 .* only symmetric int8\."):
        open_session(target, provider="tensorrt")


@pytest.mark.skipif(
    Path("/dev/nvidiactl").exists(), reason="there is a GPU here, and this test is of hosts without one"
)
@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_a_gpu_that_is_not_there_is_an_error_and_never_the_cpu(tmp_path, provider):
    with pytest.raises(ConfigError, match=rf"--provider {provider}: .*--provider cpu"):
        open_session(write_network(tmp_path / "model.onnx"), provider=provider)
