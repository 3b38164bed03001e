"""Write what other servers need to answer with an exported run: Triton, KServe, Docker and Kubernetes, Ray Serve.

dsimg deploy --source RUN --to docker --out DIR

What is written are the templates in deployments/, filled in from the run, beside its files. Nothing is started.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

import dsimg
from dsimg import cli
from dsimg.errors import ConfigError, RunError
from dsimg.run import Run, as_plain, remove_run, sha256, sync_file, sync_folder, write_json, writing_in
from dsimg.runtime import Provider
from dsimg_export.deployments.network import network_values, warm_sizes, warm_up
from dsimg_export.golden import read_golden
from dsimg_export.session import load_model, precision_of

Target = Literal["triton", "kserve", "docker", "ray"]

TEMPLATES = Path(__file__).with_name("deployments")
MARK = "deployment.json"  # tells a folder that this stage wrote from any other
# What `dsimg serve` and `dsimg verify` read. The rest (lists of images, predictions) names the user's files.
SERVED = ("model", "reduced", "labels", "golden", "pruning")
TRITON = "26.08-py3"
CALLS, CALLS_ON_GPU = 2, 1
CORES_BESIDE_GPU = 4  # decoding images for a GPU takes more of them than the network does
GRACE_SECONDS = 15.0  # for what was accepted, and no less than the deadline
KSERVE_SECONDS = 30  # Kubernetes' own, which Knative does not let a service change
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._/:@-]*")
STORAGE = re.compile(r"[a-z][a-z0-9+.-]*://[^\s\"'\\]+")
# Which targets a flag says something to, where that is not all of them.
SAYS_TO: dict[str, tuple[Target, ...]] = {
    "instruction_set": ("triton", "kserve"),
    "storage_uri": ("kserve",),
    "image": ("kserve", "docker"),
    "wheel": ("docker",),
    "memory_mib": ("kserve", "docker"),
    "drain_seconds": ("kserve", "docker"),
}
# The templates that become files of each target, but for those that go elsewhere, and what they are called there.
FILES: dict[Target, dict[str, str]] = {
    "triton": {"triton.md": "README.md"},
    "kserve": {"kserve-triton.yaml": "triton.yaml", "kserve-dsimg.yaml": "dsimg.yaml", "kserve.md": "README.md"},
    "docker": {
        "Dockerfile": "Dockerfile",
        "Dockerfile.gpu": "Dockerfile.gpu",
        "dockerignore": ".dockerignore",
        "compose.yaml": "compose.yaml",
        "kubernetes.yaml": "kubernetes.yaml",
        "autoscale.yaml": "autoscale.yaml",
        "docker.md": "README.md",
    },
    "ray": {"serve_app.py": "serve_app.py", "ray.md": "README.md"},
}
GPU_COMPOSE = """
        reservations:
          devices:
            - driver: nvidia
              count: 1
              capabilities: [gpu]"""
# Asked inside the container; http.client, because urllib would ask a proxy.
HEALTH = (
    "import http.client as h; c = h.HTTPConnection('127.0.0.1', 8080, timeout=4); "
    "c.request('GET', '/v2/health/ready'); raise SystemExit(c.getresponse().status != 200)"
)


@dataclass(frozen=True, kw_only=True)
class DeployConfig:
    """The flags of `dsimg deploy`."""

    source: Path
    """The exported run to deploy, with an ONNX file."""
    to: Target
    """What is to serve it. triton: a model repository; kserve: InferenceServices; docker: a container with `dsimg
    serve`, for Docker, compose and Kubernetes; ray: a Ray Serve application."""
    out: Path
    """The folder to write; it must be empty or not there."""
    name: str | None = None
    """What the model is called when it is asked. Default: the name of the run's folder."""
    gpu: bool = False
    """Run on an NVIDIA GPU instead of the processor."""
    instruction_set: Literal["vnni", "avx2"] = "vnni"
    """triton, kserve: what the processor that will run an int8 file has. vnni: exact sums, as on ARM and GPUs; avx2:
    none, so that the file with 7-bit weights is taken. `dsimg serve` finds out by itself."""
    instances: int | None = None
    """Calls of the network at a time in each copy of the server. Default: 2; on a GPU 1."""
    threads: int = 1
    """Threads of ONNX Runtime in each call; a copy of the server is given as many cores as all its calls have threads,
    and on a GPU 4, for decoding."""
    max_batch: int = 8
    """Images a call at most."""
    delay_ms: float = 0.0
    """How long the oldest image may wait for others while an instance is free."""
    max_queue: int = 256
    """How many may wait at most; what comes then is refused."""
    deadline_ms: float = 5000.0
    """How long an answer may take. Triton counts the time in its queue alone."""
    memory_mib: int = 2048
    """Memory that each copy of the server is given, in MiB."""
    image: str | None = None
    """docker, kserve: what the container's image is called. Default: the model's name, and its version as the tag."""
    storage_uri: str | None = None
    """kserve: where the model repository will lie, as s3://bucket/folder."""
    wheel: Path | None = None
    """docker: the wheel of dsimg to install. Default: the package index's, of this version."""
    drain_seconds: float = 10.0
    """docker, kserve: how long a server that is asked to end goes on answering while it says that it is not ready."""
    overwrite: bool = False
    """Replace what an earlier `dsimg deploy` wrote into --out."""

    def __post_init__(self) -> None:
        for name in ("instances", "threads", "max_batch", "max_queue", "memory_mib"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name} is {value}; it must be at least 1.")
        if not (self.deadline_ms > 0 and math.isfinite(self.deadline_ms)):
            raise ConfigError(f"--deadline_ms is {self.deadline_ms}; it must be a number above 0.")
        for name in ("delay_ms", "drain_seconds"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"--{name} is {value}; it must be 0 or more.")
        if self.name is not None:
            _check_name(self.name)
        if self.image is not None and not IMAGE.fullmatch(self.image):
            raise ConfigError(f"--image is '{self.image}'; write it as REGISTRY/NAME:TAG.")
        if self.storage_uri is not None and not STORAGE.fullmatch(self.storage_uri):
            raise ConfigError(
                f"--storage_uri is '{self.storage_uri}'; write it as s3://BUCKET/FOLDER or gs://, pvc://."
            )
        if self.to == "kserve":
            if self.storage_uri is None:
                raise ConfigError(
                    "--to kserve needs --storage_uri: where the model repository will lie, as s3://BUCKET/FOLDER."
                )
            if self.drain_seconds + self.grace_seconds >= KSERVE_SECONDS:
                raise ConfigError(
                    f"--drain_seconds is {self.drain_seconds:g}, and {self.grace_seconds:g} more are for what was "
                    f"accepted; KServe ends a server after {KSERVE_SECONDS}. Give less, or a shorter --deadline_ms."
                )
        if self.wheel is not None and (self.wheel.suffix != ".whl" or not self.wheel.is_file()):
            raise ConfigError(
                f"--wheel {self.wheel} is not a wheel. `pip wheel --no-deps -w DIR PATH_OF_DSIMG` makes one."
            )

    @property
    def grace_seconds(self) -> float:
        """How long what was accepted may take, once nothing more is."""
        return max(GRACE_SECONDS, self.deadline_ms / 1000)

    @property
    def calls(self) -> int:
        """Calls of the network at a time in each copy of the server."""
        return self.instances or (CALLS_ON_GPU if self.gpu else CALLS)

    @property
    def cores(self) -> int:
        """Cores that each copy of the server is given."""
        return CORES_BESIDE_GPU if self.gpu else self.calls * self.threads

    @property
    def provider(self) -> Provider:
        """Where `dsimg serve` runs the network."""
        return "cuda" if self.gpu else "cpu"


