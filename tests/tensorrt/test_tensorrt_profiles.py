"""The shapes that an engine is built for, and which of its profiles a run takes."""

from typing import Any

import pytest

from enginecast.errors import InputError, UsageError
from enginecast.exporters.tensorrt.options import (
    NetworkOptions,
    parse_optimal,
    parse_profiles,
)
from enginecast.exporters.tensorrt.profiles import left_out, profiles_of
from enginecast.runtime.bundle.manifest import Input, ShapeRange
from enginecast.runtime.sessions.tensorrt.errors import Messages
from enginecast.runtime.sessions.tensorrt.loaded_engine import LoadedEngine, Tensor

IDS = Input(name="ids", kind="token_ids", dtype="int64", shape=("batch", "sequence"))
IMAGE = Input(name="pixels", kind="image", dtype="float32", shape=("batch", 3, 16, 16))
FIXED = Input(name="bias", kind="tensor", dtype="float32", shape=(4, 4))
RANGES = {"batch": (1, 8), "sequence": (2, 512)}
STEPS = {"batch": 1, "sequence": 2}
SHORT, LONG = "ids=1x2,1x16,1x128", "ids=2x256,4x256,8x512"


def sizes(
    *inputs: Input, ranges: Any = RANGES, steps: Any = STEPS, **given: Any
) -> list[tuple[Any, ...]]:
    """Of each input in each profile: its number, and least, optimal and greatest shape."""
    found = profiles_of(inputs, ranges, NetworkOptions(**given), steps=steps)
    for number, profile in enumerate(found):
        assert {one.profile for one in profile} == {number}
    return [(x.name, x.profile, x.least, x.optimal, x.greatest) for p in found for x in p]


def test_default_profiles_are_a_short_row_a_row_and_a_batch() -> None:
    assert sizes(IDS, FIXED) == [
        ("ids", 0, (1, 2), (1, 128), (1, 128)),
        ("ids", 1, (1, 2), (1, 512), (1, 512)),
        ("ids", 2, (1, 2), (8, 128), (8, 512)),
    ]
    assert sizes(IMAGE, ranges={"batch": (1, 8)}, steps={}) == [
        ("pixels", 0, (1, 3, 16, 16), (1, 3, 16, 16), (1, 3, 16, 16)),
        ("pixels", 1, (1, 3, 16, 16), (8, 3, 16, 16), (8, 3, 16, 16)),
    ]
    for low, high, step, short in ((48, 240, 48, 48), (32, 512, 32, 128), (0, 64, 1, 16)):
        ranges, steps = {"batch": (1, 1), "sequence": (low, high)}, {"sequence": step}
        found = sizes(IDS, ranges=ranges, steps=steps)
        assert [optimal for *_, optimal, _ in found] == [(1, short), (1, high), (1, short)]
    assert sizes(FIXED) == []


def test_a_sum_has_the_size_of_its_parts_in_each_shape() -> None:
    """As of a cache: the past may be empty, and one of a fixed size has no symbol."""
    mask = Input(name="mask", kind="attention_mask", dtype="int64", shape=("batch", "total"))
    past = Input(name="past", kind="tensor", dtype="float32", shape=("batch", 4, "past", 8))
    ranges = {"batch": (1, 1), "sequence": (1, 64), "past": (0, 63), "total": (1, 64)}

    def totals(*inputs: Input, **given: Any) -> list[tuple[int, ...]]:
        sums = {"total": (("past", 5), ("sequence", 1))}
        found = profiles_of(inputs, ranges, NetworkOptions(**given), sums)
        masks = [one for each in found for one in each if one.name == "mask"]
        return [(x.least[1], x.optimal[1], x.greatest[1]) for x in masks]

    assert totals(IDS, mask, past) == [(1, 31, 31), (1, 127, 127), (1, 31, 127)]
    assert totals(IDS, mask)[0] == (6, 21, 21)
    assert totals(IDS, mask, past, optimal=parse_optimal(["ids=1x8"])) == [(1, 71, 127)]
    ids, own = "ids=1x1,1x4,1x8", "; mask=1x2,1x3,1x9"
    assert totals(IDS, mask, past, profiles=parse_profiles([ids, ids + own])) == [
        (1, 67, 71),
        (2, 3, 9),
    ]


def test_the_user_s_profiles_take_the_place_of_the_default_ones() -> None:
    assert sizes(IDS, profiles=parse_profiles([SHORT, LONG])) == [
        ("ids", 0, (1, 2), (1, 16), (1, 128)),
        ("ids", 1, (2, 256), (4, 256), (8, 512)),
    ]
    both = parse_profiles(["ids=1x2,1x2,8x512; pixels=1x3x16x16,1x3x16x16,8x3x16x16"])
    assert sizes(IDS, IMAGE, profiles=both)[1][0] == "pixels"
    rest = sizes(IDS, IMAGE, profiles=parse_profiles(["pixels=1x3x16x16,2x3x16x16,8x3x16x16"]))
    assert rest[0] == ("ids", 0, (1, 2), (2, 512), (8, 512))
    optimal = parse_optimal(["ids=2x16"])
    assert sizes(IDS, optimal=optimal) == [("ids", 0, (1, 2), (2, 16), (8, 512))]


