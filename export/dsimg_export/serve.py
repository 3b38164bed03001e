"""Serve exported runs over HTTP: image in, labels out, and the Open Inference Protocol v2.

dsimg serve --source RUN --port 8000

A run is verified before it is served: its golden images have to give here what they gave where it was made.
"""

import asyncio
import contextlib
import functools
import ipaddress
import math
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from dsimg import cli
from dsimg.console import bytes_text, ms_text
from dsimg.errors import ConfigError, RunError
from dsimg.machine import all_cores
from dsimg.preprocess import MAX_PIXELS
from dsimg.run import Run
from dsimg.runtime import Provider, require_onnxruntime
from dsimg_export.server.app import build_app
from dsimg_export.server.connection import bounded_protocol
from dsimg_export.server.listening import Answering, bind, check_certificate
from dsimg_export.server.model import Model, Plan, load, open_pool
from dsimg_export.server.pool import Pool
from dsimg_export.server.reload import hash_of, watch
from dsimg_export.server.state import Limits, Server
from dsimg_export.server.tune import MOST_SECONDS, Load, Setting, parse_goal, settings, tune
from dsimg_export.verify import VerifyConfig, verify_but

if TYPE_CHECKING:  # an extra
    from dsimg_export.server.tracing import Tracing

TUNED = ("workers", "threads", "decode_threads", "max_batch", "delay_ms")  # what --tune finds
TRACES_SECONDS = (1.0, 5.0)  # in which the last traces are sent: what is left of the grace, within these
KEEP_ALIVE = 75  # seconds that an idle connection stays open: longer than the proxies in front of it keep theirs


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The flags of `dsimg serve`."""

    source: tuple[Path, ...]
    """The exported runs to serve, each under the name of its folder; /predict asks the first."""
    host: str = "127.0.0.1"
    """The address to listen on. 0.0.0.0 lets other machines in: give --api_key_file then."""
    port: int = 8000
    """The port to listen on; 0 takes a free one, which is printed."""
    provider: Provider = "cpu"
    """Where ONNX Runtime runs the files; one that is not there is an error."""
    tune: str | None = None
    """What the slowest of a hundred may take, as p99=50ms: find --workers, --threads, --decode_threads, --max_batch and
    --delay_ms that answer most within it, by measuring the first run on its golden images for about two minutes."""
    workers: int | None = None
    """Calls of each network at a time. Default: the cores over --threads; on a GPU 1."""
    threads: int = 1
    """Threads of ONNX Runtime in each call."""
    lone_threads: int | None = None
    """Threads of a call beside which nothing runs or waits; for it the network is in memory a second time. Default: one
    a core; not on a GPU, nor where --threads are as many."""
    decode_threads: int | None = None
    """Images decoded at a time. On a CPU the threads that decode also call the networks: as many as the larger of this
    and --workers; on a GPU there are --workers more. Default: one a core."""
    pin: bool = True
    """While all threads that decode and call networks are busy, keep each to a core of its own, where there are as many
    as cores. --no_pin leaves it to the system."""
    max_batch: int = 8
    """Images a call at most."""
    delay_ms: float = 0.0
    """How long the oldest image may wait for others while a worker is free."""
    max_queue: int = 256
    """Images that may wait for each network at most; what comes then is refused with 503."""
    deadline_ms: float = 5000.0
    """When an answer is due, counted from when the body is there; a client asks for less by X-Request-Timeout, in
    seconds. What cannot be answered in time is refused at once with 503 and Retry-After."""
    max_body_mib: float = 32.0
    """How large a request may be; also what it may hold once it is unpacked."""
    max_bodies_mib: float | None = None
    """How large the bodies of all requests in hand may be together; what comes then is refused with 503. Default: eight
    times --max_body_mib."""
    max_connections: int = 1000
    """Connections at a time; what comes then is refused with 503."""
    max_images: int = 64
    """Images a request at most."""
    max_pixels: int = MAX_PIXELS
    """Pixels an image at most, by its header: a larger one is refused before any is decoded."""
    head_seconds: float = 10.0
    """How long a request's head may take to arrive."""
    body_seconds: float = 30.0
    """How long its body may."""
    api_key_file: Path | None = None
    """A file of keys, one a line: requests need one, as `Authorization: Bearer KEY` or `X-API-Key: KEY`."""
    ssl_certfile: Path | None = None
    """With --ssl_keyfile: serve HTTPS with this certificate."""
    ssl_keyfile: Path | None = None
    """The certificate's key."""
    reload: bool = False
    """Watch the runs: one that is made anew, or a link that points to another, is verified and takes the old one's
    place without a lost request; or is refused, and the old one goes on."""
    access_log: bool = False
    """Write a JSON object a line for each request to standard output."""
    otel: bool = False
    """Send traces of the requests as OpenTelemetry's environment variables say: OTEL_EXPORTER_OTLP_ENDPOINT,
    OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, ... Needs: pip install 'dsimg[otel]'."""
    drain_seconds: float = 0.0
    """After SIGTERM: go on answering for so long while saying that it is not ready, so that a balancer looks away."""
    grace_seconds: float = 30.0
    """After that: how long what was accepted may take."""

    def __post_init__(self) -> None:
        if self.tune is not None:
            parse_goal(self.tune)
            if self.provider != "cpu":
                raise ConfigError("--tune shares out the cores of a CPU. Leave it out with --provider.")
            given = [name for name in TUNED if getattr(self, name) != ServeConfig.__dataclass_fields__[name].default]
            if given:
                raise ConfigError(f"--tune finds --{given[0]} itself. Leave out one of the two.")
        if not self.source:
            raise ConfigError("serve was given no run. Give --source RUN.")
        for name in (
            "workers",
            "threads",
            "lone_threads",
            "decode_threads",
            "max_batch",
            "max_queue",
            "max_images",
            "max_pixels",
            "max_connections",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name} is {value}; it must be at least 1.")
        for name in ("deadline_ms", "max_body_mib", "head_seconds", "body_seconds", "grace_seconds"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"--{name} is {value}; it must be a number above 0.")
        if self.max_bodies_mib is not None and not self.max_body_mib <= self.max_bodies_mib < math.inf:
            raise ConfigError(
                f"--max_bodies_mib is {self.max_bodies_mib:g}; it must be at least --max_body_mib,"
                f" {self.max_body_mib:g}."
            )
        for name in ("delay_ms", "drain_seconds"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"--{name} is {value}; it must be 0 or more.")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port is {self.port}; it must be from 0 to 65535.")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("--ssl_certfile and --ssl_keyfile go together; give both.")


