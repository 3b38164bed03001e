"""What a server tells of itself: Prometheus metrics, an access log of one JSON object a line, and Server-Timing."""

import itertools
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from dsimg_export.server.stages import Stages

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
SHARES = tuple(tenth / 10 for tenth in range(1, 11))
PROCESS = secrets.token_hex(10)  # begins the ids that this process gives
_numbers = itertools.count(1)
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class Telemetry:
    """The metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(name, about, labels, registry=registry)

        def histogram(name: str, about: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(name, about, labels, buckets=buckets, registry=registry)

        self.requests = counter("dsimg_requests", "Requests.", "route", "status")
        self.errors = counter("dsimg_errors", "Requests that were refused, by the reason.", "kind")
        self.images = counter("dsimg_images", "Images, by their end: answered, bad, not finite.", "model", "outcome")
        self.decoded = counter(
            "dsimg_decoded_images",
            "Images that could be read: Pillow's names of their files' format and mode, and whether EXIF turned them.",
            "model",
            "format",
            "mode",
            "rotated",
        )
        self.seconds = histogram("dsimg_request_seconds", "From a request's head to its answer.", SECONDS, "route")
        self.stage_seconds = histogram("dsimg_stage_seconds", "A request in each stage.", SECONDS, "model", "stage")
        self.batches = histogram("dsimg_batch_images", "Images a call of the network.", BATCHES, "model")
        self.confidence = histogram("dsimg_confidence", "The best class's probability.", SHARES, "model")
        self.ready = Gauge("dsimg_ready", "Whether requests are taken.", registry=registry)
        self.info = Gauge(
            "dsimg_model_info", "1 for each model that is served.", ("model", "version"), registry=registry
        )

    def watch(self, name: str, help_text: str, values: Callable[[], Mapping[str, float]]) -> None:
        """Add a gauge by model whose values are asked for when the metrics are read."""

        class Asked(Collector):
            def collect(self):  # type: ignore[no-untyped-def]
                family = GaugeMetricFamily(name, help_text, labels=["model"])
                for model, value in values().items():
                    family.add_metric([model], value)
                yield family

        self.registry.register(Asked())

    def text(self) -> bytes:
        """Return the metrics as Prometheus reads them."""
        return generate_latest(self.registry)


def server_timing(stages: Stages) -> str:
    """Return the value of a Server-Timing header."""
    parts = [f"{name};dur={1000 * seconds:.2f}" for name, seconds in stages.seconds.items()]
    return ", ".join([*parts, f'batch;desc="{stages.batch}"'] if stages.batch else parts)


def request_id_of(given: str | None) -> str:
    """Return the client's request id where it is harmless in a log and a header, else a new one."""
    return given if given and REQUEST_ID.fullmatch(given) else f"{PROCESS}{next(_numbers):012x}"


def log_line(**fields: object) -> str:
    """Return one line of the access log. JSON escapes what would forge another."""
    return json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **fields})
