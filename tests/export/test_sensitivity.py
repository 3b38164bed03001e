import numpy as np
import pytest

from dsimg_export.sensitivity import fewest, relative_error, together, worst_first


def test_the_error_of_logits_leaves_out_what_changes_no_answer():
    expected = np.array([[1.0, -1.0], [2.0, -2.0]], np.float32)
    assert relative_error(expected + np.array([[5.0], [-3.0]], np.float32), expected) == pytest.approx(0, abs=1e-12)
    assert relative_error(1.5 * expected, expected) == pytest.approx(0.25)


def test_layers_are_ranked_by_the_error_that_each_causes():
    errors = {"stem": 0.1, "middle": 0.5, "head": 0.3}
    assert worst_first(list(errors), errors.__getitem__) == [("middle", 0.5), ("head", 0.3), ("stem", 0.1)]


def test_the_error_of_logits_that_are_not_finite_is_the_worst():
    expected = np.array([[1.0, -1.0]], np.float32)
    assert relative_error(np.array([[np.nan, 1.0]], np.float32), expected) == np.inf


def run_search(search, drop_at):
    """Return what a search finds, and the rounds in which it measured."""
    rounds = []

    def drops_of(asked):
        rounds.append(asked["only"])
        return {"only": [drop_at(number) for number in asked["only"]]}

    return together({"only": search}, drops_of)["only"], rounds


@pytest.mark.parametrize(("at_once", "most"), [(1, 9), (3, 4)])
@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("needed", range(1, 21))
def test_the_fewest_layers_are_found_in_few_rounds(needed, start, at_once, most):
    search = fewest(20, max_drop=0.05, start=start, at_once=at_once)
    found, rounds = run_search(search, lambda count: 0.0 if count >= needed else 0.1)
    assert found == max(needed, start + 1)
    assert len(rounds) <= most
    measured = [number for numbers in rounds for number in numbers]
    assert max(len(numbers) for numbers in rounds) <= at_once
    assert len(set(measured)) == len(measured)


def test_where_even_the_most_are_too_few_nothing_is_found():
    assert run_search(fewest(6, max_drop=0.5), lambda count: 1.0) == (None, [[1], [2], [4], [6]])
    assert run_search(fewest(6, max_drop=0.5, at_once=3), lambda count: 1.0) == (None, [[1, 2, 4], [6]])
    assert run_search(fewest(3, max_drop=0.5, start=3), lambda count: 0.0) == (None, [])


def test_searches_side_by_side_share_their_rounds():
    rounds = []
    needed = {"early": 1, "late": 7, "never": 99}

    def drops_of(asked):
        rounds.append(set(asked))
        return {name: [float(number < needed[name]) for number in numbers] for name, numbers in asked.items()}

    found = together({name: fewest(8, max_drop=0.5) for name in needed}, drops_of)
    assert found == {"early": 1, "late": 7, "never": None}
    assert rounds[0] == {"early", "late", "never"}
    assert rounds[1] == {"late", "never"}
    assert rounds[-1] == {"late"}