def deploy(config: DeployConfig) -> Path:
    """Write what another server needs to answer with an exported run: Triton, KServe, Docker and Kubernetes, Ray."""
    run = Run.open(config.source)
    name = config.name or config.source.resolve().name
    _check_name(name)
    _warn_of_ignored(config)
    role = _role(run, config)
    manifest = _served_manifest(run)
    version = hashlib.sha256(manifest).hexdigest()[:12]
    values = {**_plan(name, version, config), **network_values(run, role)}
    values |= _blocks(values, config)
    values["run_files"] = ", ".join(sorted(("run.json", *(path.name for path in _served_files(run)))))
    with _whole_folder(config) as folder:
        if config.to in ("triton", "kserve"):
            _write_repository(run, role, folder / str(values["repository"]) / name, values)
            _fill({"client.py": "client.py"}, values, folder)
            _write_golden(run, role, folder / "golden.npz")
        else:
            _copy_run(run, manifest, folder / "model" / name)
        if config.wheel is not None and config.to == "docker":
            shutil.copyfile(config.wheel, folder / config.wheel.name)
        _fill(FILES[config.to], values, folder)
        _mark(run, name, config, folder)
        written = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    _show(config, values, written)
    return config.out


def _role(run: Run, config: DeployConfig) -> str:
    """Return the role of the file for a server that cannot choose between two. Raises RunError."""
    if config.gpu or config.instruction_set == "vnni" or config.to not in SAYS_TO["instruction_set"]:
        return "model"
    if run.has("reduced"):
        return "reduced"
    if precision_of(load_model(run.file("model"))) == "int8":
        raise RunError(
            f"--instruction_set avx2: {run.path} is in int8 and has no file with 7-bit weights. Quantize the "
            "exported run again on an x86 processor, or deploy that one."
        )
    return "model"


