from collections import defaultdict

import numpy as np
import pytest

from dsimg.channels import Unit
from dsimg.widths import kept_after, removal_order, search


def unit(channels, *, name="a", kind="conv", width=1):
    return Unit(name, kind, channels, (), width)


def order(units, scores, *, round_to=1, max_ratio=0.9):
    """Return the removal order as [(unit, [channels])]."""
    blocks = removal_order(units, [np.array(s, float) for s in scores], round_to=round_to, max_ratio=max_ratio)
    return [(block.unit, block.channels.tolist()) for block in blocks]


def test_channels_go_by_ascending_score_and_ties_by_index():
    assert order([unit(4)], [[3, 1, 2, 1]], max_ratio=0.75) == [(0, [1]), (0, [3]), (0, [2])]
    assert order([unit(100)], [[7] * 100], max_ratio=0.9) == [(0, [channel]) for channel in range(90)]


def test_blocks_leave_multiples_and_the_first_aligns():
    scores = [np.arange(11)]
    assert order([unit(11)], scores, round_to=4) == [(0, [0, 1, 2]), (0, [3, 4, 5, 6])]
    assert order([unit(8)], [np.arange(8)], round_to=4) == [(0, [0, 1, 2, 3])]


@pytest.mark.parametrize(
    ("channels", "round_to", "width"), [(16, 16, 1), (9, 16, 1), (2, 16, 8), (1, 1, 1), (1, 16, 32)]
)
def test_a_unit_no_wider_than_a_block_is_never_cut(channels, round_to, width):
    assert order([unit(channels, width=width)], [np.arange(channels)], round_to=round_to, max_ratio=1.0) == []


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (8, [[0], [1, 2], [3, 4]]),  # 7 channels of 8: two make 16
        (12, [[0, 1, 2]]),  # lcm(16, 12) = 48: four stay
        (32, [[0], [1], [2], [3], [4], [5]]),  # each channel is aligned by itself
    ],
)
def test_wide_channels_go_in_the_fewest_that_align(width, expected):
    assert [channels for _, channels in order([unit(7, width=width)], [np.arange(7)], round_to=16)] == expected


@pytest.mark.parametrize(("max_ratio", "removed"), [(0.0, 0), (0.005, 0), (0.29, 29), (0.5, 50), (0.58, 58), (1.0, 99)])
def test_the_cap_is_a_share_of_the_unit(max_ratio, removed):
    assert len(order([unit(100)], [np.arange(100)], max_ratio=max_ratio)) == removed  # 0.29 * 100 is 28.999...


def test_units_of_a_kind_are_ranked_by_mean_score():
    scores = [[1, 4, 9, 9], [2, 3, 9, 9]]
    assert order([unit(4), unit(4)], scores, max_ratio=0.5) == [(0, [0]), (1, [0]), (1, [1]), (0, [1])]


def test_kinds_lose_the_same_share_whatever_their_scores():
    units = [unit(4, kind="small"), unit(8, kind="large")]
    scores = [[100, 200, 300, 400], np.arange(8)]
    # After every two of large (2/8) one of small (1/4); of equal quantiles the earlier unit's goes first.
    expected = [(1, [0]), (0, [0]), (1, [1]), (1, [2]), (0, [1]), (1, [3])]
    assert order(units, scores, max_ratio=0.5) == expected


def test_kept_after_counts_the_blocks_that_went():
    units = [unit(4), unit(3)]
    blocks = removal_order(units, [np.array([3.0, 1, 2, 4]), np.array([9.0, 0, 8])], round_to=1, max_ratio=0.9)
    assert [kept.tolist() for kept in kept_after(units, blocks, 0)] == [[0, 1, 2, 3], [0, 1, 2]]
    assert [kept.tolist() for kept in kept_after(units, blocks, 2)] == [[0, 2, 3], [0, 2]]
    assert [kept.tolist() for kept in kept_after(units, blocks, len(blocks))] == [[3], [0]]


@pytest.mark.parametrize("seed", range(20))
def test_any_number_of_blocks_keeps_widths_aligned_capped_and_ordered(seed):
    rng = np.random.default_rng(seed)
    round_to, max_ratio = int(rng.choice([1, 4, 8, 16])), float(rng.choice([0.3, 0.5, 0.75, 1.0]))
    units = [
        unit(int(rng.integers(1, 80)), kind=str(rng.integers(3)), width=int(rng.choice([1, 1, 3, 8, 32])))
        for _ in range(12)
    ]
    # Few distinct scores, not representable exactly: ties within and between units, means that round.
    scores = [rng.integers(1, 4, size=u.channels) / 10 for u in units]
    blocks = removal_order(units, scores, round_to=round_to, max_ratio=max_ratio)
    assert blocks
    for count in range(len(blocks) + 1):
        touched = {block.unit for block in blocks[:count]}
        for number, (u, kept) in enumerate(zip(units, kept_after(units, blocks, count), strict=True)):
            assert (np.diff(kept) > 0).all()
            if number not in touched:
                assert len(kept) == u.channels
                continue
            assert len(kept) * u.width % round_to == 0
            assert len(kept) * u.width >= round_to
            assert len(kept) >= (1 - max_ratio) * u.channels - 1e-9
            gone = np.setdiff1d(np.arange(u.channels), kept)
            assert scores[number][gone].max() <= scores[number][kept].min()
    assert order(units, scores, round_to=round_to, max_ratio=max_ratio) == [
        (block.unit, block.channels.tolist()) for block in blocks
    ]


