"""The weight files of a folder, one safetensors file or shards with an index: the name that a
transformers model has for each tensor, and the dtype it is stored in.

transformers renames keys, adds and drops prefixes, and merges or splits tensors on the way from a
file to a model, and it converts dtypes while it does.  Here it does the first without the second:
the model is loaded once for each float dtype of the file, and in each load the tensors of other
dtypes are stand-ins without memory, so nothing is converted and mapped tensors stay mapped.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from enginecast.capture.sources.weights.finite import Lost, lost_in
from enginecast.capture.sources.weights.gguf_file import stored_gguf
from enginecast.capture.sources.weights.published import Stored, stored
from enginecast.errors import SourceError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_CHUNK = 1 << 20
GGUF = ".gguf"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
LOADABLE = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class WeightNames:
    """The names of a folder's weight files."""

    single: str = SINGLE
    index: str = INDEX
    variant: str = ""
    is_alone: bool = False
    """Whether `single` is a path of its own: a file as it was published."""

    @classmethod
    def of(cls, stem: str, variant: str = "") -> "WeightNames":
        """The names that `save_pretrained` gives: of a variant, it stands before the ending."""
        part = f".{variant}" if variant else ""
        return cls(f"{stem}{part}.safetensors", f"{stem}.safetensors.index{part}.json", variant)

    @classmethod
    def asked(cls, stem: str, variant: str, file: Path | None) -> "WeightNames":
        """Those of `of`, or of one file, wherever it is.

        Raises:
            SourceError: there is no such file, or it is of another kind.
        """
        if file is None:
            return cls.of(stem, variant)
        if not file.is_file() or file.suffix not in (".safetensors", GGUF):
            lack = "no such file" if not file.is_file() else f"expected .safetensors or {GGUF}"
            raise SourceError(f"--single-file {file}: {lack}")
        return cls(str(file.absolute()), "", is_alone=True)


NAMES = WeightNames()
"""Those of transformers."""


def find_weight_files(folder: Path, names: WeightNames = NAMES) -> tuple[Path, ...]:
    """The safetensors files that hold the weights; empty when the folder has no weights at all.

    Raises:
        SourceError: only files of another kind, a missing shard or variant, or an index that cannot
            be read.
    """
    single, index = names.single, names.index
    if (folder / single).is_file():
        return (folder / single,)
    if (folder / index).is_file():
        return tuple(sorted({folder / name for name in _weight_map(folder / index).values()}))
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    if names.variant and others:
        raise SourceError(
            f"{folder} has no variant {names.variant!r} ({single}); it has {', '.join(others[:3])}",
            hint="Omit --variant, or use one that exists.",
        )
    for file in sorted(folder.iterdir()):
        if file.suffix in PICKLES:
            raise SourceError(
                f"{file} is a pickle: loading it can run code, so it is refused",
                hint=f"Convert it to {single}, with safetensors.torch.save_file or"
                " save_pretrained.",
            )
        if file.suffix == ".gguf":
            raise SourceError(
                f"{file} is a GGUF file, and there is no {single}",
                hint=f"Give it by name: --single-file {file}.",
            )
    if others:
        variants = [name.split(".")[1] for name in others if name.count(".") == 2]
        raise SourceError(
            f"{folder} holds {', '.join(others[:3])} and no {single} or {index}",
            hint=f"Give --variant {variants[0].partition('-')[0]}."
            if variants
            else f"Rename the file to {single}, or add the index of the shards.",
        )
    return ()


def read_weights(folder: Path, names: WeightNames = NAMES) -> dict[str, Tensor]:
    """Map every tensor of the folder's weight files, by its name in the file, in its own dtype.

    Raises:
        SourceError: a file that is truncated or no safetensors, or shards that do not hold what the
            index says, each tensor once.
    """
    tensors: dict[str, Tensor] = {}
    holders: dict[str, Path] = {}
    for file in find_weight_files(folder, names):
        for name, tensor in _read(file).items():
            if name in holders:
                raise SourceError(
                    f"{file} holds {name}, and so does {holders[name].name}",
                    hint=f"Keep the one that {names.index} names.",
                )
            tensors[name], holders[name] = tensor, file
    if not (folder / names.single).is_file() and (folder / names.index).is_file():
        _check_index(folder / names.index, holders)
    return tensors


def read_stored(folder: Path, names: WeightNames = NAMES) -> Stored:
    """Map the tensors of the folder's weight files, and widen what is quantized.

    Raises:
        SourceError: see `read_weights` and `stored`.
        MissingError: see `stored`.
    """
    if (file := weights_file(folder, names=names)).suffix == GGUF:
        return stored_gguf(file)
    formats: dict[str, str] = {}
    for file in find_weight_files(folder, names):
        formats |= _formats(file)
    return stored(read_weights(folder, names), weights_file(folder, names=names), formats)