def _plan(name: str, version: str, config: DeployConfig) -> dict[str, Any]:
    """Return what there is to say of how it is to be served."""
    dns = dns_name(name)
    image = config.image or f"{dns}:{version}"
    extra = "serve-gpu" if config.gpu else "serve"
    return {
        "dsimg": dsimg.__version__,
        "model": name,
        "version": version,
        "dns": dns,
        "repository": "repository" if config.to == "kserve" else ".",
        "labels": f"repository/{name}/labels.txt" if config.to == "kserve" else f"{name}/labels.txt",
        "image": image,
        "image_quoted": json.dumps(image),
        "storage_uri": config.storage_uri,
        "storage_uri_quoted": json.dumps(config.storage_uri),
        "triton_tag": TRITON,
        "calls": config.calls,
        "threads": config.threads,
        "cores": config.cores,
        "provider": config.provider,
        "device": "a GPU" if config.gpu else "the processor",
        "kind": "KIND_GPU" if config.gpu else "KIND_CPU",
        "docker_gpus": "--gpus all " if config.gpu else "",
        "ray_gpus": ', "num_gpus": 1' if config.gpu else "",
        "dockerfile": "Dockerfile.gpu" if config.gpu else "Dockerfile",
        "requirement": f"dsimg[{extra}]=={dsimg.__version__}",
        "dsimg_from": "the wheel beside this file"
        if config.wheel
        else f"the package index, version {dsimg.__version__}",
        "memory_mib": config.memory_mib,
        "max_batch": config.max_batch,
        "max_queue": config.max_queue,
        "delay_ms": f"{config.delay_ms:g}",
        "delay_us": round(1000 * config.delay_ms),
        "deadline_ms": f"{config.deadline_ms:g}",
        "deadline_us": round(1000 * config.deadline_ms),
        "deadline_seconds": math.ceil(config.deadline_ms / 1000),
        "drain_seconds": f"{config.drain_seconds:g}",
        "grace_seconds": f"{config.grace_seconds:g}",
        "stop_seconds": math.ceil(config.grace_seconds) + 5,
        "termination_seconds": math.ceil(config.drain_seconds + config.grace_seconds) + 5,
    }


