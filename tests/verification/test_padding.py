"""What stands in padded positions is changed there and nowhere else, and a leak is measured."""

import numpy as np

from enginecast.verification.reference import moved, other_padding, padded_case

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


def test_padding_does_not_become_placeholders() -> None:
    inputs = {"input_ids": np.array([[4, 9, 9, 2], [9, 9, 0, 0]]), "mask": np.ones((2, 4))}
    inputs["mask"][1, 2:] = 0
    assert other_padding(inputs, "mask")["input_ids"].tolist() == [[4, 9, 9, 2], [9, 9, 4, 4]]


def test_padding_of_a_batch_of_one_does_not_become_a_placeholder() -> None:
    ids = np.array([[5, 90, 90, 7, 0, 0]])  # 90 stands for the features of an image
    inputs = {"input_ids": ids, "mask": np.array([[1, 1, 1, 1, 0, 0]])}
    changed = other_padding(inputs, "mask")["input_ids"]
    assert changed[0, :4].tolist() == [5, 90, 90, 7]
    assert set(changed[0, 4:].tolist()).isdisjoint({0, 5, 7, 90})
    dense = {"kinds": np.array([[0, 1, 2, 0]]), "mask": np.array([[1, 1, 1, 0]])}
    assert other_padding(dense, "mask")["kinds"].tolist() == [[0, 1, 2, 2]]


def test_the_smallest_case_with_padding_is_taken() -> None:
    full, empty = np.ones((1, 2)), np.zeros((1, 2))
    masks = {"full": full, "empty": empty, "large": np.tile(MASK, (1, 3)), "small": MASK}
    assert padded_case(masks) == "small"
    assert padded_case({"full": full, "empty": empty, "none": None}) is None
    assert padded_case({}) is None


def test_only_rows_that_count_are_measured() -> None:
    before = {"hidden": np.ones((2, 3, 4)), "pooled": np.ones((2, 4))}
    pads, valid = (array["hidden"].copy() for array in (before, before))
    pads[1, 2] = 7.0
    valid[1, 0] = 1.5
    assert moved(before, {"hidden": pads}, MASK, ["hidden"]) == {"hidden": 0.0}
    assert moved(before, {"hidden": valid}, MASK, ["hidden"])["hidden"] > 0.2


def test_marks_of_a_single_row_are_not_padded_with_marks() -> None:
    mask = np.array([[1, 1, 1, 0]])
    marks = np.array([[0, 1, 1, 0]])

    assert other_padding({"m": mask, "marks": marks}, "m")["marks"].tolist() == [[0, 1, 1, 0]]


def test_numbers_of_several_for_each_token_are_padded_otherwise() -> None:
    boxes = np.array([[[1, 2], [3, 4], [0, 0]], [[1, 2], [3, 9], [5, 6]]])
    mask = np.array([[1, 1, 0], [1, 1, 1]])

    found = other_padding({"mask": mask, "boxes": boxes}, "mask")["boxes"]
    assert found[0, 2].tolist() != [0, 0]
    assert found[:, :2].tolist() == boxes[:, :2].tolist()
