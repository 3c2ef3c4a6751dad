"""The search for the fastest plan within a limit, on errors whose squares add up."""

import math
from collections.abc import Mapping, Sequence

import pytest

from enginecast.passes.quantize.plan.search import MOST_RUNS, Found, Option, search

Layers = Mapping[str, Sequence[Option]]


class Simulated:
    """Adds squares, times a factor that the search does not know; counts its calls."""

    def __init__(self, layers: Layers, factor: float = 1.0) -> None:
        self.layers = layers
        self.factor = factor
        self.calls: list[dict[str, int]] = []

    def __call__(self, chosen: dict[str, int]) -> float:
        self.calls.append(chosen)
        squares = (self.layers[key][place].error ** 2 for key, place in chosen.items())
        return self.factor * math.sqrt(sum(squares))


def forms(error: float, time: float = 1.0) -> list[Option]:
    """A fast form, one with a quarter of the error and half of the speed, and the layer itself."""
    return [Option(error, 0.25 * time, 1), Option(error / 4, 0.5 * time, 1), Option(0, time, 4)]


def found(layers: Layers, limit: float, factor: float = 1.0) -> tuple[Found[str], Simulated]:
    simulated = Simulated(layers, factor)
    fastest = dict.fromkeys(layers, 0)
    return search(layers, simulated, limit, simulated(fastest), fastest), simulated


def test_what_fits_at_once_is_simulated_once() -> None:
    layers = {"a": forms(0.03), "b": forms(0.04)}
    result, simulated = found(layers, 0.05)
    assert result.chosen == {"a": 0, "b": 0}
    assert result.error == pytest.approx(0.05)
    assert (result.runs, result.moves) == (1, 0)
    assert len(simulated.calls) == 1


def test_the_loudest_layer_moves_first_and_no_further_than_it_must() -> None:
    layers = {"quiet": forms(0.01), "loud": forms(0.4), "other": forms(0.01)}
    result, _ = found(layers, 0.2)
    assert result.chosen == {"quiet": 0, "loud": 1, "other": 0}
    result, _ = found(layers, 0.05)
    assert result.chosen == {"quiet": 0, "loud": 2, "other": 0}


@pytest.mark.parametrize("factor", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("count", [3, 40, 900])
def test_few_simulations_find_the_last_plan_that_fits(count: int, factor: float) -> None:
    layers = {str(i): forms(0.02 + 0.001 * (i * 7 % 13)) for i in range(count)}
    limit = 0.4 * factor * math.sqrt(count) * 0.026
    result, simulated = found(layers, limit, factor)
    assert result.error <= limit
    assert result.error == Simulated(layers, factor)(result.chosen)
    assert len(simulated.calls) == result.runs <= MOST_RUNS
    assert all(Simulated(layers, factor)(c) > limit for c in simulated.calls if _less(c, result))


def _less(chosen: Mapping[str, int], result: Found[str]) -> bool:
    """Whether a choice has fewer moves than the result."""
    return sum(chosen.values()) < sum(result.chosen.values())
