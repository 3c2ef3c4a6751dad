"""Captured programs compute what eager computes, bit for bit, from weights of any dtype."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from models import tiny_bert, tiny_llama, tiny_t5, tiny_vit
from slow_cases import some_slow
from torch import Tensor, nn
from torch.export import ExportedProgram

from enginecast.capture.inputs.examples import example_sizes, sample, verification_inputs
from enginecast.capture.inputs.given import apply_dynamic, parse_dynamic
from enginecast.capture.inputs.specs import ranges_of
from enginecast.capture.outputs.flatten import name_result
from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.factory import FactorySource
from enginecast.capture.sources.open_source import open_source
from enginecast.capture.tracing.captured import Captured, capture
from enginecast.errors import CaptureError, SourceError

MAKERS = {"t5": tiny_t5, "bert": tiny_bert, "llama": tiny_llama, "vit": tiny_vit}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def captured(source: Source, *options: str) -> Captured:
    specs = apply_dynamic(source.inputs(), [parse_dynamic(text) for text in options])
    return capture(source, specs, sample(specs, example_sizes(specs), seed=0))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for kind, make in MAKERS.items():
        for name, dtype in DTYPES.items():
            make(root / f"{kind}-{name}", dtype=dtype)
    tiny_t5(root / "t5_relu-fp16", dtype=torch.float16, gated=False)
    return root


class Programs(dict[str, tuple[Source, Captured]]):
    """Captures each model once, when a test asks for it."""

    def __init__(self, folders: Path) -> None:
        super().__init__()
        self.folders = folders

    def __missing__(self, name: str) -> tuple[Source, Captured]:
        source = open_source(str(self.folders / name))
        return self.setdefault(name, (source, captured(source)))


@pytest.fixture(scope="module")
def programs(folders: Path) -> Programs:
    return Programs(folders)


NAMES = (*(f"{kind}-{dtype}" for kind in MAKERS for dtype in DTYPES), "t5_relu-fp16")


@pytest.mark.parametrize("name", some_slow(NAMES, {*NAMES} - {"t5-fp16"}))
def test_program_equals_fp32_eager_of_the_same_file(programs: Programs, name: str) -> None:
    source, result = programs[name]
    module, eager = result.program.module(), source.eager()
    cases = verification_inputs(result.inputs, seed=1)
    assert len(cases) == (5 if name.startswith("vit") else 7)
    for case in cases:
        with torch.no_grad():
            expected = name_result(eager(**case.inputs)).tensors
            actual = module(**case.inputs)
        assert list(actual) == list(expected) == [spec.name for spec in result.outputs]
        for output, tensor in expected.items():
            assert tensor.abs().max() > 0.1  # an all-zero output would agree with anything
            assert torch.equal(actual[output], tensor), f"{case.name}: {output}"


def stored_dtypes(program: ExportedProgram) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in program.state_dict.items()}


@pytest.mark.parametrize("name", ["t5-fp16", "bert-fp16"])
def test_weights_are_bound_as_they_are_stored(programs: Programs, name: str) -> None:
    source, result = programs[name]
    weights = source.weights()
    assert stored_dtypes(result.program) == {key: t.dtype for key, t in weights.items()}
    for node in result.program.graph.nodes:
        if node.op != "placeholder":
            continue
        target = result.program.graph_signature.inputs_to_parameters.get(node.name)
        if target is not None:
            assert node.meta["val"].dtype == weights[target].dtype
    assert not any(isinstance(t, nn.Parameter) and t.requires_grad for t in state(result))


def state(result: Captured) -> list[Tensor]:
    return [*result.program.state_dict.values(), *result.program.constants.values()]


def test_binding_casts_stand_right_behind_the_placeholders(
    programs: Programs,
) -> None:
    nodes = list(programs["t5-fp16"][1].program.graph.nodes)
    count = sum(node.op == "placeholder" for node in nodes)
    casts = [node for node in nodes if node.name.endswith("_f32")]
    assert casts == nodes[count : count + len(casts)]
    for cast in casts:
        assert cast.target is torch.ops.aten.to.dtype
        assert cast.args == (cast.args[0], torch.float32)
        assert cast.name == f"{cast.args[0].name}_f32"
        assert cast.meta["val"].dtype == torch.float32
        assert "nn_module_stack" not in cast.meta
        assert list(cast.args[0].users) == [cast]
    assert not any("wo" in cast.name for cast in casts)  # stored in fp32, needs none


def test_signature_of_a_text_model(programs: Programs) -> None:
    result = programs["bert-fp16"][1]
    assert ranges_of(result.inputs) == {"batch": (1, 64), "sequence": (1, 64)}
    assert [spec.name for spec in result.inputs] == ["input_ids", "attention_mask"]
    assert [(spec.name, spec.dims) for spec in result.outputs] == [
        ("last_hidden_state", ("batch", "sequence", 32)),
        ("pooler_output", ("batch", 32)),
    ]
    assert result.notes == ()


def test_a_program_file_is_taken_as_it_is(programs: Programs, tmp_path: Path) -> None:
    first = programs["t5-fp16"][1]
    torch.export.save(first.program, tmp_path / "t5.pt2")
    source = open_source(str(tmp_path / "t5.pt2"), allow_code=True)
    result = capture(source, (), {})
    assert [spec.name for spec in result.inputs] == ["input_ids", "attention_mask"]
    assert [(spec.low, spec.high) for spec in result.inputs] == [(0, 73), (0, 1)]
    assert result.inputs[0].origin == "example"  # `value_ranges` finds what it takes
    assert [spec.kind for spec in result.inputs] == ["token_ids", "attention_mask"]
    assert ranges_of(result.inputs) == {"batch": (1, 64), "sequence": (1, 512)}
    assert result.outputs == first.outputs
    case = verification_inputs(first.inputs, seed=0)[0]
    expected = first.program.module()(**case.inputs)
    assert torch.equal(
        result.program.module()(**case.inputs)["last_hidden_state"], expected["last_hidden_state"]
    )


@dataclass
class Answer:
    logits: Tensor
    hidden: tuple[Tensor, ...] | None = None


class Model(nn.Module):
    """A module whose state has every form: weight, stored and unstored buffer, constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("scale", torch.rand(6))
        self.register_buffer("offset", torch.rand(6), persistent=False)
        self.table = torch.arange(6.0)

    def forward(self, x: Tensor) -> object:
        y = self.linear(x) * self.scale + self.offset + self.table
        y = y + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        return {"answer": Answer(y, (x, y * 2)), "weight": self.linear.weight, "none": None}


