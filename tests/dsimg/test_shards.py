"""A checkpoint on disk: what is written is read back, what is damaged is found."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsimg import shards
from dsimg.errors import RunError


def save(folder: Path, *, step: int, parts: list[dict[str, Tensor]], keep: int = 2) -> Path:
    """Commit a checkpoint of some shards, as the ranks of a run do."""
    temporary = folder / f".step_{step}.tmp"
    temporary.mkdir(parents=True)
    records = [shards.write_shard(part, temporary / f"shard_{n}.safetensors") for n, part in enumerate(parts)]
    return shards.commit(temporary, {"step": step, "tensors": {}}, records, keep=keep)


HALVES = [{"weight:0:w": torch.tensor([0.0, 1.0])}, {"weight:2:w": torch.tensor([2.0, 3.0, 4.0])}]


def test_pieces_of_any_cut_are_read(tmp_path: Path) -> None:
    path = save(tmp_path, step=1, parts=HALVES)
    pieces = shards.Pieces(path, shards.read_state(path))
    assert pieces.kinds == {"weight"}
    assert pieces.whole("weight", "w", numel=5).tolist() == [0, 1, 2, 3, 4]
    target = torch.zeros(2)
    pieces.fill(target, "weight", "w", start=1)
    assert target.tolist() == [1, 2]
    with pytest.raises(RunError, match="has 5 of 6 values of weight w"):
        pieces.whole("weight", "w", numel=6)


def test_buffers_of_ranks_become_one_set_as_the_engine_pools_them(tmp_path: Path) -> None:
    parts = [
        {
            "buffer:0:n.running_mean": torch.tensor([mean]),
            "buffer:0:n.running_var": torch.tensor([variance]),
            "buffer:0:n.num_batches_tracked": torch.tensor([5]),
        }
        for mean, variance in ((1.0, 2.0), (3.0, 6.0))
    ]
    path = save(tmp_path, step=1, parts=parts)
    pieces = shards.Pieces(path, shards.read_state(path))
    pooled = {name: value.item() for name, value in pieces.buffers().items()}
    # Mean of the means; mean of the variances plus the variance of the means.
    assert pooled == {"n.running_mean": 2.0, "n.running_var": 5.0, "n.num_batches_tracked": 5}
    assert pieces.buffers(1)["n.running_mean"].item() == 3.0


def test_nan_and_every_type_survive_being_read_back(tmp_path: Path) -> None:
    values = {
        "weight:0:a": torch.tensor([float("nan"), float("inf"), -0.0]),
        "buffer:0:b": torch.tensor([True, False]),
        "buffer:0:c": torch.tensor([2**40]),
        "buffer:0:d": torch.zeros(0),
    }
    path = save(tmp_path, step=1, parts=[values])
    assert shards.check_shards(path, shards.read_state(path)) is None


def test_a_disk_that_gives_back_other_bytes_is_found_when_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shards.save_file

    def lossy(tensors: dict[str, Tensor], path: Path) -> None:
        real({key: tensor + 1 for key, tensor in tensors.items()}, path)

    monkeypatch.setattr("dsimg.shards.save_file", lossy)
    with pytest.raises(OSError, match="other bytes than were written"):
        shards.write_shard(HALVES[0], tmp_path / "shard_0.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("flip", "its hash differs"),
        ("cut", "bytes instead of"),
        ("missing", "No such file"),
        ("stale", "its hash differs"),
    ],
)
def test_every_damage_to_a_shard_is_found(tmp_path: Path, damage: str, message: str) -> None:
    old = save(tmp_path, step=1, parts=[{"weight:0:w": torch.zeros(4)}, {"weight:4:w": torch.zeros(4)}])
    path = save(tmp_path, step=2, parts=[{"weight:0:w": torch.ones(4)}, {"weight:4:w": torch.ones(4)}])
    shard = path / "shard_1.safetensors"
    content = bytearray(shard.read_bytes())
    if damage == "flip":
        content[-3] ^= 16
        shard.write_bytes(content)
    elif damage == "cut":
        shard.write_bytes(content[:-4])
    elif damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes((old / "shard_1.safetensors").read_bytes())
    state = shards.read_state(path)
    assert shards.check_shards(path, state, part=0, parts=2) is None  # the other rank's share
    problem = shards.check_shards(path, state, part=1, parts=2)
    assert problem is not None
    assert message in problem
    assert str(shard) in problem


def test_every_damage_to_the_state_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, step=12, parts=HALVES)
    file = path / "state.json"
    text = file.read_text()
    for changed in (text.replace('"step": 12', '"step": 13'), text[:-9], "", "[]", "{}"):
        file.write_text(changed)
        with pytest.raises(RunError, match="is damaged"):
            shards.read_state(path)
    content = {"schema": 99, "step": 12}
    file.write_text(json.dumps({"digest": shards._digest(content), **content}))
    with pytest.raises(RunError, match="its schema is 99, this dsimg reads 1"):
        shards.read_state(path)
    file.unlink()
    with pytest.raises(RunError, match="No such file"):
        shards.read_state(path)


def test_latest_names_the_newest_and_what_is_wrong_with_it_is_said(tmp_path: Path) -> None:
    assert shards.latest_note(tmp_path) is None
    save(tmp_path, step=1, parts=HALVES)
    path = save(tmp_path, step=2, parts=HALVES)
    latest = tmp_path / "latest"
    assert latest.read_text() == f"{path.name}\n"
    assert shards.latest_note(tmp_path) is None
    for text, note in (("", "is empty"), ("step_00000009\n", "names 'step_00000009', which is not there")):
        latest.write_text(text)
        assert shards.latest_note(tmp_path) == f"{latest} {note}"
    latest.unlink()
    assert shards.latest_note(tmp_path) == f"{latest} is missing"
    latest.write_text("step_00000001\n")  # a kill between the rename and `latest`
    assert shards.latest_note(tmp_path) is None


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    path = save(tmp_path, step=1, parts=HALVES)
    (path / "shard_0.safetensors").write_bytes(b"")
    again = save(tmp_path, step=1, parts=HALVES)
    assert again == path
    assert shards.check_shards(path, shards.read_state(path)) is None
