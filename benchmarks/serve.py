"""dsimg serve beside plain FastAPI, LitServe and BentoML, and beside decoding and network without HTTP.

    python benchmarks/serve.py --source RUN --images DIR [--clients 1 8 32] [--seconds 8] [--rounds 3]

Every server runs the same ONNX file on the same images, with the same steps; those that are not measured stand still
(SIGSTOP). Clients run in a process of their own, each with one connection and one image at a time. The peers are
measured where they can be imported (pip install fastapi uvicorn litserve bentoml), and are written as their
documentation does it: FastAPI with a thread pool, LitServe and BentoML with batches of at most 8. The ceiling decodes
with simplejpeg and cykooz-resizer where they are there, and runs batches of 8, a thread a core.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsimg.folder import images_below
from dsimg.machine import all_cores, free_port
from dsimg.preprocess import decode, normalise, resize_and_crop
from dsimg.run import Run
from dsimg_export.served import Served, open_served

COMMON = """
import io, sys
import numpy as np, onnxruntime
from PIL import Image
SIDE, SHORT = {side}, {short}
MEAN, STD = np.array({mean}, np.float32), np.array({std}, np.float32)
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = {threads}
session = onnxruntime.InferenceSession({model!r}, options, providers=["CPUExecutionProvider"])
def prepare(data):
    image = Image.open(io.BytesIO(data)).convert("RGB")
    scale = SHORT / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
    left, top = (image.width - SIDE) // 2, (image.height - SIDE) // 2
    pixels = np.asarray(image.crop((left, top, left + SIDE, top + SIDE)), np.float32) / 255
    return ((pixels - MEAN) / STD).transpose(2, 0, 1)
def best(logits):
    return [{{"class": int(k), "logit": float(logits[k])}} for k in np.argsort(-logits)[:5]]
"""
PEERS = {
    "fastapi": """
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
import uvicorn
app = FastAPI()
def work(data):
    return best(session.run(None, {"images": prepare(data)[None]})[0][0])
@app.post("/predict")
async def predict(request: Request):
    return {"classes": await run_in_threadpool(work, await request.body())}
uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
""",
    "litserve": """
import litserve
class API(litserve.LitAPI):
    def setup(self, device):
        pass
    def decode_request(self, request):
        return prepare(request["image"].file.read())
    def batch(self, inputs):
        return np.stack(inputs)
    def predict(self, images):
        return session.run(None, {"images": images})[0]
    def unbatch(self, output):
        return list(output)
    def encode_response(self, logits):
        return {"classes": best(logits)}
if __name__ == "__main__":
    server = litserve.LitServer(API(max_batch_size=8, batch_timeout=0.002), accelerator="cpu")
    server.run(port=int(sys.argv[1]), log_level="error", generate_client_file=False)
""",
    "bentoml": """
import asyncio
import bentoml
from pathlib import Path
@bentoml.service(workers=1)
class Network:
    @bentoml.api(batchable=True, max_batch_size=8, max_latency_ms=10000)
    def infer(self, images: np.ndarray) -> np.ndarray:
        return session.run(None, {"images": images.astype(np.float32)})[0]
@bentoml.service(workers=1, traffic={"timeout": 60})
class Classifier:
    network = bentoml.depends(Network)
    @bentoml.api(route="/predict")
    async def predict(self, image: Path) -> dict:
        images = (await asyncio.to_thread(prepare, image.read_bytes()))[None]
        return {"classes": best((await self.network.to_async.infer(images))[0])}
""",
}
BOUNDARY = "dsimg-benchmark"


class Process:
    """A server in a process group of its own."""

    def __init__(self, name: str, command: Sequence[str], port: int, *, form: bool = False, cwd: Path) -> None:
        self.name, self.port, self.form = name, port, form
        self.log = (cwd / f"{name}.log").open("wb")
        begun = time.monotonic()
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, start_new_session=True, cwd=cwd)
        self.begun = begun

    def wait(self, image: bytes, seconds: float = 120) -> float:
        """Return the seconds from the start to the first answer."""
        while time.monotonic() - self.begun < seconds:
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} ended:\n{self.said()}")
            with contextlib.suppress(OSError, ValueError):
                asyncio.run(_ask(self.port, _request(image, form=self.form)))
                return time.monotonic() - self.begun
            time.sleep(0.02)
        raise SystemExit(f"{self.name} gave no answer:\n{self.said()}")

    def said(self) -> str:
        """Return the end of what it wrote; the file goes with the folder."""
        return Path(self.log.name).read_text()[-4000:]

    def send(self, sig: int) -> None:
        """Send a signal to all of its processes."""
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)

    def members(self) -> list[int]:
        """Return its processes: the one that was started and all below it, which may have sessions of their own."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
        found = [self.process.pid]
        for pid in found:  # grows meanwhile
            found += children.get(pid, [])
        return found

    def memory(self) -> float:
        """Return its resident memory in MiB; what processes share is counted once (PSS)."""
        total = 0
        for pid in self.members():
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += int(next(line.split()[1] for line in text.splitlines() if line.startswith("Pss:")))
        return total / 1024

    def cpu(self) -> float:
        """Return its processor time in seconds."""
        ticks = 0
        for pid in self.members():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