def make(module: nn.Module, rows: int = 4) -> FactorySource:
    torch.manual_seed(0)
    return FactorySource("test:factory", module, {"x": torch.randn(rows, 6)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_and_outputs_of_every_form(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source = make(Model().to(dtype))
    source.example()["x"] = torch.randn(4, 6)
    result = captured(source)
    names = ["answer.logits", "answer.hidden.0", "answer.hidden.1", "weight"]
    assert [spec.name for spec in result.outputs] == names
    assert all(type(tensor) in (Tensor, nn.Parameter) for tensor in state(result))
    for case in verification_inputs(result.inputs, seed=0):
        expected = name_result(source.eager()(**case.inputs)).tensors
        actual = result.program.module()(**case.inputs)
        assert all(torch.equal(actual[name], expected[name]) for name in names)


class SizeAsTensor(nn.Module):
    """Reads a size as a number and as a tensor, as Qwen-Image's transformer does."""

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[1]
        return x[:, : int(size) - 1] * torch.as_tensor(size, device=x.device)


@pytest.mark.all_sizes
def test_a_size_that_becomes_a_tensor_varies() -> None:
    source = FactorySource("size", SizeAsTensor(), {"x": torch.ones(2, 5)})
    program = captured(source, "x:1=2..9").program
    x = torch.arange(14.0).reshape(2, 7)
    (found,) = program.module()(x=x).values()
    assert torch.equal(found, SizeAsTensor()(x))


class Bounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._check(x.shape[0] <= 9)
        return x + 1


class Writes(nn.Module):
    """Counts its calls, directly or through a view."""

    def __init__(self, through_view: bool) -> None:
        super().__init__()
        self.through_view = through_view
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        calls = self.get_buffer("calls")
        (calls.view(1, 1)[0] if self.through_view else calls).add_(1)
        return x + calls


@pytest.mark.parametrize("through_view", [False, True])
def test_a_model_that_writes_to_its_state_is_refused(through_view: bool) -> None:
    with pytest.raises(CaptureError, match=r"writes to its own state: .* changes calls"):
        captured(make(Writes(through_view)))


def test_weights_of_another_model_are_refused(
    programs: Programs, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(str(folders / "t5-fp32"))
    weights = {**source.weights(), "shared.weight": torch.zeros(2, 2)}
    monkeypatch.setattr(source, "weights", lambda: weights)
    with pytest.raises(SourceError, match=r"shared\.weight has shape \[2, 2\]"):
        captured(source)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's list of mappings")
def test_weights_stay_mapped_to_their_file(programs: Programs, folders: Path) -> None:
    tensor = programs["t5-fp16"][1].program.state_dict["shared.weight"]
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            assert line.endswith(str(folders / "t5-fp16" / "model.safetensors"))
            return
    pytest.fail("the weight lies in no mapping")
