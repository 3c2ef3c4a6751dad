"""One thing changed in a published engine, and verification must reject it.

The digests are made to fit, so that it is the comparison that finds the change.
"""

from pathlib import Path

import pytest
from exports import Exports
from mutations import Edit, change_epsilon, drop_mask, nothing, outcome, perturb_weight, weights

from enginecast.verification.reference import REFERENCE_NAME, read_reference


@pytest.mark.parametrize(
    ("family", "precision", "expected"),
    [("plain", "fp32", "verified"), ("plain", "fp16", "verified-by-emulation")],
)
def test_an_unchanged_copy_passes(
    exports: Exports, tmp_path: Path, family: str, precision: str, expected: str
) -> None:
    assert outcome(exports(family, precision).folder, tmp_path, nothing) == expected


def test_one_element_of_any_weight_is_found(exports: Exports, tmp_path: Path) -> None:
    bundle = exports("plain").folder
    names = weights(bundle)
    assert len(names) >= 2
    missed = [
        name
        for name in names
        if outcome(bundle, tmp_path / name, perturb_weight(name, 1.0)) != "rejected"
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


@pytest.mark.parametrize(("family", "mask"), [("t5", "attention_mask"), ("plain", "keep")])
def test_a_dropped_mask_is_found(exports: Exports, tmp_path: Path, family: str, mask: str) -> None:
    assert outcome(exports(family).folder, tmp_path, drop_mask(mask)) == "rejected"


def test_another_epsilon_is_found(exports: Exports, tmp_path: Path) -> None:
    edit = change_epsilon(0, 1e-4)
    assert outcome(exports("plain").folder, tmp_path, edit) == "rejected"


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
