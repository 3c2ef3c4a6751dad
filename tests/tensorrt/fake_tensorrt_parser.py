"""The ONNX parser of the fake TensorRT, and the one that fills weights in.

A fake: see tests/tensorrt/fake_tensorrt.py.
"""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from fake_tensorrt_base import Recorded, require_ready
from google.protobuf.message import DecodeError


class ParserError(Recorded):
    def _start(self, node: int, name: str, operator: str, desc: str) -> None:
        self._values = (node, name, operator, desc)

    def node(self) -> int:
        return self._values[0]

    def node_name(self) -> str:
        return self._values[1]

    def node_operator(self) -> str:
        return self._values[2]

    def desc(self) -> str:
        return self._values[3]


class OnnxParser(Recorded):
    """Reads the file with its external data; knows all ops but those that a test names."""

    def __init__(self, network: Any, logger: Any) -> None:
        if not isinstance(network, self._fake.INetworkDefinition):
            raise TypeError(f"expected an INetworkDefinition, got {network!r}")
        self._network, self._logger = network, require_ready(logger, self._fake.ILogger)
        self._errors: list[Any] = []

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> Any:
        return self._errors[index]

    def parse_from_file(self, model: str) -> bool:
        if not isinstance(model, str):
            raise TypeError(f"parse_from_file wants a str, got {model!r}")
        try:
            found = read_model(Path(model))
        except (OSError, DecodeError, onnx.checker.ValidationError) as error:
            self._errors.append(self._fake._new("ParserError", -1, "", "", str(error)))
            return False
        self._errors += unsupported(self._fake, found)
        if not self._errors:
            self._network._model = found
            self._network._parser = weakref.ref(self)
        return not self._errors


class OnnxParserRefitter(Recorded):
    def __init__(self, refitter: Any, logger: Any) -> None:
        self._refitter, self._logger = refitter, require_ready(logger, self._fake.ILogger)
        self._errors: list[Any] = []

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> Any:
        return self._errors[index]

    def refit_from_file(self, model: str) -> bool:
        try:
            found = read_model(Path(model))
        except (OSError, DecodeError, onnx.checker.ValidationError) as error:
            return self._fail(str(error))
        self._errors += unsupported(self._fake, found)
        engine = self._refitter._engine
        wanted = {tensor.name: list(tensor.dims) for tensor in engine._model.graph.initializer}
        for tensor in found.graph.initializer:
            if list(tensor.dims) != wanted.get(tensor.name):
                return self._fail(f"weights '{tensor.name}' do not fit the engine")
            self._refitter._given[tensor.name] = tensor
        return not self._errors

    def _fail(self, text: str) -> bool:
        self._errors.append(self._fake._new("ParserError", -1, "", "", text))
        return False


def read_model(path: Path) -> onnx.ModelProto:
    """An ONNX file with the weights that lie beside it."""
    return onnx.load(str(path), load_external_data=True)


def unsupported(fake: Any, model: onnx.ModelProto) -> Iterator[Any]:
    """An error for each node of an op that the test wants unsupported."""
    for index, node in enumerate(model.graph.node):
        if node.op_type in fake.failures.unsupported:
            text = f"No importer registered for op: {node.op_type}"
            yield fake._new("ParserError", index, node.name, node.op_type, text)
