"""ONNX Runtime sessions: open one, measure several side by side, see what one really runs."""

import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from dsimg.errors import ConfigError, ModelError

INPUT = "images"
OUTPUT = "logits"
Provider = Literal["cpu", "cuda", "tensorrt"]
PROVIDERS: dict[Provider, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
WARM_UP_ROUNDS = 5  # the first runs allocate, plan memory and fill caches
MIN_REPEATS = 10

# What the optimised graph calls its convolutions and matrix products.
INT8_OPS = frozenset(
    (
        *("QLinearConv", "ConvInteger", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat"),
        *("QGemm", "DynamicQuantizeMatMul"),
    )
)
FLOAT_OPS = frozenset(("Conv", "FusedConv", "NhwcFusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul"))
ERRORS_ONLY = 3  # ONNX Runtime's log level


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Seconds of one run of a session."""

    median: float
    p99: float
    cpu: float  # median processor time of the calling thread: with one thread, the median on a core without other work
    repeats: int


@dataclass(frozen=True, kw_only=True)
class Int8Share:
    """How many of a session's convolutions and matrix products compute in int8."""

    int8: int
    total: int


def open_session(path: Path, *, threads: int = 1, provider: Provider = "cpu") -> onnxruntime.InferenceSession:
    """Return a session with `threads` threads that runs what the file says, on the provider asked for or not at all.

    Its threads do not spin between runs, where they would take the cores from decoding or from another session.
    Raises ModelError: no such file, not a whole ONNX file, an operator that this ONNX Runtime does not know.
    Raises ConfigError: a provider that this machine does not have.
    """
    return _open(path, _options(threads), provider)


def latency(
    files: Mapping[str, Path],
    *,
    input_size: tuple[int, int, int],
    batch: int = 1,
    threads: int = 1,
    provider: Provider = "cpu",
    seconds: float = 2.0,
) -> dict[str, Latency]:
    """Return the latency of each of several ONNX files on noise of (batch, *input_size), about `seconds` for each.

    The sessions run in turn (A B C, B A C, ...), so that what else the machine does meets them alike and their ratios
    hold even where the figures drift; each round in another order, because a fixed one falls into step with the
    scheduler of a busy machine, which then interrupts always the same. Raises ModelError as `open_session`.
    """
    sessions = {name: open_session(path, threads=threads, provider=provider) for name, path in files.items()}
    random = np.random.default_rng(0)
    images = {name: _noise(session, random, batch, input_size) for name, session in sessions.items()}
    times: dict[str, list[float]] = {name: [] for name in sessions}
    cpu_times: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(WARM_UP_ROUNDS):
        for name, session in sessions.items():
            session.run([OUTPUT], {INPUT: images[name]})
    rounds = 0
    end = time.perf_counter() + seconds * len(sessions)
    while rounds < MIN_REPEATS or time.perf_counter() < end:
        for name in random.permutation(list(sessions)).tolist():
            start, cpu_start = time.perf_counter(), time.thread_time()
            sessions[name].run([OUTPUT], {INPUT: images[name]})
            cpu_times[name].append(time.thread_time() - cpu_start)
            times[name].append(time.perf_counter() - start)
        rounds += 1
    return {
        name: Latency(
            median=float(np.median(times[name])),
            p99=float(np.percentile(times[name], 99)),
            cpu=float(np.median(cpu_times[name])),
            repeats=rounds,
        )
        for name in sessions
    }


def int8_share(path: Path) -> Int8Share:
    """Return what a session of the file runs in int8, from the graph that ONNX Runtime makes of it.

    The file alone does not say: a quantized operator whose neighbours do not fit runs in float between conversions.
    Raises ModelError as `open_session`.
    """
    with tempfile.TemporaryDirectory(prefix="dsimg-") as folder:
        optimised = Path(folder) / "optimised.onnx"
        options = _options(1)
        options.optimized_model_filepath = str(optimised)
        _open(path, options, "cpu")
        counts = Counter(node.op_type for node in onnx.load(optimised).graph.node)
    int8 = sum(counts[op] for op in INT8_OPS)
    return Int8Share(int8=int8, total=int8 + sum(counts[op] for op in FLOAT_OPS))


def _options(threads: int) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = ERRORS_ONLY
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # It quantizes what a file keeps in float on purpose, when the session loads: onnxruntime #24537.
    options.add_session_config_entry("optimization.disable_specified_optimizers", "WeightBiasQuantization")
    return options


def takes_pixels(session: onnxruntime.InferenceSession) -> bool:
    """Tell whether a session takes pixels (N, H, W, 3) uint8, and not normalised images (N, 3, H, W) float32."""
    return bool(session.get_inputs()[0].type == "tensor(uint8)")


def _noise(
    session: onnxruntime.InferenceSession, random: np.random.Generator, batch: int, input_size: tuple[int, int, int]
) -> NDArray[Any]:
    channels, height, width = input_size
    if takes_pixels(session):
        return random.integers(0, 256, (batch, height, width, channels), dtype=np.uint8)
    return random.standard_normal((batch, *input_size), dtype=np.float32)


def _open(path: Path, options: onnxruntime.SessionOptions, provider: Provider) -> onnxruntime.InferenceSession:
    if not path.is_file():
        raise ModelError(f"{path} does not exist. Give the path of an ONNX file.")
    name = PROVIDERS[provider]
    if provider != "cpu":
        # Otherwise ONNX Runtime would take the CPU without a word, for the whole network or for parts of it.
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        if name not in onnxruntime.get_available_providers():
            raise ConfigError(
                f"--provider {provider}: this ONNX Runtime {onnxruntime.__version__} has no {name}. "
                "pip install 'dsimg[serve-gpu]' in place of 'dsimg[serve]', or give --provider cpu."
            )
    try:
        session = onnxruntime.InferenceSession(path, options, providers=[name])
    except Exception as error:  # ONNX Runtime's own types have no public base
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        if provider != "cpu":
            raise ConfigError(
                f"--provider {provider}: ONNX Runtime cannot run {path} there ({reason}). Is there a GPU with its "
                "driver, CUDA and cuDNN? --provider cpu runs anywhere."
            ) from error
        raise ModelError(
            f"{path} cannot be run by ONNX Runtime {onnxruntime.__version__} ({reason}). Copy or export it again."
        ) from error
    if session.get_providers()[0] != name:
        raise ConfigError(
            f"--provider {provider}: ONNX Runtime took {session.get_providers()[0]}. Give --provider cpu."
        )
    return session
