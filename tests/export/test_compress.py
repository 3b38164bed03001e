"""`dsimg compress`: what is tried, in which order, what is not, and what wins. Its commands are played."""

import dataclasses
import importlib.util
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dsimg.errors import ConfigError, ModelError, RunError, StopRequested
from dsimg.run import Run, write_json
from dsimg.show import ancestry
from dsimg_export import compress
from dsimg_export.compress import CompressConfig, search
from tests.conftest import make_folder
from tests.export.searches import SOURCE, Played, read_report, write_source


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CompressConfig:
    """A search for a student and half of the multiply-adds, within one point of the source; no picture is drawn."""
    monkeypatch.setattr("dsimg_export.plots.draw_search", lambda path, content: path.write_bytes(b""))
    source = write_source(tmp_path / "teacher")
    return CompressConfig(source=source.path, out=tmp_path / "out", students=("cifar_resnet20",), ratios=(1, 0.5))


def made(played: Played) -> list[str]:
    """Return the folders that commands were run for, but for evaluations."""
    return [line for line in played.ran if not line.startswith("evaluate")]


def dropped(out: Path) -> dict[str, str]:
    return {row["name"]: row["reason"] for row in read_report(out)["dropped"]}


def test_the_cheapest_are_tried_first_and_what_cannot_win_is_not_trained(config: CompressConfig) -> None:
    played = Played(right={"cifar_resnet20_fp32": 895, "cifar_resnet20_int8": 893, "cifar_resnet56_0.5_fp32": 896})
    winner = search(config, run=played)
    probe, *rest = made(played)
    assert probe.startswith("probe probe-")
    # 3 * 30 + 100 to distil the student, 3 * 50 + 100 to prune the source, 3 * 15 + 100 more to prune the student.
    assert rest == [
        f"export {SOURCE}",
        "quantize cifar_resnet56_int8",
        "distill cifar_resnet20",
        "export cifar_resnet20_fp32",
        "quantize cifar_resnet20_int8",
        "prune cifar_resnet20_0.5",
        "export cifar_resnet20_0.5_fp32",
        "quantize cifar_resnet20_0.5_int8",
        "bench bench",
    ]
    assert dropped(config.out) == {
        "cifar_resnet20_0.5_fp32": "not 3% faster than cifar_resnet20_int8, which is good enough: 2.5 ms and 1.5 ms",
        "cifar_resnet56_0.5_fp32": "not 3% faster than cifar_resnet20_int8, which is good enough: 5 ms and 1.5 ms",
        "cifar_resnet56_0.5_int8": "not 3% faster than cifar_resnet20_int8, which is good enough: 3 ms and 1.5 ms",
    }
    assert winner.path == config.out / "winner"
    assert read_report(config.out)["candidates"][0]["name"] == "cifar_resnet20_0.5_int8"


def test_the_winner_is_a_run_that_leads_back_to_the_source(config: CompressConfig) -> None:
    winner = search(config, run=Played(right={"cifar_resnet20_0.5_int8": 880}))
    assert [step.run.path.name for step in ancestry(winner)] == [
        "winner",
        "cifar_resnet20_fp32",
        "cifar_resnet20",
        "teacher",
    ]
    found = read_report(config.out)
    assert [(row["name"], row["winner"], row["front"]) for row in found["candidates"]] == [
        ("cifar_resnet20_0.5_int8", False, True),
        ("cifar_resnet20_int8", True, True),
        ("cifar_resnet20_fp32", False, False),
        ("cifar_resnet56_int8", False, False),
        (SOURCE, False, False),
    ]
    teacher, out = config.source, config.out
    assert found["candidates"][1]["commands"] == [
        f"dsimg distill --source {teacher} --model cifar_resnet20 --image_size 16 --epochs 20 "
        f"--out {out}/cifar_resnet20",
        f"dsimg export --source {out}/cifar_resnet20 --out {out}/cifar_resnet20_fp32",
        f"dsimg quantize --source {out}/cifar_resnet20_fp32 --out {out}/cifar_resnet20_int8",
    ]
    half = found["candidates"][0]
    assert (half["difference"], half["good_enough"]) == (pytest.approx(-0.02), False)
    assert (half["against_source"]["gained"], half["against_source"]["lost"]) == (0, 20)
    assert half["speedup"] == pytest.approx(8 / 1.4)


