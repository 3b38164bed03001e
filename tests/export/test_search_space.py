import pytest

from dsimg_export.search_space import (
    Candidate,
    Measured,
    Probed,
    default_students,
    in_order,
    network_name,
    pareto,
    why_not,
)

PROBED = {
    ("big", 1.0): Probed(macs=100, parameters=9, seconds={"fp32": 0.010, "int8": 0.004}),
    ("big", 0.5): Probed(macs=50, parameters=5, seconds={"fp32": 0.006, "int8": 0.0041}),
    ("small", 1.0): Probed(macs=10, parameters=1, seconds={"fp32": 0.003, "int8": 0.0039}),
    ("small", 0.5): Probed(macs=0, parameters=0, seconds={}, error="nothing can be cut"),
}


def test_students_are_the_smallest_of_the_family():
    assert default_students("cifar_resnet56") == ("cifar_resnet20", "cifar_resnet32", "cifar_resnet44")
    assert default_students("resnet50") == ("resnet18", "resnet34")
    assert default_students("resnet18") == ()
    assert default_students("package.module:function") == ()


def test_order_is_by_the_cost_of_training():
    order = in_order("big", ["small"], [1.0, 0.5], PROBED)
    # Nothing to train; 3 * 10 + 100; the same again, 3 * 0 + 100 more; 3 * 50 + 100.
    assert [(one.arch, one.ratio) for one in order[::2]] == [("big", 1), ("small", 1), ("small", 0.5), ("big", 0.5)]
    assert [one.precision for one in order] == ["fp32", "int8"] * 4


def test_int8_that_is_not_faster_is_dropped_and_a_network_that_cannot_be_is_too():
    good = {Candidate(arch="small", ratio=1.0, precision="fp32"): Measured(accuracy=0.9, low=0.88, high=0.92)}
    common = {"probed": PROBED, "measured": good, "trained": {}, "failed": (), "floor": 0.9, "target": None}
    reason = why_not(Candidate(arch="small", ratio=1.0, precision="int8"), **common)
    assert reason == "not 3% faster than small_fp32, which is good enough: 3.9 ms and 3 ms"
    assert why_not(Candidate(arch="small", ratio=0.5, precision="fp32"), **common) == "nothing can be cut"


def test_a_gain_within_the_measurements_error_is_not_worth_a_training():
    good = {Candidate(arch="big", ratio=1.0, precision="int8"): Measured(accuracy=0.9, low=0.88, high=0.92)}
    common = {"probed": PROBED, "measured": good, "trained": {}, "failed": (), "floor": 0.9, "target": None}
    reason = why_not(Candidate(arch="small", ratio=1.0, precision="int8"), **common)  # 3.9 of 4 ms
    assert reason is not None
    assert why_not(Candidate(arch="small", ratio=1.0, precision="fp32"), **common) is None


@pytest.mark.parametrize(("target", "tried"), [(0.0056, True), (0.0054, False)])
def test_the_probe_may_miss_the_target_by_a_tenth(target, tried):
    one = Candidate(arch="big", ratio=0.5, precision="fp32")  # 6 ms
    assert (why_not(one, probed=PROBED, measured={}, trained={}, failed=(), floor=0.9, target=target) is None) is tried


def test_the_front_is_what_none_beats_in_both():
    points = {"a": (1.0, 0.8), "b": (2.0, 0.9), "c": (2.0, 0.85), "d": (3.0, 0.9), "e": (1.0, 0.8), "f": (9.0, 0.95)}
    assert pareto(points) == {"a", "b", "e", "f"}


def test_names_are_fit_for_folders():
    assert network_name("timm:vit/tiny", 0.25) == "timm_vit_tiny_0.25"
    assert Candidate(arch="resnet18", ratio=1.0, precision="int8").name == "resnet18_int8"


def test_what_meets_the_target_alone_is_tried_though_little_faster():
    near = {
        ("big", 1.0): Probed(macs=100, parameters=9, seconds={"fp32": 0.01, "int8": 0.0051}),
        ("small", 1.0): Probed(macs=10, parameters=1, seconds={"fp32": 0.00499, "int8": 0.00505}),
    }
    good = {Candidate(arch="big", ratio=1.0, precision="int8"): Measured(accuracy=0.9, low=0.88, high=0.92)}
    common = {"probed": near, "measured": good, "trained": {}, "failed": (), "floor": 0.9}
    one = Candidate(arch="small", ratio=1.0, precision="fp32")
    assert why_not(one, **common, target=0.005) is None
    assert why_not(one, **common, target=0.0055) is not None
    assert why_not(Candidate(arch="small", ratio=1.0, precision="int8"), **common, target=0.005) is not None


def test_what_there_will_not_be_loses_no_less():
    one = Candidate(arch="big", ratio=0.5, precision="int8")  # 4.1 ms, and the whole one 4
    common = {"probed": PROBED, "measured": {}, "trained": {}, "floor": 0.9, "target": None}
    assert why_not(one, **common, failed=()) is not None
    assert why_not(one, **common, failed=(Candidate(arch="big", ratio=1.0, precision="int8"),)) is None
