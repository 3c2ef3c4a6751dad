"""Which names of TensorRT a source file uses, found without running it.

The module is called `trt` everywhere, so `trt.X` and `trt.X.Y` are read as they stand.  Objects of
TensorRT have no types here; they are known by where they come from: a call of a class
(`trt.X(...)`), a call that gives one (`GIVES`), or a parameter, an attribute, or the result of a
function, that is annotated `Any` and called by its role (`ROLES`).  That every parameter and field
annotated `Any` has a role, or is said to be something else, makes sure that none goes unseen.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

MODULE = "trt"
GIVES = {
    "create_network": "INetworkDefinition",
    "create_builder_config": "IBuilderConfig",
    "create_optimization_profile": "IOptimizationProfile",
    "build_serialized_network": "IHostMemory",
    "create_timing_cache": "ITimingCache",
    "get_timing_cache": "ITimingCache",
    "serialize": "IHostMemory",
    "deserialize_cuda_engine": "ICudaEngine",
    "create_execution_context": "IExecutionContext",
    "create_engine_inspector": "EngineInspector",
    "get_error": "ParserError",
    "get_input": "ITensor",
    "get_output": "ITensor",
    "add_quantize": "IQuantizeLayer",
    "add_dequantize": "IDequantizeLayer",
    "add_normalization": "INormalizationLayer",
}
"""Method -> the class of what it gives."""
ROLES = {
    "builder": "Builder",
    "config": "IBuilderConfig",
    "context": "IExecutionContext",
    "engine": "ICudaEngine",
    "error": "ParserError",
    "inspector": "EngineInspector",
    "layer": "ILayer",
    "net": "INetworkDefinition",
    "logger": "ILogger",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "profile": "IOptimizationProfile",
    "refitter": "Refitter",
    "runtime": "Runtime",
    "x": "ITensor",
}
BASES = {
    "IDequantizeLayer": "ILayer",
    "INormalizationLayer": "ILayer",
    "IQuantizeLayer": "ILayer",
    "Logger": "ILogger",
}


@dataclass(frozen=True)
class Found:
    """What one file uses."""

    used: list[tuple[int, str]] = field(default_factory=list)
    """(line, "Builder.create_network" or "Builder")."""
    untyped: list[tuple[int, str]] = field(default_factory=list)
    """(line, name) of each parameter and field annotated `Any` that has no role."""


def names_in(source: str) -> Found:
    """All names of TensorRT in a source file."""
    found, tree = Found(), ast.parse(source)
    fields = _fields(tree, found)
    for node in ast.walk(tree):
        _module_names(node, found)
    _scope(tree, {}, fields, found)
    return found


def listed(name: str, names: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether a name is in the list, as a member of its class or of the one that this derives
    from.
    """
    owner, _, member = name.partition(".")
    if owner not in names:
        return False
    if not member or member in names[owner]:
        return True
    return owner in BASES and listed(f"{BASES[owner]}.{member}", names)


def _module_names(node: ast.AST, found: Found) -> None:
    if not isinstance(node, ast.Attribute) or node.attr.startswith("__"):
        return
    owner = node.value
    if _is_module(owner):
        found.used.append((node.lineno, node.attr))
    elif isinstance(owner, ast.Attribute) and _is_module(owner.value):
        found.used.append((node.lineno, f"{owner.attr}.{node.attr}"))


def _is_module(node: ast.AST) -> bool:
    """`trt`, or `self._trt`."""
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name.lstrip("_") == MODULE


def _fields(tree: ast.AST, found: Found) -> set[str]:
    """Names of the fields that are annotated `Any`, and of those known by their role."""
    names = {"net", "engine"}  # of torch_tensorrt's context, and of a plan that was read
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and _is_any(node.returns):
            names.add(node.name if _is_property(node) else f"{node.name}()")
        for line in node.body if isinstance(node, ast.ClassDef) else ():
            if not isinstance(line, ast.AnnAssign) or not _is_any(line.annotation):
                continue
            if isinstance(line.target, ast.Name):
                names.add(line.target.id)
                _note_untyped(line.lineno, line.target.id, found)
    return names


def _set_in(tree: ast.AST) -> set[str]:
    """The attributes of a class that hold what is called by its role."""
    return {
        target.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _may_be_tensorrts(node.value)
        for target in node.targets
        if isinstance(target, ast.Attribute) and target.attr.lstrip("_") in ROLES
    }


def _may_be_tensorrts(value: ast.expr) -> bool:
    """A parameter, or what a method gives; not an object of a class of ours."""
    return isinstance(value, ast.Name) or (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
    )


def _is_property(function: ast.FunctionDef) -> bool:
    return any(
        isinstance(one, ast.Name) and one.id == "property" for one in function.decorator_list
    )


def _is_any(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


def _note_untyped(line: int, name: str, found: Found) -> None:
    if name not in (MODULE, *ROLES):
        found.untyped.append((line, name))


def _scope(node: ast.AST, known: dict[str, str], fields: set[str], found: Found) -> None:
    """Look through a function or module in the order of its lines; nested ones see its names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            inner = known | _parameters(child, found)
            for hidden in _hidden(child):
                inner.pop(hidden, None)
            _scope(child, inner, fields, found)
            continue
        own = _set_in(child) if isinstance(child, ast.ClassDef) else set()
        _scope(child, known, fields | own, found)
        if isinstance(child, (ast.Assign, ast.withitem, ast.For)):
            _assign(child, known, fields)
        if isinstance(child, ast.Attribute):
            kind = _kind(child.value, known, fields)
            if kind is not None:
                found.used.append((child.lineno, f"{kind}.{child.attr}"))


def _arguments(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Iterator[ast.arg]:
    spec = function.args
    yield from (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)


def _parameters(
    function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, found: Found
) -> dict[str, str]:
    known = {}
    for argument in _arguments(function):
        if _is_any(argument.annotation):
            _note_untyped(argument.lineno, argument.arg, found)
            if argument.arg in ROLES:
                known[argument.arg] = ROLES[argument.arg]
    return known


def _hidden(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[str]:
    return [argument.arg for argument in _arguments(function) if not _is_any(argument.annotation)]


def _assign(node: ast.AST, known: dict[str, str], fields: set[str]) -> None:
    pairs: list[tuple[ast.expr | None, ast.expr | None]] = []
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs += list(zip(target.elts, node.value.elts, strict=False))
            else:
                pairs.append((target, node.value))
    elif isinstance(node, ast.withitem):
        pairs.append((node.optional_vars, node.context_expr))
    elif isinstance(node, ast.For):
        pairs.append((node.target, None))
    for bound, given in pairs:
        if isinstance(bound, ast.Name):
            kind = None if given is None else _kind(given, known, fields)
            if kind is None and _is_untyped_call(given, fields):
                kind = ROLES.get(bound.id)
            known.pop(bound.id, None)
            if kind is not None:
                known[bound.id] = kind


def _is_untyped_call(value: ast.expr | None, fields: set[str]) -> bool:
    """Whether it is the result of a function of this file that is annotated `Any`."""
    called = value.func if isinstance(value, ast.Call) else None
    return isinstance(called, ast.Name) and f"{called.id}()" in fields


def _kind(node: ast.expr, known: Mapping[str, str], fields: set[str]) -> str | None:
    """The class of TensorRT that an expression is an object of; None: of none that is known."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        return ROLES.get(node.attr.lstrip("_")) if node.attr in fields else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner, method = node.func.value, node.func.attr
        if _is_module(owner):
            return method
        return GIVES.get(method) if _kind(owner, known, fields) else None
    return None