def serve(config: ServeConfig) -> None:
    """Serve exported runs over HTTP until SIGTERM or Ctrl-C."""
    with _ended_by_sigterm():
        _serve(config)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """End with code 0 at SIGTERM, which the first process of a container would not even notice."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(sig: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve(config: ServeConfig) -> None:
    require_onnxruntime("serving")
    keys = _keys(config.api_key_file)
    check_certificate(config.ssl_certfile, config.ssl_keyfile)
    tracing = _tracing() if config.otel else None
    listener = bind(config.host, config.port)
    named = _named(config.source)
    if config.tune is not None:
        config = _tuned(config, parse_goal(config.tune))
    server = open_server(config, keys=keys)
    server.tracing = tracing
    terminal = cli.context().terminal
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    shown = f"[{host}]" if ":" in host else host
    url = f"{scheme}://{shown}:{port}"
    terminal.table("serving", _rows(config, server, url))
    if not keys and not _is_loopback(host):
        terminal.warn("other machines may ask without a key. Give --api_key_file.")
    beside = []
    if config.reload:
        beside.append(
            functools.partial(
                watch,
                server,
                named,
                load=functools.partial(_load, config, server),
                say=terminal.say,
            )
        )
    answering = Answering(
        uvicorn.Config(build_app(server), **http_options(config, server)),
        server=server,
        drain=config.drain_seconds,
        url=url,
        beside=beside,
    )
    with asyncio.Runner(loop_factory=answering.config.get_loop_factory()) as runner:  # uvloop where it is there
        runner.run(answering.serve(sockets=[listener]))
    if tracing is not None:
        with contextlib.suppress(KeyboardInterrupt, SystemExit):  # asked to end again: without the last traces
            least, most = TRACES_SECONDS
            if not tracing.close(min(most, max(least, answering.grace_left))):
                terminal.say("the last traces could not be sent in time.")
    if answering.cut_off:
        terminal.say(f"requests that were accepted and cut off: {answering.cut_off}.")
        raise SystemExit(1)
    terminal.say("every request that was accepted has been answered.")


def open_server(config: ServeConfig, *, keys: tuple[bytes, ...] = ()) -> Server:
    """Verify the runs, load them, warm them up; return what the application answers with. Raises DsimgError."""
    limits = Limits(
        body_bytes=int(config.max_body_mib * 2**20),
        bodies_bytes=int((config.max_bodies_mib or 8 * config.max_body_mib) * 2**20),
        body_seconds=config.body_seconds,
        images=config.max_images,
        deadline=config.deadline_ms / 1000,
    )
    terminal = cli.context().terminal
    server = Server(
        models={},
        pool=open_pool(_plan(config), config.decode_threads or all_cores(), pin=config.pin),
        limits=limits,
        keys=keys,
        say=terminal.say,
        access_log=terminal.data if config.access_log else None,
    )
    for name, path in _named(config.source).items():
        server.models[name] = _load(config, server, name, path)
    server.pool.decode_seconds = next(iter(server.models.values())).decode_seconds()
    server.telemetry.watch(
        "dsimg_queue_images", "Images that wait.", lambda: {m.name: m.batcher.waiting for m in server.models.values()}
    )
    return server


def _tuned(config: ServeConfig, goal: float) -> ServeConfig:
    """Return the flags with those that measuring found. Raises DsimgError."""
    path = config.source[0]
    _verify(config, path)  # measuring takes minutes
    tried = list(settings(all_cores(), goal))
    measured: list[Plan] = []
    terminal = cli.context().terminal

    def say(found: Load) -> None:
        terminal.say(
            f"{_setting_text(found.setting)}: {found.images_per_second:.0f} a second, p99 {ms_text(found.p99)}"
        )

    def load_with(plan: Plan, pool: Pool) -> Model:
        measured.append(plan)
        return load(path, "tuned", replace(plan, lone_threads=_lone_threads(config, plan.threads)), pool)

    terminal.say(f"measuring at most {len(tried)} settings, for about {MOST_SECONDS / 60:g} minutes")
    found = tune(goal, tried, load=load_with, pin=config.pin, say=say)
    chosen = found.setting
    terminal.table(
        "tuned",
        [
            ("goal", f"p99 of at most {ms_text(goal)}, without HTTP"),
            ("measured", f"{len(measured)} of {len(tried)} settings"),
            (
                "found",
                f"{found.images_per_second:.0f} images a second at p99 {ms_text(found.p99)}, {found.clients} at a time",
            ),
            ("flags", _setting_text(chosen)),
        ],
    )
    return replace(
        config,
        tune=None,
        workers=chosen.workers,
        threads=chosen.threads,
        decode_threads=chosen.decode_threads,
        max_batch=chosen.max_batch,
        delay_ms=1000 * chosen.delay,
    )


def _setting_text(setting: Setting) -> str:
    return (
        f"--workers {setting.workers} --threads {setting.threads} --decode_threads {setting.decode_threads} "
        f"--max_batch {setting.max_batch} --delay_ms {1000 * setting.delay:g}"
    )


def _plan(config: ServeConfig) -> Plan:
    """Return how networks are run: on a CPU all cores are shared out to calls."""
    return Plan(
        workers=config.workers or (max(1, all_cores() // config.threads) if config.provider == "cpu" else 1),
        threads=config.threads,
        lone_threads=_lone_threads(config, config.threads),
        max_batch=config.max_batch,
        max_delay=config.delay_ms / 1000,
        max_queue=config.max_queue,
        provider=config.provider,
    )


def _lone_threads(config: ServeConfig, threads: int) -> int | None:
    """Return the threads of a lone call; None where it needs no session of its own."""
    lone = config.lone_threads or (all_cores() if config.provider == "cpu" else threads)
    return None if lone == threads else lone


def _named(sources: Sequence[Path]) -> dict[str, Path]:
    """Return the runs by the names of their folders: of a link that of the link, which stays when it is turned.

    Raises DsimgError where one is not there: known before another is verified.
    """
    found: dict[str, Path] = {}
    for path in sources:
        name = path.absolute().name or path.resolve().name
        if name in found:
            raise ConfigError(f"--source names two folders called {name}; rename one, for a model is asked for by it.")
        Run.open(path)
        found[name] = path
    return found


def _verify(config: ServeConfig, path: Path) -> None:
    """Raise DsimgError where a run does not say here what it said where it was made."""
    # Its parent would be one more network in memory, and proves nothing about what is served.
    verify_but(VerifyConfig(source=path, provider=config.provider, threads=config.threads), without=("parent",))


def _load(config: ServeConfig, server: Server, name: str, path: Path) -> Model:
    """Verify a run and load it. Raises DsimgError; RunError also where it changes meanwhile."""
    path = path.resolve()  # a link may be turned
    before = hash_of(path)
    _verify(config, path)
    batches = server.telemetry.batches.labels(name)
    kinds = server.telemetry.decoded
    model = load(
        path,
        name,
        _plan(config),
        server.pool,
        max_pixels=config.max_pixels,
        decoded=lambda one: kinds.labels(name, one.format, one.mode, "yes" if one.rotated else "no").inc(),
        observe=lambda images, seconds: batches.observe(images),
    )
    if hash_of(path) != before:
        raise RunError(
            f"{path} changed while it was loaded. Make a run in a folder of its own, then turn a link to it."
        )
    server.telemetry.info.labels(name, model.version).set(1)
    return model


def http_options(config: ServeConfig, server: Server) -> dict[str, Any]:
    """Return uvicorn's settings."""
    options: dict[str, Any] = {}
    if config.ssl_certfile is not None:
        options = {"ssl_certfile": str(config.ssl_certfile), "ssl_keyfile": str(config.ssl_keyfile)}
    return {
        "http": bounded_protocol(server, head_seconds=config.head_seconds, connections=config.max_connections),
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "log_level": "error",
        "access_log": False,
        "server_header": False,
        "date_header": False,  # the application's answers have one; uvicorn would look at the clock all the time
        "proxy_headers": False,  # a header that any client may write does not name it
        "timeout_keep_alive": KEEP_ALIVE,
        "timeout_graceful_shutdown": math.ceil(config.grace_seconds),
        **options,
    }


