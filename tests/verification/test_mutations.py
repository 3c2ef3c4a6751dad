"""One thing changed in a published engine, and verification must reject it.

The digests are made to fit, so that it is the comparison that finds the change.
"""

from pathlib import Path

import pytest
from exports import Exports
from mutations import Edit, change_epsilon, drop_mask, nothing, outcome, perturb_weight, weights

from enginecast.verification.reference import REFERENCE_NAME, read_reference

MASKS = {"t5": "attention_mask", "bert": "attention_mask", "plain": "keep"}
EPSILONS = {"t5": 1e-4, "bert": 1e-5, "vit": 1e-5, "plain": 1e-4}
SIZES = {"t5": 1.0, "bert": 4.0, "vit": 1.0, "plain": 1.0}
"""In units of the tensor's root mean square.  BERT starts from weights of 0.02 and its norms scale
some channels by 12 here: one such weight more in a value matrix is less than fp32's roundings."""


@pytest.mark.parametrize(
    ("family", "precision", "expected"),
    [("plain", "fp32", "verified"), ("plain", "fp16", "verified-by-emulation")],
)
def test_an_unchanged_copy_passes(
    exports: Exports, tmp_path: Path, family: str, precision: str, expected: str
) -> None:
    assert outcome(exports(family, precision).folder, tmp_path, nothing) == expected


@pytest.mark.parametrize("family", ["plain"])
def test_one_element_of_any_weight_is_found(exports: Exports, tmp_path: Path, family: str) -> None:
    bundle = exports(family).folder
    names = weights(bundle)
    assert len(names) >= 2
    missed = [
        name
        for name in names
        if outcome(bundle, tmp_path / name, perturb_weight(name, SIZES[family])) != "rejected"
    ]
    assert missed == []


def test_one_element_of_an_embedding_that_is_read_is_found(
    exports: Exports, tmp_path: Path
) -> None:
    bundle = exports("t5").folder
    reference = read_reference(bundle / REFERENCE_NAME)
    token = int(reference.cases[0].inputs["input_ids"].flat[0])
    edit = perturb_weight("encoder.embed_tokens.weight", 1.0, index=token * 32 + 9)
    assert outcome(bundle, tmp_path, edit) == "rejected"


@pytest.mark.parametrize("family", MASKS)
def test_a_dropped_mask_is_found(exports: Exports, tmp_path: Path, family: str) -> None:
    assert outcome(exports(family).folder, tmp_path, drop_mask(MASKS[family])) == "rejected"


@pytest.mark.parametrize("family", ["plain"])
def test_another_epsilon_is_found(exports: Exports, tmp_path: Path, family: str) -> None:
    edit = change_epsilon(0, EPSILONS[family])
    assert outcome(exports(family).folder, tmp_path, edit) == "rejected"


@pytest.mark.parametrize(
    ("family", "edit"),
    [
        ("t5", drop_mask("attention_mask")),
        ("plain", drop_mask("keep")),
        # Here eager's own error in fp16 is larger: the engine is compared with itself.
        pytest.param("bert", drop_mask("attention_mask"), marks=pytest.mark.slow),
        ("t5", change_epsilon(0, 0.1)),
        ("plain", change_epsilon(0, 0.01)),
        ("t5", perturb_weight("encoder.block.0.layer.0.SelfAttention.o.weight", 4.0)),
        ("plain", perturb_weight("narrow.weight", 1.0)),
    ],
)
def test_larger_changes_are_found_through_the_noise_of_fp16(
    exports: Exports, tmp_path: Path, family: str, edit: Edit
) -> None:
    assert outcome(exports(family, "fp16").folder, tmp_path, edit) == "rejected"
