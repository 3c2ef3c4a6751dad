"""The cases of `benchmarks/peers.py`, and their matrix products alone, which are the floor."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import (
    BertConfig,
    BertModel,
    SegformerConfig,
    SegformerModel,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTModel,
)

RAGGED = (23, 49, 33, 16, 57, 57, 56, 50)
"""Lengths of eight prompts."""
FULL = ("torch.onnx", "quantize_dynamic int8", "openvino", "openvino int8")
"""Peers that compute all rows of padding: a case of 512 tokens shows what they take."""
INT8_CODES = 128
COLLIDING, COLUMNS = 1024, 16
"""Rows of that many numbers share lines of the cache; so many zeros keep them apart."""


@dataclass(frozen=True)
class Case:
    """A model at one size."""

    make: Callable[[], nn.Module]
    inputs: Mapping[str, Tensor]
    output: str
    int8: bool = False
    without: tuple[str, ...] = ()
    """Peers that are left out, for their time."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Valid tokens of each row of text; of an image nothing."""
        mask = self.inputs.get("attention_mask")
        return () if mask is None else tuple(mask.sum(1).tolist())

    @property
    def is_padded(self) -> bool:
        return bool(self.lengths) and min(self.lengths) < self.inputs["attention_mask"].shape[1]


def cases() -> dict[str, Callable[[], Case]]:
    """By name; models are made when they are asked for."""
    return {
        "t5-base 1x128": lambda: _t5((128,), 128),
        "t5-base 1x512 with 400 valid": lambda: _t5((400,), 512),
        "minilm 32x64": lambda: _minilm(32, 64),
        "t5-base 8 ragged of 512": lambda: replace(_t5(RAGGED, 512), without=FULL),
        "t5-base 4 layers 1x128": lambda: _t5((128,), 128, layers=4),
        "t5-base 4 layers 1x512": lambda: _t5((512,), 512, layers=4),
        "vit-b 512": _vit,
        "segformer-b0 512": _segformer,
    }


def _t5(lengths: tuple[int, ...], tokens: int, *, layers: int = 12) -> Case:
    config = T5Config(
        d_model=768,
        d_ff=2048,
        num_layers=layers,
        num_heads=12,
        feed_forward_proj="gated-gelu",
        use_cache=False,
    )
    given = _text(lengths, tokens, 32128)
    return Case(lambda: T5EncoderModel(config), given, "last_hidden_state", True)


def _minilm(batch: int, tokens: int) -> Case:
    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    given = _text((tokens,) * batch, tokens, config.vocab_size)
    return Case(
        lambda: BertModel(config, add_pooling_layer=False), given, "last_hidden_state", True
    )


def _vit() -> Case:
    config = ViTConfig(image_size=512)
    return Case(lambda: ViTModel(config, add_pooling_layer=False), _image(), "last_hidden_state")


def _segformer() -> Case:
    return Case(lambda: SegformerModel(SegformerConfig()), _image(), "last_hidden_state")