def dns_name(name: str) -> str:
    """Return a model's name as Kubernetes takes it: lower case, digits and hyphens, a letter first, 40 characters."""
    text = re.sub("[^a-z0-9]+", "-", name.lower())
    return (text if text[0].isalpha() else f"m-{text}")[:40].strip("-")


def _blocks(values: Mapping[str, Any], config: DeployConfig) -> dict[str, str]:
    """Return the parts of templates that are there only sometimes, or several times."""
    sizes = warm_sizes(values["max_batch"], gpu=config.gpu)
    plan = [f"--{name}={values[name]}" for name in ("threads", "max_batch", "delay_ms", "max_queue", "deadline_ms")]
    plan.append(f"--grace_seconds={values['grace_seconds']}")
    cpu = [f"--workers={config.instances or CALLS}", *plan]
    gpu = [f"--workers={config.instances or CALLS_ON_GPU}", *plan, "--provider=cuda"]
    wheel = None if config.wheel is None else config.wheel.name
    return {
        "warm_up": ",\n".join(warm_up(size, values["input"]) for size in sizes),
        "args_cpu": json.dumps(cpu),
        "args_gpu": json.dumps(gpu),
        "args_kubernetes": json.dumps([*(gpu if config.gpu else cpu), f"--drain_seconds={values['drain_seconds']}"]),
        "install_cpu": _install("serve", wheel),
        "install_gpu": _install("serve-gpu", wheel),
        "wheel_kept": "" if wheel is None else f"\n!{wheel}",
        "health": json.dumps(HEALTH),
        **{f"gpu_limit_{indent}": _gpu_limit(indent) if config.gpu else "" for indent in (10, 12, 14)},
        "gpu_compose": GPU_COMPOSE if config.gpu else "",
    }


def _install(extra: str, wheel: str | None) -> str:
    """Return the lines of a Dockerfile that install dsimg."""
    if wheel is None:
        return f'RUN pip install --no-cache-dir "dsimg[{extra}]=={dsimg.__version__}"'
    return f'COPY {wheel} /tmp/\nRUN pip install --no-cache-dir "/tmp/{wheel}[{extra}]"'


def _gpu_limit(indent: int) -> str:
    return f'\n{"":{indent}}nvidia.com/gpu: "1"'


# --- What is written --------------------------------------------------------------------------------------------


def _write_repository(run: Run, role: str, folder: Path, values: Mapping[str, Any]) -> None:
    """Write a model as Triton's repository holds it."""
    (folder / "1").mkdir(parents=True)
    shutil.copyfile(run.file(role), folder / "1" / "model.onnx")
    shutil.copyfile(run.file("labels"), folder / "labels.txt")
    _fill({"config.pbtxt": "config.pbtxt"}, values, folder)


def _write_golden(run: Run, role: str, path: Path) -> None:
    """Write images with the logits that are known of them, where those hold on other processors."""
    golden = read_golden(run.file("golden"))
    saturated = role == "model" and golden.made_by.get("int8") == "saturating"
    if role in golden.logits and not (saturated and precision_of(load_model(run.file(role))) == "int8"):
        np.savez(path, pixels=golden.views.pixels, logits=golden.logits[role])
        return
    cli.context().terminal.warn(
        f"{path.name} is left out, so that `client.py --check` has nothing to compare: {run.path} has no logits of "
        f"{run.file(role).name} that hold on other processors. Quantize it on one with VNNI for them."
    )


def _served_files(run: Run) -> list[Path]:
    """Return the files that serving reads, run.json aside, each with its hash checked. Raises RunError."""
    return [run.file(role) for role in SERVED if role in ("model", "labels", "golden") or run.has(role)]


def _served_manifest(run: Run) -> bytes:
    """Return run.json of a copy that holds only what serving reads."""
    assert run.manifest is not None
    files = {role: entry for role, entry in run.manifest["files"].items() if role in SERVED}
    return (json.dumps({**run.manifest, "files": files}, indent=1) + "\n").encode()


