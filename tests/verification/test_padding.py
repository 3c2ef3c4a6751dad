"""What stands in padded positions is changed there and nowhere else, and a leak is measured."""

import numpy as np

from enginecast.verification.reference import moved, other_padding

MASK = np.array([[1, 1, 1], [1, 0, 0]])


def test_only_integers_in_padded_positions_change() -> None:
    inputs = {
        "input_ids": np.array([[4, 9, 2], [7, 0, 0]]),
        "attention_mask": MASK,
        "pixels": np.zeros((2, 3, 4), np.float32),
        "labels": np.array([5, 6]),
    }
    changed = other_padding(inputs, "attention_mask")
    assert changed["input_ids"].tolist() == [[4, 9, 2], [7, 9, 9]]
    assert all(changed[name] is inputs[name] for name in ("attention_mask", "pixels", "labels"))
    assert inputs["input_ids"].tolist() == [[4, 9, 2], [7, 0, 0]]


def test_only_rows_that_count_are_measured() -> None:
    before = {"hidden": np.ones((2, 3, 4)), "pooled": np.ones((2, 4))}
    pads, valid = (array["hidden"].copy() for array in (before, before))
    pads[1, 2] = 7.0
    valid[1, 0] = 1.5
    assert moved(before, {"hidden": pads}, MASK, ["hidden"]) == {"hidden": 0.0}
    assert moved(before, {"hidden": valid}, MASK, ["hidden"])["hidden"] > 0.2
