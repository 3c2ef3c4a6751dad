"""What TensorRT-RTX answers: a network is parsed and built, in a process of its own."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from enginecast.exporters.tensorrt.gate.operators import BUILDER
from enginecast.exporters.tensorrt.gate.parser import shortened
from enginecast.exporters.tensorrt.lower import let_attentions_decompose
from enginecast.runtime.sessions.tensorrt.errors import Messages, error_logger
from enginecast.runtime.sessions.tensorrt.library import RTX, import_tensorrt
from trt_gate.networks import Network

NAMES = (
    (r"\basked\w*: ", ""),
    (r"Tensor \w+ has", "a tensor has"),
    (r"\(Unnamed Layer\* \d+\)\s*\[\w+\](_output)?", "a layer"),
    (r"Input \d's element type \(\w+\) differs from input \d's.*", "element types differ"),
    (r"((?:type|types)(?: is| =| of)?) (?:INT8|UINT8|INT32|INT64|BOOL|FLOAT|HALF|BF16)\b.*", r"\1"),
    (r"(has type) \w+ (but must have type .*)", r"\1 \2"),
    (r" But they are of types .*| `input` type is .*", ""),
)
"""Names and types in messages that say the same of each."""
LONGEST = 120
trt = import_tensorrt("a question to its parser", RTX)
LIBRARY = RTX.version(trt)
SIZES = (1, 2, 4)
"""Least, best and greatest of a size that varies, where the network does not say more."""


def ask(network: Network) -> str:
    """Why a network is not taken, in short; empty: an engine was built."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        said = "it raises"
        try:
            said = answer(network)
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(write, said.encode()[:4096])
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        found = pipe.read().decode(errors="replace")
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return f"it dies of signal {os.WTERMSIG(status)}"
    return alike(found)


def alike(said: str) -> str:
    """A message without names and types, so that those of one cause are the same."""
    for pattern, shown in NAMES:
        said = re.sub(pattern, shown, said)
    return said if len(said) <= LONGEST else f"{said[: LONGEST - 3].rpartition(' ')[0]} ..."


def answer(network: Network) -> str:
    """`ask`, in this process."""
    return build(network.model.SerializeToString(), values=network.values)


def build(
    source: bytes | Path,
    shapes: Mapping[str, Sequence[tuple[int, ...]]] | None = None,
    values: Mapping[str, Sequence[int]] | None = None,
) -> str:
    """Why a model is not parsed and built, in TensorRT's words; empty: it is.

    Args:
        source: the model, or its file.
        shapes: least, best and greatest of inputs that vary; others get `SIZES`.
        values: of inputs that are shapes.
    """
    messages = Messages()
    logger = error_logger(trt, messages)
    builder = trt.Builder(logger)
    made = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(made, logger)
    is_file = isinstance(source, Path)
    if not (parser.parse_from_file(str(source)) if is_file else parser.parse(source)):
        error = parser.get_error(0)
        said = shortened(error.desc()) or "no reason"
        return f"{error.node_operator()}: {said}" if is_file else said
    let_attentions_decompose(trt, made)
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    for index in range(made.num_inputs):
        value = made.get_input(index)
        if value.is_shape_tensor:
            numbers = (values or {})[value.name]
            profile.set_shape_input(value.name, numbers, numbers, numbers)
        elif -1 in value.shape:
            sizes = [tuple(size if d < 0 else d for d in value.shape) for size in SIZES]
            profile.set_shape(value.name, *(shapes or {}).get(value.name, sizes))
    config.add_optimization_profile(profile)
    messages.clear()
    if builder.build_serialized_network(made, config) is not None:
        return ""
    return BUILDER + shortened(messages.take())
