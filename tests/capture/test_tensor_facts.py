"""What is known of a tensor, and until when."""

import pytest
import torch

from enginecast.capture.python.tensor_facts import TensorFacts


def test_a_fact_holds_until_something_is_written_into_the_memory() -> None:
    facts, whole = TensorFacts[str](), torch.zeros(3, 2)
    part = whole[:, :1]
    facts.note(whole, "zeros")
    facts.note(part, "a column of zeros")
    assert (facts.of(whole), facts.of(part), facts.of(whole.clone())) == (
        "zeros",
        "a column of zeros",
        None,
    )
    part.add_(1)
    assert facts.of(whole) is None
    assert facts.of(part) is None
    assert whole in facts
    facts.note(whole, "a column of ones")
    assert facts.of(whole) == "a column of ones"


@pytest.mark.parametrize("value", [None, 3, "text"])
def test_nothing_is_known_of_what_is_no_tensor(value: object) -> None:
    assert TensorFacts[str]().of(value) is None


def test_nothing_is_noted_of_a_tensor_that_counts_no_writes() -> None:
    with torch.inference_mode():
        found = torch.ones(2)
    facts = TensorFacts[str]()
    facts.note(found, "ones")
    assert facts.of(found) is None