def _tracing() -> "Tracing":
    """Return what sends traces. Raises ConfigError: before anything is loaded."""
    try:
        from dsimg_export.server.tracing import open_tracing  # an extra
    except ModuleNotFoundError as error:
        raise ConfigError("--otel needs OpenTelemetry: pip install 'dsimg[otel]'.") from error
    return open_tracing(cli.context().terminal.say)


def _keys(path: Path | None) -> tuple[bytes, ...]:
    """Return the keys in a file. Raises ConfigError: it cannot be read, or holds none."""
    if path is None:
        return ()
    try:
        keys = tuple(line.strip() for line in path.read_bytes().splitlines() if line.strip())
    except OSError as error:
        raise ConfigError(
            f"cannot read --api_key_file {path}: {error.strerror}. Give a file with a key a line."
        ) from error
    if not keys:
        raise ConfigError(f"--api_key_file {path} holds no key. Write one a line.")
    return keys


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _rows(config: ServeConfig, server: Server, url: str) -> list[tuple[str, str]]:
    first = next(iter(server.models.values()))
    plan, pool, batcher = first.plan, server.pool, first.batcher
    return [
        *[
            ("model", f"{m.name}: {m.served.run.model['arch']}, {len(m.classes)} classes")
            for m in server.models.values()
        ],
        (
            "threads",
            f"{all_cores()} cores: {plan.workers} calls at a time with {plan.threads} each"
            + ("" if plan.lone_threads is None else f", a lone one with {plan.lone_threads}")
            + f", at most {pool.decode_threads} images decoded at a time"
            + ("; each thread on a core of its own while all are busy" if pool.pinned else ""),
        ),
        (
            "batches",
            f"at most {batcher.max_batch} images, waiting at most {config.delay_ms:g} ms; {plan.max_queue} may queue",
        ),
        (
            "an image",
            f"{ms_text(pool.decode_seconds)} to decode (golden images), {ms_text(batcher.seconds_per_image)} in the "
            f"network: about {1 / batcher.wait_for(1, decodes=True):.0f} a second",
        ),
        (
            "limits",
            f"{bytes_text(server.limits.body_bytes)} and {config.max_images} images a request, an answer in "
            f"{config.deadline_ms:g} ms or 503",
        ),
        ("keys", f"{len(server.keys)}, of {config.api_key_file}" if server.keys else "none needed"),
        *([] if server.tracing is None else [("traces", f"to {server.tracing.goes_to}")]),
        ("try", f"curl --data-binary @photo.jpg {url}/predict"),
    ]


if __name__ == "__main__":
    cli.run(serve)