def weights_file(folder: Path, name: str = "", names: WeightNames = NAMES) -> Path:
    """The file that lists the folder's weights, or the shard that holds the tensor `name`."""
    if (folder / names.single).is_file():
        return folder / names.single
    shard = _weight_map(folder / names.index).get(name) if name else None
    return folder / (shard or names.index)


def some(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 4} more" if len(ordered) > 4 else ""
    return ", ".join(ordered[:4]) + more


def sha256_of(files: Iterable[Path]) -> str:
    """sha256 over the contents of `files`, in the order given."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def sha256_of_weights(folder: Path, names: WeightNames = NAMES) -> tuple[str, dict[str, Lost]]:
    """sha256 over name, dtype, shape and bytes of every tensor of the folder, sorted by name.

    Files that hold the same tensors in another order, or in other shards, have the same.  The bytes
    are read and not mapped: a mapping of all weights would count as memory.

    Returns:
        The digest, and by name the tensors that hold what is not finite: found in the same reading.

    Raises:
        SourceError: see `read_weights`.
    """
    if (file := weights_file(folder, names=names)).suffix == GGUF:
        return sha256_of([file]), {}
    read_weights(folder, names)  # refuses what is damaged
    files = find_weight_files(folder, names)
    found = {n: (f, entry) for f in files for n, entry in _entries(f).items()}
    digest = hashlib.sha256()
    lost: dict[str, Lost] = {}
    for name, (file, entry) in sorted(found.items()):
        digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
        start, end = entry["data_offsets"]
        with file.open("rb") as stream:
            stream.seek(8 + _header_size(stream) + start)
            for position in range(start, end, _CHUNK):
                data = stream.read(min(_CHUNK, end - position))
                digest.update(data)
                lost[name] = lost.get(name, Lost()) + lost_in(data, entry["dtype"])
    return digest.hexdigest(), {name: each for name, each in lost.items() if each}


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        SourceError: the file is missing, no JSON, or no object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SourceError(f"{file} is missing") from error
    except (ValueError, RecursionError, OSError) as error:
        raise SourceError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise SourceError(f"{file} must hold a JSON object, it holds a {type(value).__name__}")
    return value


def _entries(file: Path) -> dict[str, Any]:
    """Dtype, shape and place of each tensor in a safetensors file that is known to be sound.

    Source: https://github.com/huggingface/safetensors#format
    """
    with file.open("rb") as stream:
        header: dict[str, Any] = json.loads(stream.read(_header_size(stream)))
    header.pop("__metadata__", None)
    return header


def _formats(file: Path) -> dict[str, str]:
    """The formats of layers in a file's metadata, by name.

    Source: https://github.com/comfyanonymous/ComfyUI/blob/master/QUANTIZATION.md
    """
    try:
        with safe_open(file, framework="pt") as reader:
            said = json.loads((reader.metadata() or {}).get("_quantization_metadata", "{}"))
        return {name: str(each["format"]) for name, each in said.get("layers", {}).items()}
    except (SafetensorError, OSError):
        return {}  # `read_weights` says it
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SourceError(f"{file}: _quantization_metadata gives layers no format") from error


def _header_size(stream: BinaryIO) -> int:
    """Bytes of the header; the stream stands behind its length then."""
    return int.from_bytes(stream.read(8), "little")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{index} has no weight_map: tensor name -> shard")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise SourceError(f"{index}: the shard of {name} must be a plain file name: {shard!r}")
        if not (index.parent / shard).is_file():
            raise SourceError(
                f"{index.parent / shard} is missing: {index.name} lists it for {name}",
                hint="Put the shard next to the index.",
            )
    return weight_map


def _read(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as reader:
            return {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise SourceError(
            f"{file} cannot be read as safetensors: {error}",
            hint="The file is truncated or damaged: copy or download it again.",
        ) from error


def _check_index(index: Path, holders: Mapping[str, Path]) -> None:
    """Refuse an index that is not the one of these shards: tensors would come from anywhere."""
    folder, listed = index.parent, _weight_map(index)
    hint = f"Copy or download {index.name} and its shards again, from one place."
    absent = {name for name, shard in listed.items() if holders.get(name) != folder / shard}
    for name in sorted(absent):
        others = sorted(other for other in absent if listed[other] == listed[name])
        raise SourceError(
            f"{folder / listed[name]} does not hold {some(others)}: {index.name} says that it does"
            + (f", and {holders[name].name} holds {name}" if name in holders else ""),
            hint=hint,
        )
    for name in sorted(holders.keys() - listed.keys()):
        same = [n for n in holders.keys() - listed.keys() if holders[n] == holders[name]]
        raise SourceError(
            f"{holders[name]} holds {some(same)}, not named in {index.name}", hint=hint
        )


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by their name in the file, and the class they are loaded into."""

    folder: Path
    """Where the weight files are, for messages."""
    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of `from_pretrained`."""
    dropped: tuple[str, ...] = ()
    """Beginnings of names that the class leaves out on purpose."""
    names: WeightNames = NAMES

    def file(self, name: str = "") -> Path:
        """The file that holds a tensor, or lists all of them."""
        return weights_file(self.folder, name, self.names)


def name_weights(checkpoint: Checkpoint, expected: Iterable[str]) -> dict[str, Tensor]:
    """A tensor for every name in `expected`, in the dtype of the file; tied names share theirs.

    Raises:
        SourceError: tensors are missing, left over, of another shape, or of a dtype that no model
            can be loaded in.
    """
    dtypes = _float_dtypes(checkpoint) or [torch.float32]
    own = {tensor.untyped_storage().data_ptr() for tensor in checkpoint.tensors.values()}
    named: dict[str, Tensor] = {}
    for dtype in dtypes:
        tensors = {name: _stand_in(t, dtype) for name, t in checkpoint.tensors.items()}
        model, info = keeping_no_fp32(checkpoint.model_class).from_pretrained(
            None,
            config=checkpoint.config,
            state_dict=tensors,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **checkpoint.options,
        )
        tied_once = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
        _check_loaded(checkpoint, info, len(tied_once))
        state: dict[str, Tensor] = model.state_dict()
        for name, tensor in state.items():
            if len(dtypes) == 1 or _is_real(tensor, own):
                named.setdefault(name, tensor)
    absent = [name for name in expected if name not in named]
    if absent:
        raise SourceError(
            f"{checkpoint.file()}: {absent[0]} is made from tensors of different dtypes",
            hint="Save the checkpoint in one dtype.",
        )
    return {name: named[name] for name in expected}


def _float_dtypes(checkpoint: Checkpoint) -> list[torch.dtype]:
    dtypes: list[torch.dtype] = []
    for name, tensor in checkpoint.tensors.items():
        if not tensor.is_floating_point() or tensor.dtype in dtypes:
            continue
        if tensor.dtype not in LOADABLE:
            raise SourceError(
                f"{checkpoint.file(name)}: {name} is stored as {tensor.dtype}, "
                "expected float32, float16, bfloat16 or float64"
            )
        dtypes.append(tensor.dtype)
    return dtypes


def _stand_in(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` itself, or one NaN in its shape when it is a float of another dtype."""
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    return torch.full((), float("nan"), dtype=dtype).expand(tensor.shape)


