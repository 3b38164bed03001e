import copy

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from dsimg.errors import ModelError
from dsimg.to_onnx import OPSET, parity, to_onnx
from dsimg_export.session import open_session
from tests.nets import with_batchnorm

SIZE = (3, 32, 32)
IMAGES = torch.randn(8, *SIZE, generator=torch.Generator().manual_seed(2))


def parity_logits(model):
    with torch.no_grad():
        return copy.deepcopy(model).eval()(IMAGES).numpy()


@pytest.fixture(scope="module")
def network():
    """A network in train mode whose running statistics are not those of a fresh one."""
    torch.manual_seed(0)
    model = with_batchnorm(4)
    model(torch.randn(16, *SIZE) * 2 + 1)
    return model


@pytest.fixture(scope="module")
def exported(network, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    to_onnx(network, path, input_size=SIZE)
    return path


def test_one_file_with_named_tensors_and_any_batch(network, exported):
    assert [path.name for path in exported.parent.iterdir()] == ["model.onnx"]
    model = onnx.load(exported)
    onnx.checker.check_model(model, full_check=True)
    assert [entry.version for entry in model.opset_import if not entry.domain] == [OPSET]
    session = open_session(exported)
    assert [(i.name, i.shape, i.type) for i in session.get_inputs()] == [
        ("images", ["batch", 3, 32, 32], "tensor(float)")
    ]
    assert [(o.name, o.shape, o.type) for o in session.get_outputs()] == [("logits", ["batch", 4], "tensor(float)")]
    twin = copy.deepcopy(network).eval()
    for count in (1, 2, 3, 8):
        images = torch.randn(count, *SIZE)
        found = torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
        torch.testing.assert_close(found, twin(images).detach(), rtol=1e-5, atol=1e-5)


def test_the_file_says_nothing_of_the_machine_but_names_each_module(exported):
    assert b"site-packages" not in exported.read_bytes()
    assert b"tests/nets" not in exported.read_bytes()
    nodes = onnx.load(exported).graph.node
    scopes = [entry.value for node in nodes if node.op_type == "Gemm" for entry in node.metadata_props]
    # addmm where DeepSpeed's ZeRO-3 has put its own linear into torch before, in this process
    assert scopes in (["['', '6', 'linear']"], ["['', '6', 'addmm']"])


def test_the_network_stays_as_it_is_and_gives_the_same_file_again(network, exported, tmp_path):
    before, random = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    to_onnx(network, tmp_path / "again.onnx", input_size=SIZE)
    assert network.training
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert (tmp_path / "again.onnx").read_bytes() == exported.read_bytes()


def test_a_half_precision_network_is_exported_in_fp32(network, tmp_path):
    half = copy.deepcopy(network).to(torch.bfloat16)
    to_onnx(half, tmp_path / "model.onnx", input_size=SIZE)
    assert parity(half, tmp_path / "model.onnx", torch.randn(3, *SIZE)).relative_error < 1e-5
    assert half[0].weight.dtype == torch.bfloat16


def test_parity_of_the_right_file_and_of_a_wrong_one(network, exported):
    torch.manual_seed(1)
    images = torch.randn(11, *SIZE)
    right = parity(network, exported, images)
    assert 0 < right.relative_error < 1e-5
    assert right.max_error < 1e-5
    assert right.same_top1 == 1.0
    assert not right.vacuous
    assert network.training
    other = copy.deepcopy(network)
    with torch.no_grad():
        other[6].bias[0] += 100
    wrong = parity(other, exported, images)
    peak = copy.deepcopy(other).eval()(images).abs().max().item()
    assert wrong.max_error == pytest.approx(100, rel=1e-5)
    assert wrong.relative_error == pytest.approx(100 / peak, rel=1e-5)
    unlike = (copy.deepcopy(network).eval()(images).argmax(1) != 0).sum().item()
    assert unlike > 0
    assert wrong.same_top1 == pytest.approx(1 - unlike / 11)


@pytest.mark.parametrize("bias", [0.0, 0.3])
def test_a_zero_head_makes_parity_vacuous(network, tmp_path, bias):
    silent = copy.deepcopy(network)
    nn.init.zeros_(silent[6].weight)
    nn.init.constant_(silent[6].bias, bias)
    to_onnx(silent, tmp_path / "model.onnx", input_size=SIZE)
    found = parity(silent, tmp_path / "model.onnx", torch.randn(2, *SIZE))
    assert (found.max_error, found.relative_error, found.vacuous) == (0.0, 0.0, True)


def test_an_error_is_measured_against_what_images_make_differ(network, exported, tmp_path):
    """Beside a large bias a file that says the same of every image is within 1e-3 of the largest logit."""
    biased, constant = copy.deepcopy(network), copy.deepcopy(network)
    spread = np.ptp(parity_logits(network), axis=0).max()
    biased[6].bias.data += 1000 * spread
    constant[6].bias.data = torch.from_numpy(parity_logits(biased).mean(0))
    nn.init.zeros_(constant[6].weight)
    to_onnx(constant, tmp_path / "constant.onnx", input_size=SIZE)
    to_onnx(biased, tmp_path / "biased.onnx", input_size=SIZE)
    wrong, right = (parity(biased, tmp_path / f"{name}.onnx", IMAGES) for name in ("constant", "biased"))
    assert not wrong.vacuous
    assert wrong.spread == pytest.approx(spread, rel=1e-2)
    assert wrong.relative_error < 1e-3
    assert not wrong.within(of_peak=1e-3, of_spread=0.05)
    assert right.within(of_peak=1e-3, of_spread=0.05)


def test_few_images_are_repeated_to_a_batch_of_eight(network, exported, monkeypatch):
    sizes = []
    session = open_session(exported)

    class Counted:
        def run(self, outputs, inputs):
            sizes.append(len(inputs["images"]))
            return session.run(outputs, inputs)

    monkeypatch.setattr("dsimg.to_onnx.open_session", lambda path: Counted())
    assert parity(network, exported, IMAGES[:2]).same_top1 == 1.0
    assert sizes == [8, 1, 2, 3]


class OneBatch(nn.Module):
    def forward(self, images):
        return images.reshape(2, -1)[:, :4]


class Pair(nn.Module):
    def forward(self, images):
        return images.flatten(1), images.flatten(1)


class Bessel(nn.Module):
    def forward(self, images):
        return torch.special.bessel_j0(images.flatten(1))


class Broken(nn.Module):
    def forward(self, images):
        raise ValueError("no such layer\nand more")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (OneBatch(), r"returns \[\[2, 4\]\] instead of logits \[\['batch', classes\]\]\. Make its forward"),
        (Pair(), r"returns \[\['batch', 3072\], \['batch', 3072\]\] instead of logits"),
        (Bessel(), r"cannot be exported to ONNX \(No ONNX function found for .*bessel_j0.*\)\. Change that part"),
        (Broken(), r"cannot be exported to ONNX \(no such layer\)\. Change that part"),
        (nn.Linear(2**15, 2**15, device="meta"), r"has 4\.3 GB of weights in fp32, and one ONNX file holds 2\.1 GB"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_sentence(model, message, tmp_path):
    with pytest.raises(ModelError, match=message) as caught:
        to_onnx(model, tmp_path / "model.onnx", input_size=SIZE)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(network, tmp_path):
    with pytest.raises(ModelError, match=r"cannot write .*missing/model\.onnx"):
        to_onnx(network, tmp_path / "missing" / "model.onnx", input_size=SIZE)
