"""A fake of `torch_tensorrt`: exactly the names of `versions.json`, and no GPU.

It stands in for the package on machines that cannot have it.  Norms are really taken apart, and
what reads constants alone is really computed beforehand; converters of ours are called with a
network of the fake TensorRT, and any other op counts as converted.  A green test proves what is
asked for and which layers are added; it proves nothing about torch_tensorrt or TensorRT.

    fake = install(monkeypatch, trt)          # `import torch_tensorrt` gives it
    fake.settings, fake.inputs                # of the last build
    fake.layers("add_dequantize")             # the layers that were added, with their arguments
    fake.without = {torch.ops.aten.erf.default}         # ops that it has no converter for
"""

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import make_dataclass
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, default_decompositions
from torch.fx import GraphModule, Interpreter, Node

from enginecast.passes.ir.edit import dtype_of, shape_of
from enginecast.runtime.device.versions import short_version
from enginecast.runtime.sessions.tensorrt import versions as tensorrt_versions
from enginecast.runtime.sessions.tensorrt.versions import called_names

SETTINGS = (
    "attn_bias_is_causal",
    "cache_built_engines",
    "decompose_attention",
    "disable_tf32",
    "enable_experimental_decompositions",
    "hardware_compatible",
    "immutable_weights",
    "optimization_level",
    "require_full_compilation",
    "reuse_cached_engines",
    "strip_engine_weights",
    "timing_cache_path",
    "truncate_double",
    "use_fp32_acc",
    "version_compatible",
    "workspace_size",
)
OLDER = ("enabled_precisions", "use_explicit_typing")
"""What 2.11 and 2.12 have besides."""
TAKEN_APART = (torch.ops.aten.rms_norm.default, torch.ops.aten._fused_rms_norm.default)
DTYPES = {
    torch.float32: "FLOAT",
    torch.float16: "HALF",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "FP8",
    torch.int64: "INT64",
    torch.int32: "INT32",
    torch.bool: "BOOL",
}
PLAN = b"FAKE-TORCH-TENSORRT-PLAN\0"


class FakeTorchTensorRT(ModuleType):
    """The fake package of one version."""

    def __init__(self, version: str, trt: Any) -> None:
        super().__init__("torch_tensorrt", __doc__)
        self.__version__ = version
        self.trt = trt
        self.network: Any = None
        self.settings: dict[str, Any] = {}
        self.inputs: Sequence[Any] = ()
        self.module: GraphModule | None = None
        """What was converted."""
        self.constants: dict[int, Tensor] = {}
        """Values of the tensors that `get_trt_tensor` made, by their id."""
        self.without: set[Any] = set()
        self.failure = ""
        """What the build shall fail with."""
        self.ignores_tags = False
        """Whether what is tagged as random is computed beforehand as well."""
        self.registry = Registry(self)

    def layers(self, kind: str) -> list[Any]:
        """The layers of the last build that were added with this method of a network."""
        return [layer for layer in self.network._layers if layer._kind == kind]

    def value(self, tensor: Any) -> Tensor:
        """Of a constant of the network."""
        return self.constants[id(tensor)]

    def tensor(self, name: str, dtype: torch.dtype, shape: Sequence[Any]) -> Any:
        """An ITensor: -1 stands for a size that is not known yet."""
        sizes = tuple(size if isinstance(size, int) else -1 for size in shape)
        return self.trt._new("ITensor", name, getattr(self.trt.DataType, DTYPES[dtype]), sizes)


class Registry:
    """Which op is converted by what."""

    def __init__(self, fake: FakeTorchTensorRT) -> None:
        self._fake = fake
        self.converters: dict[Any, Callable[..., Any]] = {}
        self._compilation_settings: Any = None

    def __contains__(self, op: object) -> bool:
        return op in self.converters

    def set_compilation_settings(self, settings: Any) -> None:
        self._compilation_settings = settings

    def get(self, node: Node) -> Any:
        """None where there is no converter; nobody converts ops of ours unasked."""
        assert self._compilation_settings is not None, "the settings decide what is supported"
        found = self.converters.get(node.target)
        is_foreign = str(node.target).startswith("enginecast.")
        if found is None and (is_foreign or node.target in self._fake.without):
            return None
        return found or self._fake

    def register(self, op: Any, *, supports_dynamic_shapes: bool = False) -> Any:
        def keep(converter: Callable[..., Any]) -> Callable[..., Any]:
            assert supports_dynamic_shapes
            self.converters[op] = converter
            return converter

        return keep


class Input:
    """Takes shapes as the real one does: one, or three."""

    def __init__(self, **settings: Any) -> None:
        shapes = {name for name in settings if "shape" in name}
        assert shapes in ({"shape"}, {"min_shape", "opt_shape", "max_shape"})
        self.settings = settings


def modules(fake: FakeTorchTensorRT) -> dict[str, dict[str, Any]]:
    """What is called, by its module."""
    names = settings_of(fake.__version__)
    found: dict[str, dict[str, Any]] = {
        "torch_tensorrt": {"Input": Input},
        "torch_tensorrt.dynamo": {
            "CompilationSettings": make_dataclass(
                "CompilationSettings", [(name, Any, None) for name in names]
            ),
            "convert_exported_program_to_serialized_trt_engine": converter_of(fake, names),
        },
        "torch_tensorrt.dynamo.conversion": {
            "DYNAMO_CONVERTERS": fake.registry,
            "dynamo_tensorrt_converter": fake.registry.register,
        },
        "torch_tensorrt.dynamo.conversion.converter_utils": {"get_trt_tensor": constant_of(fake)},
        "torch_tensorrt.dynamo.lowering": {
            "get_decompositions": decompositions,
            "post_lowering": lambda module, settings: fold_constants(fake, module),
            "pre_export_lowering": lambda program, settings: program,
        },
    }
    called = called_names(fake.__version__)
    assert {name: tuple(sorted(members)) for name, members in found.items()} == called
    return found