def test_flags_of_training_are_passed_on(
    config: CompressConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text("weight_decay = 5e-4")
    flags: dict[str, Any] = {
        "data": "photos",
        "lr": 0.4,
        "prune_lr": 0.1,
        "epochs": 3,
        "ranks": 2,
        "deepspeed_config": "zero2",
        "recipe": tmp_path / "r.toml",
    }
    config = dataclasses.replace(config, **flags)
    search(config, run=Played())
    rows = {row["name"]: row["commands"] for row in read_report(config.out)["candidates"]}
    distill, prune, export, quantize = rows["cifar_resnet20_0.5_int8"]
    given = f"--config {tmp_path}/r.toml --data photos --deepspeed_config zero2 --epochs 3"
    out = config.out
    assert distill == (
        f"deepspeed --quiet --num_gpus 2 --module dsimg.distill --source {config.source} --model cifar_resnet20 "
        f"--image_size 16 {given} --lr 0.4 --out {out}/cifar_resnet20"
    )
    assert prune == (
        f"deepspeed --quiet --num_gpus 2 --module dsimg.prune --source {out}/cifar_resnet20 --target_macs 0.5 "
        f"--round_to 8 --teacher {config.source} {given} --lr 0.1 --out {out}/cifar_resnet20_0.5"
    )
    assert export.startswith("dsimg export ")
    assert "--data photos" in quantize


def test_what_misses_the_target_before_training_is_not_trained(config: CompressConfig) -> None:
    played = Played()
    search(dataclasses.replace(config, target_latency="0.2"), run=played)  # 1.6 ms
    assert made(played)[1:] == [
        f"export {SOURCE}",
        "distill cifar_resnet20",
        "export cifar_resnet20_fp32",
        "quantize cifar_resnet20_int8",
        "prune cifar_resnet20_0.5",
        "export cifar_resnet20_0.5_fp32",
        "quantize cifar_resnet20_0.5_int8",
        "bench bench",
    ]
    assert dropped(config.out)["cifar_resnet56_int8"] == "too slow: 4 ms before training, and 1.6 ms is asked for"


def test_a_narrower_network_is_not_trained_where_the_wider_one_fails_by_more_than_its_interval(
    config: CompressConfig,
) -> None:
    played = Played(right={"cifar_resnet20_fp32": 860})  # up to 88.0 %, and 89.0 % is wanted
    search(config, run=played)
    for name in ("cifar_resnet20_int8", "cifar_resnet20_0.5_int8", "cifar_resnet20_0.5_fp32"):
        assert dropped(config.out)[name].startswith("cifar_resnet20 is not good enough (86.00%), and ")
    assert "prune cifar_resnet20_0.5" not in played.ran
    unsure = Played(right={"cifar_resnet20_fp32": 880})  # up to 89.9 %
    search(dataclasses.replace(config, out=config.out.with_name("other")), run=unsure)
    assert "quantize cifar_resnet20_int8" in unsure.ran


def test_a_stopped_search_goes_on_and_does_nothing_twice(config: CompressConfig) -> None:
    first = Played(stops_at="cifar_resnet20_int8")
    with pytest.raises(StopRequested):
        search(config, run=first)
    assert first.ran[-1] == "quantize cifar_resnet20_int8"
    second = Played()
    search(config, run=second)
    assert made(second) == [
        "quantize cifar_resnet20_int8",
        "prune cifar_resnet20_0.5",
        "export cifar_resnet20_0.5_fp32",
        "quantize cifar_resnet20_0.5_int8",
        "bench bench",
    ]
    third = Played()
    assert search(config, run=third).path == config.out / "winner"
    assert third.ran == []
    search(dataclasses.replace(config, max_drop=0.02, ratios=(1,)), run=third)
    assert [line.split(" ")[0] for line in third.ran] == ["probe", "bench"]


def test_what_an_earlier_start_has_finished_stays_in_the_report(config: CompressConfig) -> None:
    search(config, run=Played())
    before = [row["name"] for row in read_report(config.out)["candidates"]]
    again = Played()
    with pytest.raises(ModelError, match=r"takes at most 0\.1 ms; nearest: cifar_resnet20_0\.5_int8 is good enough"):
        search(dataclasses.replace(config, target_latency="0.1ms"), run=again)
    assert again.ran == []
    assert len(before) == 5
    assert [row["name"] for row in read_report(config.out)["candidates"]] == before


def test_a_command_that_fails_drops_what_needs_it_and_nothing_else(config: CompressConfig) -> None:
    played = Played(fails={"cifar_resnet20": 2})
    search(config, run=played)
    assert played.ran.count("distill cifar_resnet20") == 1
    assert dropped(config.out)["cifar_resnet20_int8"] == "`dsimg distill` ended with exit code 2"
    assert (config.out / "cifar_resnet56_0.5_int8" / "run.json").exists()
    with pytest.raises(ModelError, match=r"`dsimg export` ended with exit code 1, and nothing can be compared"):
        search(dataclasses.replace(config, out=config.out / "b"), run=Played(fails={SOURCE: 1}))


def test_where_nothing_fits_the_nearest_are_named(config: CompressConfig) -> None:
    config = dataclasses.replace(config, target_latency="1.45ms")
    search(config, run=Played())
    assert (config.out / "winner").exists()
    slow = Played(ms={"cifar_resnet20_0.5_int8": 1.6})
    (config.out / "bench" / "bench.json").unlink()
    with pytest.raises(ModelError) as caught:
        search(config, run=slow)
    assert str(caught.value) == (
        "nothing that was tried is within 1 point of the source and takes at most 1.45 ms; nearest: "
        "cifar_resnet20_int8 is good enough (1.5 ms, +0.00 points). "
        "Give more --epochs, other --students or --ratios, or ask for less."
    )
    assert not (config.out / "winner").exists()
    assert "nothing fits" in (config.out / "report.html").read_text()


def test_no_candidate_is_begun_after_the_budget(config: CompressConfig) -> None:
    played = Played()
    winner = search(dataclasses.replace(config, budget_minutes=1e-9), run=played)
    assert made(played)[1:] == [f"export {SOURCE}", "bench bench"]
    assert dropped(config.out)["cifar_resnet20_fp32"] == "not tried: --budget_minutes 1e-09 were over"
    assert [step.run.path.name for step in ancestry(winner)] == ["winner", "teacher"]
    assert "nothing that is within 1 point of the source is 3% faster" in read_report(config.out)["conclusion"]


def test_another_search_does_not_go_on_with_this_one(config: CompressConfig, tmp_path: Path) -> None:
    search(config, run=Played())
    with pytest.raises(ConfigError, match=r"was begun with other flags: --epochs was 20, now 5\. Choose another --out"):
        search(dataclasses.replace(config, epochs=5), run=Played())
    write_json(config.source / "run.json", {**(Run.open(config.source).manifest or {}), "seed": 1})
    with pytest.raises(RunError, match=r"teacher has been made anew since"):
        search(config, run=Played())
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.jpg").write_bytes(b"precious")
    with pytest.raises(RunError, match="holds something other than a search"):
        search(dataclasses.replace(config, out=tmp_path / "photos"), run=Played())
    with pytest.raises(RunError, match="has no weights to learn from"):
        search(dataclasses.replace(config, source=config.out / "winner", out=tmp_path / "b"), run=Played())


def test_a_run_whose_parent_was_made_anew_is_named(config: CompressConfig) -> None:
    search(config, run=Played())
    student = config.out / "cifar_resnet20"
    write_json(student / "run.json", {**(Run.open(student).manifest or {}), "seed": 1})
    with pytest.raises(RunError, match=r"cifar_resnet20_fp32 was made of another run than .*cifar_resnet20 is now"):
        search(config, run=Played())


@pytest.mark.parametrize("after", ["the lock", "an evaluation's report", "the measurement", "half a winner"])
def test_a_search_that_was_killed_anywhere_goes_on(config: CompressConfig, after: str) -> None:
    out = config.out
    if after == "the lock":
        out.mkdir()
        (out / ".lock").touch()
        (out / ".compress.json.17.tmp").write_text("{")
    else:
        search(config, run=Played())
    if after == "an evaluation's report":
        (out / "cifar_resnet20_int8" / "evaluations" / "compress" / "predictions.csv").unlink()
    if after == "the measurement":
        (out / "report.json").unlink()
    if after == "half a winner":
        (out / "winner").rename(out / ".winner.tmp")
        (out / ".winner.tmp" / "run.json").unlink()
    played = Played()
    winner = search(config, run=played)
    assert ancestry(winner)[-1].run.path == config.source
    assert {path.name for path in out.glob(".*")} <= {".lock", ".compress.json.17.tmp"}
    if after == "an evaluation's report":
        assert played.ran == ["evaluate cifar_resnet20_int8"]


def test_a_source_may_be_called_as_a_candidate_is(config: CompressConfig) -> None:
    source = write_source(config.source.with_name("cifar_resnet56_0.5"))
    search(dataclasses.replace(config, source=source.path, students=()), run=Played())
    rows = {row["name"]: row["commands"] for row in read_report(config.out)["candidates"]}
    assert [line.split()[1] for line in rows["cifar_resnet56_0.5_int8"]] == ["prune", "export", "quantize"]


def test_a_ratio_of_many_digits_is_one_of_six(config: CompressConfig) -> None:
    search(dataclasses.replace(config, students=(), ratios=(0.5000000001,)), run=Played())
    assert read_report(config.out)["candidates"][0]["name"] == "cifar_resnet56_0.5_int8"


def test_what_a_recipe_says_must_stay(config: CompressConfig, tmp_path: Path) -> None:
    config = dataclasses.replace(config, recipe=tmp_path / "r.toml")
    (tmp_path / "r.toml").write_text("weight_decay = 5e-4")
    search(config, run=Played())
    (tmp_path / "r.toml").write_text("weight_decay = 1e-4")
    with pytest.raises(ConfigError, match=r"there is something else in .*r\.toml\. Choose another --out"):
        search(config, run=Played())
    with pytest.raises(ConfigError, match=r"cannot read --recipe .*gone\.toml"):
        search(dataclasses.replace(config, recipe=tmp_path / "gone.toml", out=tmp_path / "b"), run=Played())


def test_on_another_processor_everything_is_measured_anew(
    config: CompressConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    search(config, run=Played())
    monkeypatch.setattr("dsimg_export.chain.processor_name", lambda: "Another processor")
    played = Played()
    search(config, run=played)
    assert [line.split()[0] for line in played.ran] == ["probe", "bench"]


def test_threads_of_the_session_may_change(config: CompressConfig) -> None:
    search(config, run=Played())
    played = Played()
    search(dataclasses.replace(config, latency_threads=2), run=played)
    assert [line.split()[0] for line in played.ran] == ["probe", "bench"]


def test_no_int8_file_is_made_of_a_network_that_training_left_hopeless(config: CompressConfig) -> None:
    played = Played(trained={"cifar_resnet20": 860, "cifar_resnet56_0.5": 900})
    with pytest.raises(ModelError, match="nothing that was tried"):
        search(dataclasses.replace(config, target_latency="0.2"), run=played)  # 1.6 ms, which no fp32 file meets
    assert made(played)[1:] == [f"export {SOURCE}", "distill cifar_resnet20", "bench bench"]
    reasons = dropped(config.out)
    said = "cifar_resnet20 is not good enough (86.00%), and"
    assert reasons["cifar_resnet20_int8"] == f"{said} int8 would have to be better"
    assert reasons["cifar_resnet20_0.5_int8"] == f"{said} it is the wider one"


def test_of_those_that_are_as_fast_the_most_accurate_wins(config: CompressConfig) -> None:
    right = {"cifar_resnet20_0.5_int8": 891, "cifar_resnet20_int8": 895}
    ms = {"cifar_resnet20_0.5_int8": 1.47, "cifar_resnet20_int8": 1.5}
    winner = search(config, run=Played(right=right, ms=ms))
    assert [step.run.path.name for step in ancestry(winner)][1] == "cifar_resnet20_fp32"
    found = read_report(config.out)
    assert [row["name"] for row in found["candidates"] if row["winner"]] == ["cifar_resnet20_int8"]
    assert found["conclusion"].startswith(
        "cifar_resnet20_int8 is as fast as cifar_resnet20_0.5_int8, by less than 3%, and the best within 1 point"
    )


@pytest.mark.parametrize(
    ("played", "reason"),
    [
        (Played(vanishes="cifar_resnet20"), "`dsimg distill` ended before "),
        (Played(fails={"cifar_resnet20": -9}), "`dsimg distill` was ended by signal 9 (out of memory?)"),
        (Played(others="cifar_resnet20_fp32"), "it was measured on other images than the source"),
    ],
)
def test_whatever_a_command_does_the_search_goes_on(config: CompressConfig, played: Played, reason: str) -> None:
    search(config, run=played)
    assert dropped(config.out)["cifar_resnet20_fp32"].startswith(reason)
    assert "bench bench" in played.ran


def test_a_student_that_cannot_be_is_refused_where_it_was_asked_for(
    config: CompressConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compress, "default_students", lambda arch: ("cifar_resnet20",))
    wrong = {"cifar_resnet20": "it cannot take 16x16 images."}
    with pytest.raises(ConfigError, match="--students cifar_resnet20: it cannot take 16x16 images"):
        search(config, run=Played(wrong=wrong))
    search(dataclasses.replace(config, students=None, out=config.out.with_name("b")), run=Played(wrong=wrong))
    assert dropped(config.out.with_name("b"))["cifar_resnet20_int8"] == "it cannot take 16x16 images."


def test_data_that_source_and_students_would_be_measured_on_differently_are_refused(
    config: CompressConfig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"--data digits is no folder\. Leave it out"):
        search(dataclasses.replace(config, data="digits"), run=Played())
    root = make_folder(tmp_path / "photos")
    search(dataclasses.replace(config, data=str(root)), run=Played())
    with pytest.raises(ConfigError, match="has no val/ folder"):
        search(dataclasses.replace(config, data=str(root / "train"), out=tmp_path / "b"), run=Played())


def test_a_source_that_does_not_say_what_it_was_trained_on_asks_for_images(
    config: CompressConfig, tmp_path: Path
) -> None:
    config = dataclasses.replace(config, source=write_source(tmp_path / "bare", images=False).path)
    with pytest.raises(ConfigError, match=r"bare does not say what images it was trained on\. Give them with --data\."):
        search(config, run=Played())
    assert not config.out.exists()
    search(dataclasses.replace(config, data=str(make_folder(tmp_path / "photos"))), run=Played())


@pytest.mark.parametrize(("package", "extra"), [("torch", "train"), ("onnxruntime", "serve")])
def test_what_its_commands_need_is_asked_for_before_anything_is_made(
    config: CompressConfig, monkeypatch: pytest.MonkeyPatch, package: str, extra: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(ConfigError, match=rf"needs {package}: pip install .*'dsimg\[{extra}\]'"):
        compress.compress(config)
    assert not config.out.exists()


def refuse(path: Path) -> None:
    raise OSError(39, "Directory not empty", str(path))


def test_a_winner_that_cannot_be_replaced_is_named(config: CompressConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    search(config, run=Played())
    monkeypatch.setattr(compress, "remove_run", refuse)
    message = r"cannot write in --out .*out: Directory not empty\. Choose another --out\."
    for other in ({"ratios": (1,)}, {"target_latency": "0.1ms"}):
        with pytest.raises(RunError, match=message):
            search(dataclasses.replace(config, **other), run=Played())  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_made_is_an_error_that_says_so(config: CompressConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot write in --out .*file/out"):
        search(dataclasses.replace(config, out=tmp_path / "file" / "out"), run=Played())


def test_it_loads_no_torch() -> None:
    heavy = "{'torch', 'torchvision', 'deepspeed', 'onnxruntime', 'matplotlib'}"
    code = f"import sys, dsimg_export.compress; found = {heavy} & sys.modules.keys(); assert not found, found"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects their attributes and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_is_whole_stands_alone_and_shows_every_command(tmp_path: Path) -> None:
    source = write_source(tmp_path / "a <b> & c")
    config = CompressConfig(source=source.path, out=tmp_path / "out", students=("cifar_resnet20",), ratios=(1, 0.5))
    search(config, run=Played(right={"cifar_resnet20_0.5_int8": 880}))
    parsed = Page()
    parsed.feed((config.out / "report.html").read_text())
    assert parsed.open == []
    assert not {"src", "href", "onload", "onclick"} & {name for name, _ in parsed.attributes}
    for row in read_report(config.out)["candidates"]:
        for words in (*row["commands"], row["name"], f"{row['top1']:.2%}", f"{row['p50_ms']:.3g}"):
            assert words in parsed.words
    for row in read_report(config.out)["dropped"]:
        assert row["reason"] in parsed.words
    assert f"{source.path}" in parsed.words
    assert (config.out / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_drop": 1.0}, r"--max_drop is 1\.0"),
        ({"target_latency": "soon"}, r"--target_latency is soon"),
        ({"ratios": (1, 2)}, r"--ratios is \(1, 2\)"),
        ({"ranks": 0}, r"--ranks is 0"),
        ({"budget_minutes": 0.0}, r"--budget_minutes is 0\.0"),
    ],
)
def test_values_that_mean_nothing_are_refused(tmp_path: Path, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CompressConfig(source=tmp_path, out=tmp_path / "out", **flags)
