"""unify-dtype on real models: one dtype an op, exact positions, errors no larger than eager's."""

from copy import deepcopy

import golden
import pytest
import torch
from programs import (
    LOW,
    count,
    ir_diff,
    notes,
    outputs,
    program_of,
    prompts,
    relative_error,
    rewritten,
    token_ids,
    values,
)
from tiny_programs import exact_program, inputs_of, tiny_module, tiny_program
from torch import Tensor

from enginecast.errors import PassError
from enginecast.passes.ir.edit import dtype_of, weight_specs
from enginecast.passes.ir.match import is_float_cast
from enginecast.passes.ir.source import module_path


@pytest.mark.parametrize(
    ("name", "to"),
    [("t5", "fp16"), ("t5", "bf16"), ("bert", "bf16")],
)
def test_program_is_no_worse_than_eager_in_that_dtype(name: str, to: str) -> None:
    after, _ = rewritten(tiny_program(name), f"unify-dtype{{to={to}}}")
    reference = exact_program(name)
    low = deepcopy(tiny_module(name)).to(LOW[to])
    errors: dict[str, list[float]] = {"program": [], "eager": []}
    for shape in ((3, 7), (2, 19)):
        inputs = inputs_of(name, *shape)
        wide = [t.double() if t.is_floating_point() else t for t in inputs]
        (expected,) = outputs(reference, *inputs)
        with torch.no_grad():
            eager = low(*(t.to(LOW[to]) if t.is_floating_point() else t for t in wide))
        (found,) = outputs(after, *inputs)
        assert found.dtype == LOW[to]
        assert found.isfinite().all()
        values(after, *inputs)
        errors["program"].append(relative_error(found, expected))
        errors["eager"].append(relative_error(eager, expected))
    assert max(errors["program"]) <= 1.5 * max(errors["eager"])


@pytest.mark.parametrize("name", ["t5"])
def test_every_weight_is_cast_once(name: str) -> None:
    after, _ = rewritten(tiny_program(name), "unify-dtype{to=fp16}")
    for node in after.graph.nodes:
        if node.name in weight_specs(after):
            casts = [dtype_of(user) for user in node.users if is_float_cast(user)]
            assert len(casts) == len(set(casts)), f"{node.name} is cast {len(casts)} times"
    assert count(after, "_assert_tensor_metadata") == 0


@pytest.mark.parametrize("to", ["fp16", "bf16", "fp64"])
def test_t5_position_buckets_are_those_of_fp32(to: str) -> None:
    after, _ = rewritten(tiny_program("t5"), f"unify-dtype{{to={to}}}")
    ids = token_ids(1, 32), torch.ones(1, 32, dtype=torch.int64)
    before, found = values(tiny_program("t5"), *ids), values(after, *ids)
    embeddings = [node for node in after.graph.nodes if node.name == "embedding_1"]
    bucket = embeddings[0].args[1].name
    assert torch.equal(found[bucket], before[bucket])
    logs = [node for node in after.graph.nodes if str(node.target) == "aten.log.default"]
    assert [dtype_of(node) for node in logs] == [torch.float32]


@pytest.mark.parametrize("to", ["fp16", "bf16"])
def test_llama_angles_are_fp32_up_to_the_meeting_with_the_stream(to: str) -> None:
    after, _ = rewritten(tiny_program("llama"), f"unify-dtype{{to={to}}}")
    inputs = prompts(2, 19)
    before, found = values(tiny_program("llama"), *inputs), values(after, *inputs)
    angles = [name for name in found if name.startswith(("cos", "sin")) and name.count("_") == 0]
    assert sorted(angles) == ["cos", "sin"]
    for name in angles:
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], before[name])
        assert found[f"{name}"].abs().max() <= 1


@pytest.mark.parametrize(
    ("name", "to"),
    [("t5", "fp16"), ("llama", "bf16")],
)
def test_mask_fills_are_finite_and_padded_rows_stay_so(name: str, to: str) -> None:
    after, _ = rewritten(tiny_program(name), f"unify-dtype{{to={to}}}")
    ids, mask = prompts(3, 7)
    mask[1] = 0
    seen = values(after, ids, mask)
    for node in after.graph.nodes:
        if dtype_of(node) == LOW[to]:
            assert seen[node.name].isfinite().all(), f"{node.name} is not finite"


def test_kept_module_computes_in_fp32_and_casts_at_its_border() -> None:
    after, _ = rewritten(tiny_program("t5"), 'unify-dtype{to=fp16 keep="DenseReluDense[.]wo$"}')
    linears = [n for n in after.graph.nodes if str(n.target) == "aten.linear.default"]
    for node in linears:
        kept = module_path(node).endswith("wo")
        assert dtype_of(node) == (torch.float32 if kept else torch.float16), module_path(node)
        if kept:
            assert is_float_cast(node.args[0])
            assert not is_float_cast(node.args[1]), "the weight is fp32 already"
    inputs = prompts(3, 7)
    values(after, *inputs)
    plain, _ = rewritten(tiny_program("t5"), "unify-dtype{to=fp16}")
    reference = exact_program("t5")
    expected = outputs(reference, *inputs)[0]
    kept_error = relative_error(outputs(after, *inputs)[0], expected)
    assert kept_error <= 1.1 * relative_error(outputs(plain, *inputs)[0], expected)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("nowhere", "matches no module"), ('"(wo"', "is not a regular expression")],
)
def test_bad_keep_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(PassError, match=message):
        rewritten(tiny_program("t5"), f"unify-dtype{{to=fp16 keep={pattern}}}")


def test_golden_unify_dtype() -> None:
    def norm(x: Tensor) -> Tensor:
        statistic = x.float().pow(2).mean(-1, keepdim=True)
        return x.masked_fill(x > 0, -3.4e38) * torch.rsqrt(statistic + 1e-6)

    before = program_of(norm, torch.randn(2, 5))
    after, sites = rewritten(before, "unify-dtype{to=fp16}")
    assert "fill value clamped to 65504, the largest finite f16" in notes(sites)
    golden.check("unify_dtype.diff", ir_diff(before, after))