def _is_real(tensor: Tensor, own: set[int]) -> bool:
    """Whether no stand-in had a part in `tensor`."""
    storage = tensor.untyped_storage()
    if storage.data_ptr() in own or not tensor.is_floating_point():
        return True
    is_expanded = storage.nbytes() == tensor.element_size() < tensor.nbytes
    return not is_expanded and not bool(tensor.isnan().any())


def keeping_no_fp32(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """`model_class` without modules that it widens to float32 while it loads float16 (T5's wo)."""
    body = {"_get_dtype_plan": lambda self, dtype: {}, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), body)


def _check_loaded(checkpoint: Checkpoint, info: Mapping[str, Any], expected: int) -> None:
    """Raise for what transformers only warns of; the class has `expected` tensors."""
    model_class = checkpoint.model_class.__name__
    if info["mismatched_keys"]:
        name, stored, wanted = sorted(info["mismatched_keys"])[0]
        more = len(info["mismatched_keys"]) - 1
        raise SourceError(
            f"{checkpoint.file(name)}: {name} has shape {list(stored)}, "
            f"{model_class} expects {list(wanted)}" + (f", and {more} more differ" if more else ""),
            hint="config.json does not belong to these weights.",
        )
    missing, unexpected = info["missing_keys"], info["unexpected_keys"]
    if missing:
        others = f", and other names: {some(unexpected)}" if unexpected else ""
        raise SourceError(
            f"{checkpoint.file()}: {model_class} misses {some(missing)}; "
            f"expected {expected} tensors, got {max(0, expected - len(missing))}{others}",
            hint="config.json names another class than the one that was saved, or the file is cut.",
        )
    extra = _unknown(checkpoint, [n for n in unexpected if not n.startswith(checkpoint.dropped)])
    if extra:
        raise SourceError(
            f"{checkpoint.file(extra[0])}: {model_class} has no place for {some(extra)}; "
            f"expected {expected} tensors, got {expected + len(extra)}",
            hint="config.json does not belong to these weights.",
        )
    if info["error_msgs"]:
        raise SourceError(f"{checkpoint.file()}: {info['error_msgs'][0]}")


def _unknown(checkpoint: Checkpoint, unexpected: Sequence[str]) -> list[str]:
    """Names left over that no dropped head explains.

    A head lies outside the base model's prefix: `cls.` or `lm_head.` beside `bert.`.
    """
    prefix = f"{checkpoint.model_class.base_model_prefix}."
    is_headless = any(name.startswith(prefix) for name in checkpoint.tensors) and not any(
        name.startswith(prefix) for name in unexpected
    )
    return [] if is_headless else sorted(unexpected)
