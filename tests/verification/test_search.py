"""Repeated bisection: finds all that does harm, ends whatever things do to each other."""

from collections.abc import Callable, Sequence

import pytest

from enginecast.verification.bisect.search import search

Harm = Callable[[set[int]], bool]


class Counted:
    """Answers, and counts the questions."""

    def __init__(self, harm: Harm) -> None:
        self._harm = harm
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, items: Sequence[int]) -> bool:
        self.asked.append(tuple(items))
        return not self._harm(set(items))


@pytest.mark.parametrize("guilty", [{0}, {15}, {7}, {3, 4}, {0, 15}, {1, 8, 14}])
def test_all_that_does_harm_is_found_and_nothing_else(guilty: set[int]) -> None:
    good = Counted(lambda items: bool(items & guilty))
    found = search(range(16), good)
    assert (set(found.guilty), found.undecided) == (guilty, ())
    assert set(found.kept) == set(range(16)) - guilty
    assert len(good.asked) <= len(guilty) * 5


def test_of_two_that_harm_only_together_one_goes() -> None:
    good = Counted(lambda items: {2, 9} <= items)
    found = search(range(12), good)
    assert found.guilty == (9,)
    assert 2 in found.kept


@pytest.mark.parametrize("most", range(6))
def test_harm_that_adds_up_leaves_as_many_as_can_stay(most: int) -> None:
    found = search(range(6), lambda items: len(items) <= most, 100)
    assert (len(found.kept), found.undecided) == (most, ())


def test_without_budget_the_rest_is_left_out_and_said_to_be_undecided() -> None:
    guilty = set(range(0, 64, 3))
    good = Counted(lambda items: bool(items & guilty))
    found = search(range(64), good, 20)
    assert len(good.asked) == 20
    assert found.undecided
    assert not set(found.kept) & guilty
    assert sorted((*found.kept, *found.guilty, *found.undecided)) == list(range(64))