def _image() -> dict[str, Tensor]:
    image = torch.randn(1, 3, 512, 512, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": image}


def _text(lengths: tuple[int, ...], tokens: int, vocabulary: int) -> dict[str, Tensor]:
    ids = torch.randint(
        5, vocabulary, (len(lengths), tokens), generator=torch.Generator().manual_seed(1)
    )
    mask = (torch.arange(tokens) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


class Products:
    """A graph with nothing but the products of a model.

    Of a text encoder: linears over all valid tokens at once, in fp32 or as unsigned by signed
    integers with nothing to quantize; the two products of attention for each row at its own length,
    in fp32.  Of an image encoder: the linears, convolutions and attentions that a call of it runs.
    Of each product one number leaves the graph, so that none is cut off and none is copied.
    """

    def __init__(self, model: nn.Module, case: Case, *, int8: bool = False) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._inputs: dict[str, tuple[int, ...]] = {}
        self._outputs: list[str] = []
        self._int8 = int8
        self._constant("starts", np.zeros(1, np.int64))
        self._constant("ends", np.ones(1, np.int64))
        self._constant("scale", np.float32(0.01))
        if case.lengths:
            self._text(model, case.lengths)
        else:
            self._image(model, case.inputs)

    def _text(self, model: nn.Module, lengths: tuple[int, ...]) -> None:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                self._linear(name, module.weight.detach().numpy().T, sum(lengths))
        config = model.config
        size = getattr(config, "d_kv", config.hidden_size // config.num_attention_heads)
        for layer in range(config.num_hidden_layers):
            for length in sorted(set(lengths)):
                rows = lengths.count(length) * config.num_attention_heads
                self._attention(f"attention.{layer}.{length}", rows, length, size)

    def _image(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
        for index, (function, given) in enumerate(calls_of_products(model, inputs)):
            name, (source, weight) = f"product.{index}", given[:2]
            if function is functional.linear:
                rows = source.numel() // source.shape[-1]
                self._linear(name, weight.detach().numpy().T, rows)
            elif function is torch.conv2d:
                self._convolution(name, given)
            else:
                *rows, length, size = source.shape
                self._attention(name, math.prod(rows), length, size, weight.shape[-2])

    def save(self, path: Path) -> None:
        """Write the graph."""
        inputs = [
            helper.make_tensor_value_info(n, self._kind(n), s) for n, s in self._inputs.items()
        ]
        outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in self._outputs]
        graph = helper.make_graph(self._nodes, "products", inputs, outputs, self._weights)
        domains = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
        onnx.save(helper.make_model(graph, opset_imports=domains, ir_version=10), path)

    def feeds(self) -> dict[str, np.ndarray]:
        """Something to multiply."""
        random = np.random.default_rng(1)
        return {
            name: random.integers(0, 255, shape).astype(np.uint8)
            if self._kind(name) == TensorProto.UINT8
            else random.standard_normal(shape).astype(np.float32)
            for name, shape in self._inputs.items()
        }

    def _linear(self, name: str, weight: np.ndarray, tokens: int) -> None:
        if not self._int8 and not weight.shape[0] % COLLIDING:  # as `stagger-rows` has them
            weight = np.pad(weight, ((0, COLUMNS), (0, 0)))
        source = f"linear.{tokens}.{weight.shape[0]}"
        self._inputs[source] = (tokens, weight.shape[0])
        if not self._int8:
            self._constant(f"{name}.weight", np.ascontiguousarray(weight))
            self._product("MatMul", [source, f"{name}.weight"], name, 2)
            return
        scale = np.abs(weight).max(0) / (INT8_CODES - 1)
        self._constant(f"{name}.weight", np.round(weight / scale).astype(np.int8))
        self._constant(f"{name}.scale", scale.astype(np.float32))
        given = [source, f"{name}.weight", "scale", f"{name}.scale", "zero"]
        if not any(tensor.name == "zero" for tensor in self._weights):
            self._constant("zero", np.uint8(INT8_CODES))
        self._product("MatMulIntegerToFloat", given, name, 2, "com.microsoft")

    def _attention(
        self, name: str, rows: int, length: int, size: int, keys: int | None = None
    ) -> None:
        keys = keys or length
        kind = f"{rows}.{length}.{keys}.{size}"
        shapes = {
            "queries": (rows, length, size),
            "keys": (rows, size, keys),
            "scores": (rows, length, keys),
            "values": (rows, keys, size),
        }
        for part, shape in shapes.items():
            self._inputs[f"{part}.{kind}"] = shape
        self._product("MatMul", [f"queries.{kind}", f"keys.{kind}"], f"{name}.0", 3)
        self._product("MatMul", [f"scores.{kind}", f"values.{kind}"], f"{name}.1", 3)

    def _convolution(self, name: str, given: Sequence[Any]) -> None:
        source, weight, _, stride, padding, dilation, groups = given
        shape = "x".join(map(str, source.shape))
        self._inputs[f"image.{shape}"] = tuple(source.shape)
        self._constant(f"{name}.weight", weight.detach().numpy())
        self._product(
            "Conv",
            [f"image.{shape}", f"{name}.weight"],
            name,
            4,
            strides=stride,
            pads=[*padding, *padding],
            dilations=dilation,
            group=groups,
        )

    def _product(
        self, op: str, given: list[str], name: str, rank: int, domain: str = "", **attributes: Any
    ) -> None:
        self._nodes.append(helper.make_node(op, given, [name], domain=domain, **attributes))
        for axis in range(rank):
            self._constant_once(f"axis.{axis}", np.array([axis]))
            cut = f"{name}.cut{axis}"
            before = name if axis == 0 else f"{name}.cut{axis - 1}"
            self._nodes.append(
                helper.make_node("Slice", [before, "starts", "ends", f"axis.{axis}"], [cut])
            )
        self._outputs.append(f"{name}.cut{rank - 1}")

    def _constant(self, name: str, array: np.ndarray | np.generic) -> None:
        self._weights.append(numpy_helper.from_array(np.asarray(array), name))

    def _constant_once(self, name: str, array: np.ndarray) -> None:
        if not any(tensor.name == name for tensor in self._weights):
            self._constant(name, array)

    def _kind(self, name: str) -> int:
        return TensorProto.UINT8 if self._int8 and name.startswith("linear.") else TensorProto.FLOAT


def calls_of_products(
    model: nn.Module, inputs: Mapping[str, Tensor]
) -> list[tuple[Callable[..., Tensor], tuple[Any, ...]]]:
    """The linears, convolutions and attentions of one call, with what they are called with."""
    found = []
    wanted = (functional.linear, torch.conv2d, functional.scaled_dot_product_attention)

    class Noted(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function in wanted:
                found.append((function, args))
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Noted():
        model(**inputs)
    return found