@pytest.mark.parametrize("seed", range(5))
def test_kinds_never_differ_by_more_than_a_block(seed):
    rng = np.random.default_rng(seed)
    units = [unit(int(rng.integers(4, 12)) * 16, kind=kind) for kind in "aabbbcccc"]
    scores = [rng.random(u.channels) * rng.choice([1e-6, 1.0, 1e6]) for u in units]
    blocks = removal_order(units, scores, round_to=16, max_ratio=0.75)
    totals, gone = defaultdict(int), defaultdict(int)
    for u in units:
        totals[u.kind] += u.channels
    for block in blocks:
        gone[units[block.unit].kind] += len(block.channels)
        shares = {kind: gone[kind] / totals[kind] for kind in totals}
        if max(shares.values()) > 0.5:
            break
        assert max(shares.values()) - min(shares.values()) <= max(16 / total for total in totals.values())
    assert max(shares.values()) > 0.5


def measured(values):
    """Return a measure over a list and the calls it saw."""
    calls = []

    def measure(count):
        calls.append(count)
        return float(values[count])

    return measure, calls


@pytest.mark.parametrize("size", [1, 2, 3, 64, 1000])
def test_search_finds_the_nearest_in_few_calls(size):
    rng = np.random.default_rng(size)
    values = 100 - np.cumsum(rng.random(size) + 0.01)
    for target in [101.0, *rng.uniform(values[-1], values[0], 20), values[size // 2], values[-1] - 1]:
        measure, calls = measured(values)
        count, value = search(size - 1, measure, target=target)
        assert (count, value) == (np.abs(values - target).argmin(), values[count])
        assert len(calls) == len(set(calls)) <= np.log2(size) + 3


def test_search_of_a_target_out_of_reach_gives_the_end_and_says_so_by_its_value():
    measure, calls = measured([10, 9, 8])
    assert search(2, measure, target=5.0) == (2, 8.0)
    assert calls == [2, 0]
    assert search(2, measured([10, 9, 8])[0], target=12.0) == (0, 10.0)


def test_search_takes_the_nearer_end_where_cutting_makes_it_worse():
    assert search(3, measured([5, 5.5, 6, 7])[0], target=2.5) == (0, 5.0)


def test_search_prefers_fewer_blocks_of_two_as_near():
    assert search(3, measured([10, 8, 6, 4])[0], target=7.0) == (1, 8.0)


def test_search_ends_within_the_tolerance():
    values = np.linspace(10, 1, 101)
    measure, calls = measured(values)
    count, value = search(100, measure, target=5.3, tolerance=0.3)
    assert (count, value) == (50, 5.5)
    assert calls == [100, 0, 50]


def test_search_gives_the_nearest_it_measured_when_calls_run_out():
    values = np.linspace(10, 1, 1001)
    measure, calls = measured(values)
    count, value = search(1000, measure, target=4.0, max_calls=4)
    assert calls == [1000, 0, 500, 750]
    assert (count, value) == (750, values[750])


@pytest.mark.parametrize("seed", range(10))
def test_search_survives_noise_and_stairs(seed):
    rng = np.random.default_rng(seed)
    values = np.floor(np.linspace(40, 8, 200)) / 8 * rng.uniform(0.98, 1.02, 200)
    measure, calls = measured(values)
    count, value = search(199, measure, target=2.5, tolerance=0.1, max_calls=10)
    assert value == values[count]
    assert abs(value - 2.5) <= 0.125
    assert len(calls) <= 10


def test_the_cap_holds_over_all_cuts_together():
    """Of 16 channels 8 had gone before: a cap of three quarters leaves 4 more to go, not 6."""
    scores = [np.arange(8.0)]
    blocks = removal_order([unit(8)], scores, round_to=1, max_ratio=0.75, whole=[16])
    assert [block.channels.tolist() for block in blocks] == [[0], [1], [2], [3]]
    assert removal_order([unit(8)], scores, round_to=1, max_ratio=0.5, whole=[16]) == []