def _copy_run(run: Run, manifest: bytes, folder: Path) -> None:
    folder.mkdir(parents=True)
    for path in _served_files(run):
        shutil.copyfile(path, folder / path.name)
    (folder / "run.json").write_bytes(manifest)


def _fill(names: Mapping[str, str], values: Mapping[str, Any], folder: Path) -> None:
    """Write templates, filled in, into a folder; names: what each is called there."""
    for template, name in names.items():
        text = (TEMPLATES / f"{template}.template").read_text(encoding="utf-8")
        (folder / name).write_text(string.Template(text).substitute(values), encoding="utf-8")


def _mark(run: Run, name: str, config: DeployConfig, folder: Path) -> None:
    write_json(
        folder / MARK,
        {
            "dsimg": dsimg.__version__,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "name": name,
            "source": {"path": str(run.path), "sha256": sha256(run.path / "run.json")},
            "config": as_plain(config),
        },
    )


@contextlib.contextmanager
def _whole_folder(config: DeployConfig) -> Iterator[Path]:
    """Give a folder beside --out to write in, which afterwards takes its place; what goes wrong leaves --out as it was.

    Raises RunError: --out holds something, or it and the run lie in one another, or it cannot be written.
    """
    out, source = config.out.resolve(), config.source.resolve()
    if out == source or source in out.parents or out in source.parents:
        raise RunError(f"--out {config.out} and the run {config.source} lie in one another. Choose another --out.")
    with writing_in(config.out):
        if out.exists() and not out.is_dir():
            raise RunError(f"--out {config.out} is a file. Choose a folder.")
        holds = sorted(entry.name for entry in out.iterdir()) if out.exists() else []
        if holds and MARK not in holds:
            raise RunError(
                f"--out {config.out} holds what `dsimg deploy` did not write: {', '.join(holds[:5])}. Choose another "
                "--out."
            )
        if holds and not config.overwrite:
            raise RunError(
                f"--out {config.out} holds a deployment. Choose another --out, or --overwrite to replace it."
            )
        folder = out.with_name(f".{out.name}.{os.getpid()}.tmp")
        folder.mkdir(parents=True)
        try:
            yield folder
            for path in folder.rglob("*"):
                if path.is_file():
                    sync_file(path)
            if holds:
                remove_run(out)
            folder.rename(out)
            sync_folder(out.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"a model cannot be called '{name}'. Give --name: letters, digits, '.', '_' and '-', at most 100, and a "
            "letter or digit first."
        )


def _warn_of_ignored(config: DeployConfig) -> None:
    for field in dataclasses.fields(config):
        targets = SAYS_TO.get(field.name, (config.to,))
        if config.to not in targets and getattr(config, field.name) != field.default:
            cli.context().terminal.warn(f"--{field.name} says nothing to {config.to}, only to {', '.join(targets)}.")
    if config.gpu and config.instruction_set != "vnni" and config.to in SAYS_TO["instruction_set"]:
        cli.context().terminal.warn(
            f"--instruction_set {config.instruction_set} is about processors; a GPU sums exactly."
        )


def _show(config: DeployConfig, values: Mapping[str, Any], written: Sequence[str]) -> None:
    fixed = config.to in SAYS_TO["instruction_set"]
    cli.context().terminal.table(
        f"{config.to}: {config.out}",
        [
            ("model", f"{values['model']}: {values['arch']}, {values['classes']} classes"),
            ("file", values["file_text"] if fixed else "dsimg serve takes the one for its processor"),
            ("runs", f"{values['calls']} calls at a time with {values['threads']} threads each, on {values['device']}"),
            ("batches", f"at most {values['max_batch']} images, waiting at most {values['delay_ms']} ms"),
            ("written", ", ".join(written)),
            ("next", f"{config.out}/README.md says how to start it"),
        ],
    )


if __name__ == "__main__":
    cli.run(deploy)
