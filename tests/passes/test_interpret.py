"""The interpreter: the program's own results, nothing altered, weights late and values freed
early."""

from collections.abc import Callable

import torch
from small_programs import NAMES, cases, encoder, program
from torch import Tensor, nn

from enginecast.passes.ir.interpret import (
    interpret,
    interpret_cases,
)
from enginecast.verification.boundaries import (
    snapshots,
)
from enginecast.verification.eager.outputs import reference_program


def test_outputs_are_the_programs_own() -> None:
    exported = program(encoder())
    for case in cases():
        wanted = exported.module()(**case.inputs)
        found = interpret(exported, case.inputs, names=NAMES)
        assert list(found) == list(NAMES)
        assert torch.equal(found["hidden"], wanted["hidden"])
        assert torch.equal(found["pooled"], wanted["pooled"])


def test_cases_side_by_side_are_bit_equal_with_cases_alone() -> None:
    for exported in (program(encoder()), reference_program(program(encoder()))):
        alone = [interpret(exported, case.inputs, names=NAMES) for case in cases()]
        together = interpret_cases(exported, [case.inputs for case in cases()], names=NAMES)
        for one, other in zip(alone, together, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_every_module_has_what_leaves_it() -> None:
    exported = program(encoder())
    case = cases()[1]
    masks = [case.inputs["attention_mask"]]
    (found,) = snapshots(exported, [case.inputs], names=NAMES, masks=masks)
    wanted: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
            wanted[name] = output

        return hook

    module = encoder()
    for name, child in module.named_modules():
        if name and not isinstance(child, nn.ModuleList):
            child.register_forward_hook(keep(name))
    module(**case.inputs)
    assert set(wanted) <= set(found.boundaries)
    valid = case.inputs["attention_mask"] != 0
    for name, tensor in wanted.items():
        last = found.boundaries[name][-1]
        assert last.shape == tuple(tensor.shape), name
        torch.testing.assert_close(last.sample, tensor[valid].reshape(-1), rtol=1e-6, atol=1e-6)
    assert found.boundaries["blocks.0.norm"][-1].source.startswith("small_programs.py:")
