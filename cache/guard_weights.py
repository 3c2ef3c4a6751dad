"""Whether a loaded encoder has the weights that a cache was filled with."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from enginecast.cache.spec import EncoderSpec
from enginecast.capture.checkpoint import find_weight_files, read_weights, sha256_of_weights
from enginecast.capture.quiet import quiet_transformers
from enginecast.capture.stored_weights import Checkpoint, name_weights
from enginecast.errors import CacheError, SourceError

_ALL = ("",)
"""Beginning of every name: what else a checkpoint holds, such as a decoder, is not our matter."""


@dataclass(frozen=True)
class WeightsFound:
    """What was compared, and what could not be, with the reasons."""

    compared: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


def compare_weights(spec: EncoderSpec, name: str, model: nn.Module) -> WeightsFound:
    """Compare the folder that a model was loaded from with a spec, and the model with the folder.

    Args:
        name: of the encoder in the cache: the subfolder to look at first in a pipeline's folder.

    Raises:
        CacheError: the folder has other weights, or the model was changed since it was loaded.
        SourceError: the folder's weights are damaged.
    """
    wanted = spec.model.get("weights")
    if wanted is None or "factory" in spec.model:
        return WeightsFound(skipped=("weights: the cache was not filled from a folder of weights",))
    if not isinstance(model, PreTrainedModel) or not model.name_or_path:
        return WeightsFound(skipped=("weights: the model was not loaded from a folder",))
    if getattr(model, "hf_quantizer", None) is not None:
        return WeightsFound(skipped=("weights: the model was quantized while it was loaded",))
    root = Path(model.name_or_path)
    if not root.is_dir():
        return WeightsFound(skipped=(f"weights: it was loaded from {root}, which is no folder",))
    digests: dict[Path, str] = {}
    for folder in _candidates(root, name, model):
        digests[folder] = sha256_of_weights(folder)[0]
        if digests[folder] == wanted:
            return _compare_tensors(folder, model)
    if not digests:
        reason = f"weights: {root} holds no safetensors of a {model.config.model_type}, nor do its "
        return WeightsFound(skipped=(f"{reason}subfolders",))
    found = ", ".join(f"{digest} in {folder}" for folder, digest in digests.items())
    raise CacheError(
        f"the weights in {root} are not those that the cache was filled with: expected sha256 "
        f"{wanted}, got {found}",
        hint="Load the encoder of the cache, or fill a cache from this one.",
    )


def _candidates(root: Path, name: str, model: PreTrainedModel) -> Iterator[Path]:
    """The folders that a model may come from: `name_or_path` does not have its `subfolder`."""
    if _has_weights(root):
        yield root
    inside = sorted(one for one in root.iterdir() if one.is_dir())
    for folder in sorted(inside, key=lambda one: one.name != name):
        if _model_type(folder) == model.config.model_type and _has_weights(folder):
            yield folder


def _has_weights(folder: Path) -> bool:
    try:
        return bool(find_weight_files(folder))
    except SourceError:  # pickles; whatever they are, they cannot be compared
        return False


def _model_type(folder: Path) -> Any:
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None


def _compare_tensors(folder: Path, model: PreTrainedModel) -> WeightsFound:
    """Every tensor of the model with what transformers would load into its place."""
    same = f"weights: those in {folder}"
    state = model.state_dict()
    try:
        stored = _stored(folder, model, state)
    except SourceError as error:
        reason = f"weights: {len(state)} tensors of the model not compared: {error.message}"
        return WeightsFound((same,), (reason,))
    known = [name for name, tensor in stored.items() if _comparable(state[name], tensor)]
    for name in known:
        now = state[name].detach().cpu()
        if now.shape != stored[name].shape or not torch.equal(now, stored[name].to(now.dtype)):
            raise CacheError(
                f"{name} of the encoder is not as in {folder}: it was changed since it was loaded, "
                "or loaded from elsewhere",
                hint="Cached outputs are those of the weights in the folder; load these.",
            )
    compared = f"weights: {len(known)} tensors of the model, each as in the folder"
    if len(known) == len(state):
        return WeightsFound((same, compared))
    first = next(name for name in state if name not in known)
    lacking = (
        f"weights: {len(state) - len(known)} of {len(state)} tensors of the model not compared, "
        f"first {first}: offloaded, quantized, or of no place in the folder"
    )
    return WeightsFound((same, compared) if known else (same,), (lacking,))


def _stored(folder: Path, model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the folder holds, by the names that the model has for it."""
    kind = type(model)
    config = kind.config_class.from_dict(model.config.to_dict())
    with torch.device("meta"):
        own = kind(config).state_dict()
    checkpoint = Checkpoint(folder, kind, config, read_weights(folder), dropped=_ALL)
    with quiet_transformers():
        return name_weights(checkpoint, [name for name in state if name in own])


def _comparable(now: Tensor, stored: Tensor) -> bool:
    return not now.is_meta and now.is_floating_point() == stored.is_floating_point()
