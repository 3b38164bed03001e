"""The error tree, and the near name in a message."""

import pytest

from dsimg import errors
from dsimg.errors import DsimgError, near


@pytest.mark.parametrize(
    ("name", "expected"),
    [("resnet5", ", did you mean 'resnet50'?"), ("resnet50", ", did you mean 'resnet50'?"), ("zebra", "."), ("", ".")],
)
def test_near_ends_a_sentence(name: str, expected: str) -> None:
    assert near(name, ["alexnet", "resnet50"]) == expected


def test_every_error_is_one_that_a_user_can_mend() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__}
    kinds.remove(errors.StopRequested)  # no error
    assert all(issubclass(kind, DsimgError) for kind in kinds)
    assert {kind.__name__ for kind in kinds} == {
        word for word in (errors.__doc__ or "").split() if word.endswith("Error")
    }
