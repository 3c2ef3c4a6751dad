"""The interpreter: the program's own results, nothing altered, weights late and values freed
early."""

from collections.abc import Callable, Mapping

import pytest
import torch
from small_programs import NAMES, cases, encoder, program
from torch import Tensor, nn
from torch.export import ExportedProgram, export

from enginecast.passes.ir.interpret import (
    interpret,
    interpret_cases,
)
from enginecast.passes.ir.source import module_path
from enginecast.verification.boundaries import (
    Snapshot,
    is_module_output,
    largest_values,
    snapshots,
)
from enginecast.verification.eager.outputs import reference_program


def snapshot(exported: ExportedProgram, inputs: Mapping[str, Tensor]) -> Snapshot:
    return snapshots(exported, [inputs])[0]


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


def test_digests_tell_one_bit_and_not_the_sign_of_zero() -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()
            self.relu = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.relu(x) * 2.0
            return result

    exported = export(Same(), (torch.ones(4),), strict=False)
    one = snapshot(exported, {"x": torch.tensor([0.0, 1.0, 2.0, 3.0])})
    two = snapshot(exported, {"x": torch.tensor([-0.0, 1.0, 2.0, 3.0])})
    other = snapshot(
        exported, {"x": torch.tensor([0.0, 1.0, 2.0, 3.0]).nextafter(torch.tensor(9.0))}
    )
    assert one.boundaries["relu"][0].digest == two.boundaries["relu"][0].digest
    assert one.boundaries["relu"][0].digest != other.boundaries["relu"][0].digest


def test_ranges_are_of_what_modules_hand_on_without_mask_fills() -> None:
    class Peak(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1e9 * 1e-4
            return y.masked_fill(y < 0, torch.finfo(torch.float32).min)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.peak = Peak()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.peak(x).clamp(min=0.0) * 1e-5 + 1.0
            return result

    x = torch.tensor([-1.0, 2.0])
    largest, _ = largest_values(export(Outer(), (x,)), [{"x": x}])
    handed = {module_path(node): size for node, size in largest.items() if is_module_output(node)}
    assert handed == {"peak": pytest.approx(2e5), "": pytest.approx(3.0)}
