"""ONNX Runtime sessions: open one, measure several side by side, see what one really runs."""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from dsimg.errors import ConfigError, ModelError
from dsimg.runtime import Provider

Precision = Literal["fp32", "fp16", "int8"]

INPUT = "images"
OUTPUT = "logits"
PROVIDERS: dict[Provider, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
WARM_UP_ROUNDS = 5  # the first runs allocate, plan memory and fill caches
MIN_REPEATS = 10
# Before each call that counts: what ran since has put its own weights into the caches, which nothing does to a session
# that is served alone. Among 24 files a small int8 network took 1.5 times as long without this (docs/log.md).
UNCOUNTED = 2
SHORT = 0.1  # seconds: in a longer call filling the caches hardly shows

# What the optimised graph calls its convolutions and matrix products.
INT8_OPS = frozenset(
    (
        *("QLinearConv", "ConvInteger", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat"),
        *("QGemm", "DynamicQuantizeMatMul"),
    )
)
FLOAT_OPS = frozenset(("Conv", "FusedConv", "NhwcFusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul"))
INT8_MARKS = ("quantize", "integer", "qlinear", "qgemm")  # in the names of operators that take or give 8 bits
ERRORS_ONLY = 3  # ONNX Runtime's log level


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Seconds of one run of a session."""

    median: float
    p99: float
    cpu: float  # median processor time of the calling thread: with one thread, the median on a core without other work
    repeats: int


@dataclass(frozen=True)
class Times:
    """Seconds of each of R rounds."""

    wall: NDArray[np.float64]  # (R,)
    cpu: NDArray[np.float64]  # (R,) processor time of the calling thread


@dataclass(frozen=True, kw_only=True)
class Int8Share:
    """How many of a session's convolutions and matrix products compute in int8."""

    int8: int
    total: int


def open_session(
    path: Path,
    *,
    threads: int = 1,
    provider: Provider = "cpu",
    without: Sequence[str] = (),
    adjust: Callable[[onnxruntime.SessionOptions], None] | None = None,
) -> onnxruntime.InferenceSession:
    """Return a session with `threads` threads that runs what the file says, on the provider asked for or not at all.

    Its threads do not spin between runs, where they would take the cores from decoding or from another session.
    without: optimisers of ONNX Runtime's that are not to run; adjust: changes the options before the session is made.
    Raises ModelError: no such file, not a whole ONNX file, an operator that this ONNX Runtime does not know.
    Raises ConfigError: a provider that this machine does not have, or TensorRT for an int8 file.
    """
    options = _options(threads, without)
    if adjust is not None:
        adjust(options)
    return _open(path, options, provider)


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

    The sessions run in turn (A B C, B A C, ...), see `in_turn`. Raises ModelError as `open_session`.
    """
    sessions = {name: open_session(path, threads=threads, provider=provider) for name, path in files.items()}
    steps = {
        name: repeatable(session, noise_for(session, batch, input_size), provider) for name, session in sessions.items()
    }
    return {
        name: Latency(
            median=float(np.median(times.wall)),
            p99=float(np.percentile(times.wall, 99)),
            cpu=float(np.median(times.cpu)),
            repeats=len(times.wall),
        )
        for name, times in in_turn(steps, seconds=seconds).items()
    }


def in_turn(steps: Mapping[str, Callable[[], object]], *, seconds: float) -> dict[str, Times]:
    """Return how long each of several calls takes, all of them once a round, about `seconds` for each in all.

    What else the machine does meets them alike, so that their ratios hold even where the figures drift. Each round has
    another order: a fixed one falls into step with the scheduler of a busy machine, which then interrupts always the
    same. Where there are several, each runs UNCOUNTED times before it counts, if it is SHORT; `seconds` are over all.
    """
    random = np.random.default_rng(0)
    wall: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    fastest = dict.fromkeys(steps, float("inf"))
    for _ in range(WARM_UP_ROUNDS):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            fastest[name] = min(fastest[name], time.perf_counter() - start)
    uncounted = {name: UNCOUNTED if len(steps) > 1 and fastest[name] < SHORT else 0 for name in steps}
    rounds = 0
    end = time.perf_counter() + seconds * len(steps)
    while rounds < MIN_REPEATS or time.perf_counter() < end:
        for name in random.permutation(list(steps)).tolist():
            for _ in range(uncounted[name]):
                steps[name]()
            start, cpu_start = time.perf_counter(), time.thread_time()
            steps[name]()
            cpu[name].append(time.thread_time() - cpu_start)
            wall[name].append(time.perf_counter() - start)
        rounds += 1
    return {name: Times(np.array(wall[name]), np.array(cpu[name])) for name in steps}


def repeatable(
    session: onnxruntime.InferenceSession, images: NDArray[Any], provider: Provider = "cpu"
) -> Callable[[], None]:
    """Return a call that runs a session on these images. On a GPU, input and output stay in its memory (IO binding), so
    that a call takes what the network takes, without copies over the bus."""
    device = "cpu" if provider == "cpu" else "cuda"
    given = onnxruntime.OrtValue.ortvalue_from_numpy(images, device, 0)
    binding = session.io_binding()
    binding.bind_output(OUTPUT, device, 0)

    def step() -> None:
        binding.bind_ortvalue_input(INPUT, given)  # each time, as a server does; it also keeps the images alive
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    return step


def operators_run(path: Path, provider: Provider = "cpu") -> Counter[str]:
    """Return how many of each operator a session of the file runs, from the graph that ONNX Runtime makes of it.

    The file alone does not say: a quantized operator whose neighbours do not fit runs in float between conversions.
    TensorRT's part is one engine, which cannot be written. Raises ModelError and ConfigError as `open_session`.
    """
    with tempfile.TemporaryDirectory(prefix="dsimg-") as folder:
        optimised = Path(folder) / "optimised.onnx"
        options = _options(1)
        options.optimized_model_filepath = str(optimised)
        _open(path, options, provider)
        return Counter(node.op_type for node in onnx.load(optimised).graph.node)


def int8_share(counts: Counter[str]) -> Int8Share:
    """Return how many of the convolutions and matrix products among operators (see `operators_run`) are in int8."""
    int8 = sum(counts[op] for op in INT8_OPS)
    return Int8Share(int8=int8, total=int8 + sum(counts[op] for op in FLOAT_OPS))


def _options(threads: int, without: Sequence[str] = ()) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = ERRORS_ONLY
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # The first quantizes what a file keeps in float on purpose, when the session loads: onnxruntime #24537.
    names = ";".join(("WeightBiasQuantization", *without))
    options.add_session_config_entry("optimization.disable_specified_optimizers", names)
    return options


def precision_of(model: onnx.ModelProto) -> Precision:
    """Return what an ONNX model computes in: int8 where any of its operators takes or gives 8 bits, if only as weights;
    fp16 where it has weights in half precision, of either kind."""
    if any(mark in node.op_type.lower() for node in model.graph.node for mark in INT8_MARKS):
        return "int8"
    half = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    return "fp16" if any(tensor.data_type in half for tensor in model.graph.initializer) else "fp32"


def takes_pixels(session: onnxruntime.InferenceSession) -> bool:
    """Tell whether a session takes pixels (N, H, W, 3) uint8, and not normalised images (N, 3, H, W) float32."""
    return bool(session.get_inputs()[0].type == "tensor(uint8)")


def noise_for(session: onnxruntime.InferenceSession, batch: int, input_size: tuple[int, int, int]) -> NDArray[Any]:
    """Return noise as a session takes it: pixels (batch, H, W, 3) or normalised images (batch, 3, H, W)."""
    random = np.random.default_rng(0)
    channels, height, width = input_size
    if takes_pixels(session):
        return random.integers(0, 256, (batch, height, width, channels), dtype=np.uint8)
    return random.standard_normal((batch, *input_size), dtype=np.float32)


def load_model(path: Path) -> onnx.ModelProto:
    """Read an ONNX file. Raises ModelError: not a whole one."""
    try:
        return onnx.load(path)
    except Exception as error:  # protobuf's own has no public name
        raise ModelError(f"{path} is not a whole ONNX file ({error}). Copy or export it again.") from error


def _open(path: Path, options: onnxruntime.SessionOptions, provider: Provider) -> onnxruntime.InferenceSession:
    if not path.is_file():
        raise ModelError(f"{path} does not exist. Give the path of an ONNX file.")
    name = PROVIDERS[provider]
    if provider == "tensorrt" and precision_of(load_model(path)) == "int8":
        raise ConfigError(
            f"--provider tensorrt: {path} is in int8 with zero points, and TensorRT takes only symmetric int8. Give "
            "the exported run that it was made from, or --provider cuda."
        )
    if provider != "cpu":
        # Otherwise ONNX Runtime would take the CPU without a word, for the whole network or for parts of it.
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        if name not in onnxruntime.get_available_providers():
            raise ConfigError(
                f"--provider {provider}: this ONNX Runtime {onnxruntime.__version__} has no {name}. "
                "pip install 'dsimg[serve-gpu]' in place of 'dsimg[serve]', or give --provider cpu."
            )
    try:
        # Without enable_fallback=0 it would try again on the CPU, and hide why the provider failed.
        session = onnxruntime.InferenceSession(path, options, providers=[name], enable_fallback=0)
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
