"""A text encoder as a Hugging Face folder, run eagerly with torch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from enginecast.cache.encoders.request import EncoderRequest, layers_in, named_outputs
from enginecast.cache.encoders.text_model import ModelFacts, stored_output
from enginecast.cache.store.spec import About, OutputSpec
from enginecast.capture.inputs.text_config import SEQUENCE_WITHOUT_LIMIT, limit_of, text_of
from enginecast.capture.outputs.flatten import Wanted, run_named
from enginecast.capture.sources.huggingface.sentence_folder import SentenceSource
from enginecast.capture.sources.huggingface.transformers_folder import (
    CONFIG_FILE,
    HuggingFaceSource,
)
from enginecast.capture.sources.open_source import open_source
from enginecast.capture.sources.weights.checkpoint import read_json
from enginecast.errors import InputError, MissingError, UsageError
from enginecast.runtime.device.torch_values import to_host
from enginecast.runtime.values.arrays import Array

DEFAULT_OUTPUTS = ("last_hidden_state",)
ONE_LOGIT = "logits_to_keep"
"""Indices of the tokens whose logits a language model computes: of one, as nobody reads them."""
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PROBE = (2, 5)
"""Rows and tokens of the run that shows what the outputs are; no width of a model is 5."""


def open_eager(request: EncoderRequest) -> "EagerModel":
    """Build the model of the folder that a request names; see `open_encoder`.

    Its outputs have the names that an engine gives them, "hidden_states.-2" among them.  A T5 in
    fp16 keeps the weights `wo` in fp32, as transformers does; its precision counts as fp16.
    """
    if request.providers is not None:
        raise UsageError(
            f"--provider {','.join(request.providers)}: {request.model} is a model folder, which "
            "torch runs",
            hint="Use --device, or export the model first.",
        )
    source = open_source(request.model, random_weights=request.random_weights)
    if not isinstance(source, HuggingFaceSource | SentenceSource):
        raise InputError(
            f"{request.model}: expected a text encoder, but it is a model of another kind",
            hint="Give the folder of the text encoder alone.",
        )
    more = {*source.required_arguments} - {"input_ids"}
    if more or "input_ids" not in source.forward_arguments:
        what = f"needs {', '.join(sorted(more))}, too"
        if "input_ids" not in source.forward_arguments:
            what = "takes no input_ids"
        raise InputError(
            f"{source.folder}: expected a text encoder, but {_class_of(source)} {what}",
            hint="Give the folder of the text encoder alone.",
        )
    precision, device = request.precision, request.device or "cpu"
    if precision is None:
        stored = source.weight_elements()
        names = {dtype: name for name, dtype in PRECISIONS.items()}
        precision = names.get(max(stored, key=lambda dtype: stored[dtype]), "fp32")
    if precision not in PRECISIONS:
        raise UsageError(f"--precision {precision}: expected {', '.join(PRECISIONS)}")
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device}: expected cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise MissingError("--device cuda: torch finds no GPU", hint="Use --device cpu.")
    return EagerModel(source, precision, device)


class EagerModel:
    """A model that takes `input_ids`, and possibly `attention_mask`."""

    def __init__(
        self, source: HuggingFaceSource | SentenceSource, precision: str, device: str
    ) -> None:
        self._device = device
        self._module: nn.Module | None = source.eager(PRECISIONS[precision]).to(device)
        self._has_logits = ONE_LOGIT in source.forward_arguments
        self.facts = _describe(source, self._module, precision)

    def outputs(self, names: Sequence[str]) -> tuple[OutputSpec, ...]:
        names = named_outputs(names, layers_in(self.facts.about.config)) or DEFAULT_OUTPUTS
        found = self._run(np.zeros(_PROBE, np.int64), None, names)
        gives = f"for {_PROBE[0]} texts of {_PROBE[1]} tokens the model gives"
        return tuple(
            stored_output(name, found[name].shape, _PROBE, str(found[name].dtype), gives)
            for name in names
        )

    def run(self, ids: Array, mask: Array | None, outputs: Sequence[str]) -> dict[str, Array]:
        return {name: to_host(value) for name, value in self._run(ids, mask, outputs).items()}

    def _run(self, ids: Array, mask: Array | None, outputs: Sequence[str]) -> dict[str, Tensor]:
        if self._module is None:
            raise UsageError(f"{self.facts.folder}: the model is closed", hint="Open it again.")
        feeds = {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})
        if self._has_logits and "logits" not in outputs:  # of a large vocabulary
            feeds[ONE_LOGIT] = np.zeros(1, np.int64)
        inputs = {name: torch.from_numpy(value).to(self._device) for name, value in feeds.items()}
        with torch.inference_mode():
            return run_named(self._module, inputs, Wanted(tuple(outputs)))

    def close(self) -> None:
        self._module = None


def _class_of(source: HuggingFaceSource | SentenceSource) -> str:
    assert source.model_class is not None  # that of its config
    return source.model_class.__name__


def _describe(
    source: HuggingFaceSource | SentenceSource, module: nn.Module, precision: str
) -> ModelFacts:
    assert source.config is not None  # the folder has one
    limit = limit_of(source.config)
    folder = source.folder
    if isinstance(source, SentenceSource):
        folder = source.transformer_folder
    embedding = module.get_input_embeddings()  # type: ignore[operator]  # of a PreTrainedModel
    padding: Any = getattr(text_of(source.config), "pad_token_id", None)
    return ModelFacts(
        about=About(
            encoder=_class_of(source),
            source=source.name,
            config=read_json(folder / CONFIG_FILE),
        ),
        folder=folder.resolve(),
        identity=source.fingerprint(),
        precision=precision,
        takes_mask="attention_mask" in source.forward_arguments,
        sequence=(1, limit),
        default_length=limit or SEQUENCE_WITHOUT_LIMIT,
        vocabulary=getattr(embedding, "num_embeddings", None),
        padding_id=padding if isinstance(padding, int) else None,
        longest_text=source.longest_text,
    )
