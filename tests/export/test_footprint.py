import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dsimg.errors import ModelError
from dsimg_export import footprint as module
from dsimg_export.footprint import Footprint, footprint
from tests.export.files import INPUT_SIZE, write_network

MIB = 2**20


def write_wide(path, *, width):
    """Write one matrix product of 3 * 16 * 16 inputs to `width` logits: 3 KiB of weights each."""
    weights = np.random.default_rng(0).standard_normal((768, width), dtype=np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["images"], ["flat"]),
            helper.make_node("MatMul", ["flat", "weights"], ["logits"]),
        ],
        "wide",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", *INPUT_SIZE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", width])],
        [numpy_helper.from_array(weights, "weights")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def test_the_memory_is_the_models_own(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PROCESSES", 1)
    kept = bytearray(100 * MIB)  # of this process, which must not count
    kept[::4096] = b"x" * len(kept[::4096])
    small = footprint(write_network(tmp_path / "small.onnx"), input_size=INPUT_SIZE)
    large = footprint(write_wide(tmp_path / "large.onnx", width=8_000), input_size=INPUT_SIZE)
    weights = 768 * 8_000 * 4
    assert 0 < small.loaded_bytes <= small.peak_bytes < 40 * MIB
    assert weights - MIB < large.loaded_bytes <= large.peak_bytes < 4 * weights
    assert small.load_seconds > 0
    assert large.load_seconds > 0


def test_the_median_of_three_processes_counts(tmp_path, monkeypatch):
    answers = iter([(1.0, 10, 30), (3.0, 30, 20), (2.0, 20, 10)])
    asked = []

    def run(words, **rest):
        asked.append(words)
        seconds, loaded, peak = next(answers)
        text = f'noise\n{{"load_seconds": {seconds}, "loaded_bytes": {loaded}, "peak_bytes": {peak}}}\n'
        return module.subprocess.CompletedProcess(words, 0, text, "")

    monkeypatch.setattr(module.subprocess, "run", run)
    found = footprint(tmp_path / "a.onnx", input_size=(3, 8, 8), batch=4, threads=2)
    assert found == Footprint(load_seconds=2.0, loaded_bytes=20, peak_bytes=20)
    assert [words[-1] for words in asked] == [f'["{tmp_path}/a.onnx", [3, 8, 8], 4, 2, "cpu"]'] * 3


def test_a_process_that_fails_is_told_with_its_reason(tmp_path):
    with pytest.raises(ModelError, match=r"a process that opens .*none\.onnx failed \(.*none\.onnx.*\)\. Is there"):
        footprint(tmp_path / "none.onnx", input_size=INPUT_SIZE)


def test_where_a_peak_cannot_be_forgotten_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    found = module._measure(write_network(tmp_path / "a.onnx"), INPUT_SIZE, 1, 1, "cpu")
    assert found.peak_bytes is None
    assert found.load_seconds > 0
    text = '{"load_seconds": 1.0, "loaded_bytes": 10, "peak_bytes": null}'
    answer = module.subprocess.CompletedProcess([], 0, text, "")
    monkeypatch.setattr(module.subprocess, "run", lambda words, **rest: answer)
    assert footprint(tmp_path / "a.onnx", input_size=INPUT_SIZE) == Footprint(
        load_seconds=1.0, loaded_bytes=10, peak_bytes=None
    )