def _request(image: bytes, *, form: bool) -> bytes:
    body, kind = image, "image/jpeg"
    if form:
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n'
        body = f"{head}Content-Type: image/jpeg\r\n\r\n".encode() + image + f"\r\n--{BOUNDARY}--\r\n".encode()
        kind = f"multipart/form-data; boundary={BOUNDARY}"
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _ask(port: int, request: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        status = await _exchange(reader, writer, request)
        if status != 200:
            raise ValueError(f"status {status}")
    finally:
        writer.close()


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> int:
    """Return the status of the answer to a request."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
    )
    await reader.readexactly(length)
    return status


async def load(port: int, images: Sequence[bytes], *, clients: int, seconds: float, form: bool) -> dict[str, float]:
    """Return what so many clients got out of a server, after a second of warming up."""
    requests = [_request(image, form=form) for image in images]
    waits: list[float] = []
    failed = 0
    begun = time.monotonic()
    counted_from, end = begun + 1, begun + 1 + seconds

    async def client(number: int) -> None:
        nonlocal failed
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
        place = number
        while (start := time.monotonic()) < end:
            status = await _exchange(reader, writer, requests[place % len(requests)])
            place += clients
            now = time.monotonic()
            if counted_from <= now <= end:
                if status == 200:
                    waits.append(now - start)
                else:
                    failed += 1
        writer.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    p99 = float(np.percentile(waits, 99))
    return {"rate": len(waits) / seconds, "p50": statistics.median(waits), "p99": p99, "failed": failed}


def ceiling(served: Served, images: Sequence[bytes], *, seconds: float, threads: int) -> float:
    """Return images a second without HTTP: each thread decodes 8, runs them, and goes on."""
    preprocess = served.preprocess
    fast = all(importlib.util.find_spec(name) is not None for name in ("simplejpeg", "cykooz_resizer"))

    def prepare(data: bytes) -> Any:
        if not fast:
            return resize_and_crop(decode(data), preprocess)
        simplejpeg: Any = importlib.import_module("simplejpeg")
        resizer: Any = importlib.import_module("cykooz_resizer")
        pixels = simplejpeg.decode_jpeg(data)
        height, width, _ = pixels.shape
        _, side, _ = preprocess.input_size
        short = side / preprocess.crop_pct
        crop = side * min(width, height) / short
        box = resizer.CropBox((width - crop) / 2, (height - crop) / 2, crop, crop)
        pixel = resizer.PixelType.U8x3
        target = resizer.ImageData(side, side, pixel)
        way = resizer.ResizeAlg.convolution(resizer.FilterType.bilinear)
        options = resizer.ResizeOptions(resize_alg=way, crop_box=box)
        resizer.Resizer().resize(resizer.ImageData(width, height, pixel, pixels.tobytes()), target, options)
        return np.frombuffer(target.get_buffer(), np.uint8).reshape(side, side, 3)

    done = [0] * threads
    end = time.monotonic() + seconds

    def work(number: int) -> None:
        place = number
        while time.monotonic() < end:
            batch = np.stack([prepare(images[(place + step) % len(images)]) for step in range(8)])
            served.session.run(None, {"images": normalise(batch, preprocess)})
            place += 8 * threads
            done[number] += 8

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) / seconds


def jpegs(folder: Path, *, count: int, size: int) -> list[bytes]:
    """Return images of a folder as JPEGs of about `size` bytes: the quality that comes nearest."""
    found = []
    for file in images_below(folder)[:count]:
        image = decode(file.read_bytes())
        image.thumbnail((800, 800))
        best = b""
        for quality in range(60, 100, 3):
            stream = io.BytesIO()
            image.save(stream, "JPEG", quality=quality)
            if not best or abs(stream.tell() - size) < abs(len(best) - size):
                best = stream.getvalue()
        found.append(best)
    return found


@contextlib.contextmanager
def servers(source: Run, names: Sequence[str], folder: Path) -> Iterator[list[Process]]:
    """Start all servers."""
    served = open_served(source)
    preprocess = served.preprocess
    common = COMMON.format(
        side=preprocess.input_size[1],
        short=int(preprocess.input_size[1] / preprocess.crop_pct + 1e-6),
        mean=list(preprocess.mean),
        std=list(preprocess.std),
        threads=all_cores(),
        model=str(served.path.resolve()),
    )
    started: list[Process] = []
    try:
        for name in names:
            port = free_port()
            if name == "dsimg":
                command = [sys.executable, "-m", "dsimg", "serve", "--source", str(source.path.resolve())]
                command += ["--port", str(port), "--deadline_ms", "60000"]
            else:
                script = folder / f"{name}_server.py"
                script.write_text(common + PEERS[name])
                command = [sys.executable, str(script), str(port)]
                if name == "bentoml":
                    command = [sys.executable, "-m", "bentoml", "serve", f"{name}_server:Classifier", "-p", str(port)]
            started.append(Process(name, command, port, form=name in ("litserve", "bentoml"), cwd=folder))
        yield started
    finally:
        for server in started:
            with contextlib.suppress(OSError):
                server.send(signal.SIGCONT)
                server.send(signal.SIGKILL)
            server.process.wait()


def main() -> None:
    """Measure, and print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--images", type=Path, help="a folder of photographs")
    parser.add_argument("--bytes", type=int, default=100_000, help="of each JPEG")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--servers", nargs="+", default=["dsimg", *PEERS])
    parser.add_argument("--client", help=argparse.SUPPRESS)  # this program as the process of the clients
    options = parser.parse_args()
    if options.client:
        asked = json.loads(options.client)
        images = np.load(asked.pop("images"), allow_pickle=False)
        encoded = [bytes(images[f"arr_{number}"]) for number in range(len(images.files))]
        print(json.dumps(asyncio.run(load(images=encoded, **asked))))
        return
    source = Run.open(options.source)
    images = jpegs(options.images, count=64, size=options.bytes)
    names = [name for name in options.servers if name == "dsimg" or importlib.util.find_spec(name) is not None]
    print(f"{len(images)} JPEGs of {statistics.median(map(len, images)) / 1000:.0f} kB; {', '.join(names)}")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        np.savez(folder / "images.npz", *[np.frombuffer(image, np.uint8) for image in images])
        measure(source, names, images, folder, options)


def measure(
    source: Run, names: Sequence[str], images: Sequence[bytes], folder: Path, options: argparse.Namespace
) -> None:
    """Measure all servers in turn."""
    first: dict[str, float] = {}
    for name in names:  # each alone, from nothing
        with servers(source, [name], folder) as (server,):
            first[name] = server.wait(images[0])
    with servers(source, names, folder) as running:
        for server in running:
            server.wait(images[0])
        idle = {}
        for server in running:
            server.send(signal.SIGSTOP)
        for server in running:
            server.send(signal.SIGCONT)
            time.sleep(1)
            before = server.cpu()
            time.sleep(5)
            idle[server.name] = (server.cpu() - before) / 5
            server.send(signal.SIGSTOP)
        found: dict[tuple[str, int], list[dict[str, float]]] = {}
        tops = []
        served = open_served(source)
        for number in range(options.rounds):
            tops.append(ceiling(served, images, seconds=options.seconds, threads=all_cores()))
            for clients in options.clients:
                for server in running[number % len(running) :] + running[: number % len(running)]:
                    server.send(signal.SIGCONT)
                    asked = {
                        "port": server.port,
                        "images": str(folder / "images.npz"),
                        "clients": clients,
                        "seconds": options.seconds,
                        "form": server.form,
                    }
                    command = [sys.executable, __file__, "--client", json.dumps(asked)]
                    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True)
                    if answer.returncode:
                        raise SystemExit(f"{server.name} failed:\n{server.said()}")
                    found.setdefault((server.name, clients), []).append(json.loads(answer.stdout))
                    server.send(signal.SIGSTOP)
        memory = {server.name: server.memory() for server in running}
    top = statistics.median(tops)
    print(f"\nceiling without HTTP: {top:.0f} images a second\n")
    print("| clients | server | requests/s | dsimg / it | of the ceiling | p50, ms | p99, ms | not 200 |")
    print("|---" * 8 + "|")
    for clients in options.clients:
        for name in names:
            rates = [one["rate"] for one in found[name, clients]]
            ours = [one["rate"] for one in found["dsimg", clients]] if "dsimg" in names else rates
            ratio = statistics.median(a / b for a, b in zip(ours, rates, strict=True))
            cells = [statistics.median(one[key] for one in found[name, clients]) for key in ("p50", "p99")]
            share = statistics.median(rate / most for rate, most in zip(rates, tops, strict=True))
            row = [
                f"{statistics.median(rates):.1f}",
                f"{ratio:.2f}",
                f"{share:.2f}",
                *(f"{1000 * s:.1f}" for s in cells),
            ]
            failed = sum(round(one["failed"]) for one in found[name, clients])
            print(f"| {clients} | {name} | {' | '.join(row)} | {failed} |")
    print("\n| server | start to first answer, s | memory after, MiB | idle, % of a core |\n|---|---|---|---|")
    for name in names:
        print(f"| {name} | {first[name]:.1f} | {memory[name]:.0f} | {100 * idle[name]:.1f} |")


if __name__ == "__main__":
    main()