def settings_of(version: str) -> tuple[str, ...]:
    return (*SETTINGS, *(OLDER if short_version(version) in ("2.11", "2.12") else ()))


def install(
    monkeypatch: pytest.MonkeyPatch, trt: Any, version: str = "2.13.0+fake"
) -> FakeTorchTensorRT:
    """A fake that `import torch_tensorrt` gives until the test ends."""
    fake = FakeTorchTensorRT(version, trt)
    for name, members in modules(fake).items():
        module = fake if name == "torch_tensorrt" else ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(tensorrt_versions, "installed", lambda name: {name: version})
    monkeypatch.setattr(torch, "__version__", f"{short_version(version)}.0+fake")
    return fake


@cache
def decompositions() -> dict[Any, Any]:
    """What is taken apart: norms of a root mean square, as by the real package."""
    table = default_decompositions()
    return {op: table[op] for op in TAKEN_APART}


def fold_constants(fake: FakeTorchTensorRT, module: GraphModule) -> GraphModule:
    """Compute what reads constants alone, unless it is tagged as random."""
    for node in list(module.graph.nodes):
        inputs = node.all_input_nodes
        tags = getattr(node.target, "tags", ())
        is_random = torch.Tag.nondeterministic_seeded in tags and not fake.ignores_tags
        if node.op != "call_function" or is_random or not inputs:
            continue
        if all(one.op == "get_attr" for one in inputs):
            values = {one: attribute(module, str(one.target)) for one in inputs}
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            name = f"folded_{node.name}"
            module.register_parameter(name, nn.Parameter(node.target(*args, **kwargs), False))
            with module.graph.inserting_before(node):
                constant = module.graph.get_attr(name)
            constant.meta.update(node.meta)
            node.replace_all_uses_with(constant)
            module.graph.erase_node(node)
    module.recompile()
    return module


def attribute(module: GraphModule, name: str) -> Tensor:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    assert isinstance(found, Tensor)
    return found.detach()


def constant_of(fake: FakeTorchTensorRT) -> Callable[..., Any]:
    def get_trt_tensor(ctx: Any, input_val: Tensor, name: str) -> Any:
        assert ctx.net is fake.network
        assert isinstance(input_val, Tensor)
        made = fake.tensor(name, input_val.dtype, input_val.shape)
        fake.constants[id(made)] = input_val
        return made

    return get_trt_tensor


def converter_of(fake: FakeTorchTensorRT, names: Sequence[str]) -> Callable[..., bytes]:
    """The function that builds; it takes any keyword, as the real one does."""

    def convert(program: ExportedProgram, **settings: Any) -> bytes:
        fake.inputs = settings.pop("arg_inputs")
        fake.settings = settings
        fake.network = fake.trt._new("INetworkDefinition", 0, None)
        plain = program.run_decompositions(decompositions())
        fake.module = fold_constants(fake, plain.module())
        try:
            _Walk(fake, fake.module).run(enable_io_processing=False)
            if fake.failure:
                raise RuntimeError(fake.failure)
        except Exception as error:
            raise RuntimeError(f"While interpreting the module got an error: {error}") from error
        return PLAN + json.dumps(sorted(settings)).encode()

    keyword = inspect.Parameter.KEYWORD_ONLY
    vars(convert)["__signature__"] = inspect.Signature(
        [
            inspect.Parameter("exported_program", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *(inspect.Parameter(name, keyword, default=None) for name in ("arg_inputs", *names)),
            inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
        ]
    )
    return convert


class _Walk(Interpreter):
    """Calls a converter for each node; of other ops, what they give is made up."""

    def __init__(self, fake: FakeTorchTensorRT, module: GraphModule) -> None:
        super().__init__(module)
        self._fake = fake
        self._inputs = iter(fake.inputs)
        self._ctx = SimpleNamespace(net=fake.network)

    def run_node(self, n: Node) -> Any:
        if n.op == "placeholder":
            assert next(self._inputs).settings["name"] == n.name
            return self._made(n)
        if n.op == "get_attr":
            return attribute(self.module, str(n.target))  # type: ignore[arg-type]
        if n.op == "output":
            return None
        converter = self._fake.registry.converters.get(n.target)
        if converter is None:
            return self._made(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        found = converter(self._ctx, n.target, args, kwargs, n.name)
        found._start(found.name, *self._type(n))
        return found

    def _made(self, n: Node) -> Any:
        return self._fake.tensor(n.name, *self._of(n)) if self._is_tensor(n) else n

    def _type(self, n: Node) -> tuple[Any, tuple[int, ...]]:
        made = self._made(n)
        return made.dtype, made.shape

    def _of(self, n: Node) -> tuple[torch.dtype, tuple[Any, ...]]:
        dtype = dtype_of(n)
        assert dtype is not None
        return dtype, shape_of(n)

    def _is_tensor(self, n: Node) -> bool:
        return isinstance(n.meta.get("val"), Tensor)
