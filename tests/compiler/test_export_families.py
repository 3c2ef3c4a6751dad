"""BERT, ViT, Llama and a plain module become engines that agree with eager."""

import numpy as np
import pytest
import torch
from exports import Exports
from transformers import AutoModel

from enginecast.runtime.load import load

OUTPUTS = {
    "bert": ("last_hidden_state", "pooler_output"),
    "vit": ("last_hidden_state", "pooler_output"),
    "llama": ("last_hidden_state",),
    "plain": ("hidden", "pooled"),
}
FUSED = {"bert": {"attention": 2}, "vit": {"attention": 2}, "plain": {}} | {
    "llama": {"rms-norm": 5, "residual+norm": 4, "attention": 2}
}


@pytest.mark.parametrize(
    ("name", "precision", "outcome"),
    [
        pytest.param(
            *(name, precision, outcome),
            marks=[] if precision == "fp32" and name != "llama" else pytest.mark.slow,
        )
        for name in OUTPUTS
        for precision, outcome in (
            ("fp32", "verified"),
            ("fp16", "verified-by-emulation"),
            ("bf16", "verified-by-emulation"),
        )
    ],
)
def test_engines_agree_with_eager_within_its_own_error(
    exports: Exports, name: str, precision: str, outcome: str
) -> None:
    done = exports(name, precision)
    verdict = done.report.verdict
    assert verdict.outcome == outcome
    assert tuple(output.name for output in verdict.outputs) == OUTPUTS[name]
    assert all(o.ratio is not None and o.ratio <= 3.0 for o in verdict.outputs)
    assert done.bundle is not None
    found = {f.kind: f.engine for f in done.bundle.manifest.fusion}
    assert found == FUSED[name]
    assert all(f.engine == f.expected for f in done.bundle.manifest.fusion)


def test_fp16_of_a_plain_module(exports: Exports) -> None:
    """The cheap one of the fp16 exports above, so that a default run has one."""
    done = exports("plain", "fp16")
    assert done.report.verdict.outcome == "verified-by-emulation"
    assert done.bundle is not None
    assert {o.dtype for o in done.bundle.manifest.outputs} == {"float16"}


@pytest.mark.parametrize(
    ("name", "dim"), [("bert", 32), pytest.param("llama", 32, marks=pytest.mark.slow)]
)
def test_text_engines_take_other_shapes(exports: Exports, name: str, dim: int) -> None:
    ids = torch.randint(0, 96, (3, 19))
    mask = (torch.arange(19)[None, :] < torch.tensor([19, 6, 2])[:, None]).long()
    model = AutoModel.from_pretrained(exports.model(name)).eval()
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).last_hidden_state
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    with load(exports(name).folder) as engine:
        names = [declared.name for declared in engine.inputs]
        outputs = engine.run({key: feeds[key].numpy() for key in names})
    valid = mask.bool().numpy()
    got = outputs["last_hidden_state"]
    assert got.shape == (3, 19, dim)
    np.testing.assert_allclose(got[valid], expected.numpy()[valid], rtol=1e-4, atol=1e-4)


def test_an_image_engine_takes_another_batch(exports: Exports) -> None:
    pixels = torch.randn(4, 3, 16, 16)
    model = AutoModel.from_pretrained(exports.model("vit")).eval()
    with torch.no_grad():
        expected = model(pixel_values=pixels)
    with load(exports("vit").folder) as engine:
        outputs = engine.run({"pixel_values": pixels.numpy()})
    for name in OUTPUTS["vit"]:
        np.testing.assert_allclose(outputs[name], expected[name].numpy(), rtol=1e-4, atol=1e-5)


def test_a_plain_module_keeps_its_names_and_its_mask(exports: Exports) -> None:
    features = np.random.default_rng(1).standard_normal((2, 7, 12), dtype=np.float32)
    keep = np.array([[True] * 7, [True, True, *[False] * 5]])
    with load(exports("plain").folder) as engine:
        assert [(i.name, i.dtype, i.shape) for i in engine.inputs] == [
            ("features", "float32", ("batch", 7, 12)),
            ("keep", "bool", ("batch", 7)),
        ]
        outputs = engine.run({"features": features, "keep": keep})
    np.testing.assert_allclose(
        outputs["pooled"][1], outputs["hidden"][1, :2].sum(0) / 2.5, rtol=1e-5, atol=1e-6
    )
