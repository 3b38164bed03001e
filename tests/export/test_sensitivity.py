import numpy as np
import pytest

from dsimg_export.sensitivity import fewest, relative_error, worst_first


def test_the_error_of_logits_leaves_out_what_changes_no_answer():
    expected = np.array([[1.0, -1.0], [2.0, -2.0]], np.float32)
    assert relative_error(expected + np.array([[5.0], [-3.0]], np.float32), expected) == pytest.approx(0, abs=1e-12)
    assert relative_error(1.5 * expected, expected) == pytest.approx(0.25)


def test_layers_are_ranked_by_the_error_that_each_causes():
    errors = {"stem": 0.1, "middle": 0.5, "head": 0.3}
    assert worst_first(list(errors), errors.__getitem__) == [("middle", 0.5), ("head", 0.3), ("stem", 0.1)]


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("needed", range(1, 21))
def test_the_fewest_layers_are_found_in_few_measurements(needed, start):
    measured = []

    def drop_at(count):
        measured.append(count)
        return 0.0 if count >= needed else 0.1

    found = fewest(20, drop_at, max_drop=0.05, start=start)
    assert found == max(needed, start + 1)
    assert len(measured) <= 9
    assert len(set(measured)) == len(measured)


def test_where_even_the_most_are_too_few_nothing_is_found():
    measured = []
    assert fewest(6, lambda count: measured.append(count) or 1.0, max_drop=0.5) is None
    assert measured == [1, 2, 4, 6]
    assert fewest(3, lambda count: 0.0, max_drop=0.5, start=3) is None