PROFILE, OPTIMAL = "--profile ", "--target-option opt-shape="


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("id=1x2,1x2,1x2", f"{PROFILE}id=1x2: expected one of the inputs ids, pixels"),
        ("ids=1,1,1", "ids=1: expected 2 sizes, as of batchxsequence, got 1"),
        ("ids=1x2,1x2,9x2", f"{PROFILE}ids=9x2: expected batch from 1 to 8, got 9"),
        ("ids=1x1,1x2,1x3", "ids=1x1: expected sequence from 2 to 512, got 1"),
        ("ids=1x2,1x3,8x512", f"{PROFILE}ids=1x3: expected sequence in steps of 2, got 3"),
        ("ids=2x2,2x2,8x512", "--profile: batch from 2 to 8, and --dynamic has it from 1 to 8, wh"),
        ("ids=1x2,1x2,8x64", "--profile: sequence from 2 to 64, and --dynamic has it from 2 to 5"),
        ("ids=1x4,1x2,1x9", f"{PROFILE}ids=1x4,1x2,1x9: expected three shapes of one rank, of wh"),
        ("ids=1x4,1x4,4", "1x4,1x4,4: expected three shapes of one rank, of which none has a gre"),
        (
            "ids=1x2,1x2,2x2;pixels=1x3x16x16,1x3x16x16,1x3x16x16",
            f"{PROFILE}pixels=1x3x16x16: batch is 1 here and 2 in {PROFILE}ids=2x2",
        ),
        ("pixels=1x3x16x17,1x3x16x17,1x3x16x17", "1x3x16x17: expected 16, which is fixed, got 17"),
        ("ids=1x2,1x2", f"{PROFILE}ids=1x2,1x2: expected NAME=1x16,4x64,8x256, the least"),
        ("ids=1x2,1x2,1x2;ids=1x2,1x2,1x2", "ids occurs twice; give each profile its own"),
        (["ids=1x5"], f"{OPTIMAL}ids=1x5: expected sequence in steps of 2, got 5"),
        (["ids=1x1"], f"{OPTIMAL}ids=1x1: expected sequence from 2 to 512, got 1"),
        (["ids=1x2", "pixels=2x3x16x16"], "batch is 2 here and 1 in --target-option opt-shape=ids"),
    ],
)
def test_refused_shapes(given: str | list[str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        refused(given)
    assert said in caught.value.message


def refused(given: str | list[str]) -> None:
    if isinstance(given, str):
        sizes(IDS, IMAGE, profiles=parse_profiles([given]))
    else:
        sizes(IDS, IMAGE, optimal=parse_optimal(given))


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ((), ()),
        (("ids=1x2,1x2,8x512",), ()),
        (("ids=1x2,1x2,4x256", "ids=5x256,5x256,8x512"), ()),
        (
            ("ids=1x2,1x2,2x8", "pixels=8x3x16x16,8x3x16x16,8x3x16x16"),
            ("batch: 3..7 are in no pr",),
        ),
        (
            (SHORT, "ids=3x132,3x132,4x160", "ids=8x256,8x256,8x512"),
            ("batch: 2 and 5..7 are in no profile; sequence: 130 and 162..254 are in no profile",),
        ),
        (("ids=1x4,1x4,7x512", "ids=1x4,1x4,8x512"), ("sequence: 0..2 are in no profile",)),
        (("ids=1x2,1x2,7x512", "ids=1x4,1x4,8x512"), ("sequence: 0 is in no profile",)),
    ],
)
def test_sizes_between_profiles_are_told(texts: tuple[str, ...], said: tuple[str, ...]) -> None:
    ranges = RANGES | {"sequence": (0, 512)} if said and "sequence: 0" in said[0] else RANGES
    inputs, options = (IDS, IMAGE), NetworkOptions(profiles=parse_profiles(texts))
    profiles = profiles_of(inputs, ranges, options, steps=STEPS)
    told = left_out(inputs, ranges, STEPS, profiles)
    assert [a.startswith(b) for a, b in zip(told, said, strict=True)] == [True] * len(said), told


def test_a_range_without_an_end_is_refused() -> None:
    with pytest.raises(UsageError, match="sequence has no upper bound") as caught:
        sizes(IDS, ranges=RANGES | {"sequence": (2, 2**40)})
    assert "--dynamic ids:1=2..512" in caught.value.hint


def engine(*texts: str) -> LoadedEngine:
    """An engine of these profiles, of which nothing is loaded."""
    found = profiles_of([IDS], RANGES, NetworkOptions(profiles=parse_profiles(texts)))
    shapes: list[dict[str, ShapeRange]] = [{one.name: one for one in each} for each in found]
    ids = Tensor("ids", "ids", "int64", (-1, -1))
    bias = Tensor("bias", "bias", "float32", (4, 4))
    return LoadedEngine(
        None, None, "engine.plan", (ids, bias), (), tuple(shapes), Messages(), keep=()
    )


@pytest.mark.parametrize(
    ("shape", "number"), [((1, 2), 0), ((1, 128), 0), ((2, 256), 1), ((8, 512), 1)]
)
def test_a_run_takes_the_first_profile_that_has_its_shapes(
    shape: tuple[int, int], number: int
) -> None:
    assert engine(SHORT, LONG).profile_for([shape, (4, 4)]) == number


@pytest.mark.parametrize("shape", [(1, 200), (2, 128), (1, 1), (8, 513)])
def test_a_shape_between_two_profiles_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(InputError) as caught:
        engine(SHORT, LONG).profile_for([shape, (4, 4)])
    assert caught.value.message == (
        "engine.plan: expected shapes of one profile: ids [1, 2]..[1, 128]; ids [2, 256]..[8, 512];"
        f" got ids {list(shape)}"
    )
