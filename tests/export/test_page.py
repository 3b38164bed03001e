import pytest

from dsimg_export.page import log_ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1.0, 10.0, {1.0, 2.0, 5.0, 10.0}), (0.2, 0.6, {0.2, 0.5})],
)
def test_ticks_of_a_logarithmic_axis_are_round_and_within_it(low, high, expected):
    ticks = log_ticks(low, high, most=10)
    assert expected <= set(ticks)
    assert all(low <= tick <= high for tick in ticks)
    assert list(ticks) == sorted(ticks)
    assert len(ticks) <= 10
