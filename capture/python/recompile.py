"""Swap attributes, or the code of functions, within a `with` block: source -> syntax tree -> code.

Only `function.__code__` is exchanged. So a function keeps its identity, its defaults and its
closure, and whoever holds it (a module's class, a decorator, a name imported elsewhere) runs the
new code. The new code keeps the file and the line numbers of the nodes it was made from, which is
why stack traces and `node.meta["stack_trace"]` still name the user's lines.
"""

import __future__

import ast
import copy
import functools
import inspect
import linecache
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

from enginecast.errors import CaptureError

FACTORY = "_enginecast_factory"
OWN = "_ec_"
"""How the names of functions begin that new code defines for itself: traces show them under the
name of the function they stand in, and torch.export keeps only frames called `forward`."""


_FUTURES = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)
"""Flags of code that was compiled with `from __future__ import ...`."""


class SourceUnavailable(CaptureError):  # noqa: N818, a fact about a function and no fault of it
    """The source of a function cannot be read; the message says which function and why."""


@dataclass(frozen=True)
class FunctionSource:
    """A function and the syntax tree it was compiled from."""

    function: FunctionType
    """The innermost function, below decorators that name it in `__wrapped__`."""
    definition: ast.FunctionDef
    """A copy, with the line numbers of the file and the decorators."""
    file: str


def innermost(function: Callable[..., Any]) -> FunctionType:
    """The Python function below methods, partials and decorators that set `__wrapped__`.

    Raises:
        SourceUnavailable: there is none, as with functions written in C.
    """
    inner: Any = function
    for _ in range(100):
        if isinstance(inner, MethodType):
            inner = inner.__func__
        elif isinstance(inner, functools.partial):
            inner = inner.func
        elif hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        else:
            break
    if isinstance(inner, FunctionType):
        return inner
    name = getattr(function, "__qualname__", None) or repr(function)
    raise SourceUnavailable(
        f"{name} is compiled code ({type(inner).__name__}) without Python source"
    )


def source_of(function: Callable[..., Any]) -> FunctionSource:
    """The syntax tree of `function`, with the line numbers of its file.

    Raises:
        SourceUnavailable: it is not a Python function, was compiled from a string, its file is gone
            or has changed since, or it is a lambda, a generator or a coroutine.
    """
    inner = innermost(function)
    code = inner.__code__
    name, file = inner.__qualname__, code.co_filename
    if code.co_name == "<lambda>":
        raise SourceUnavailable(f"{file}:{code.co_firstlineno} is a lambda: it has no statements")
    if inspect.iscoroutinefunction(inner) or inspect.isgeneratorfunction(inner):
        raise SourceUnavailable(f"{file}:{code.co_firstlineno} {name} is a generator or coroutine")
    lines = linecache.getlines(file, inner.__globals__)
    if not lines:
        raise SourceUnavailable(f"the source of {name} is not available: it comes from {file}")
    definition = _functions("".join(lines), file).get((code.co_name, code.co_firstlineno))
    now, *stars = inspect.getargs(code)
    if definition is None or _arguments(definition) != [*now, *filter(None, stars)]:
        raise SourceUnavailable(
            f"{file}:{code.co_firstlineno} no longer holds {name}: "
            "the file has changed since it was imported"
        )
    return FunctionSource(inner, copy.deepcopy(definition), file)


@contextmanager
def swapped(replacements: Mapping[FunctionType, ast.FunctionDef]) -> Iterator[None]:
    """Run each function with the code of another definition; the old code is back afterwards.

    A definition has the arguments of its function and may read the same free variables; its
    decorators, defaults and annotations are ignored. It may import what it needs in its body.
    Swaps may be nested, and are undone after errors as well.
    """
    compiled = {
        function: recompiled(function, definition) for function, definition in replacements.items()
    }
    before = [(function, function.__code__) for function in compiled]
    try:
        for function, code in compiled.items():
            function.__code__ = code
        yield
    finally:
        for function, code in reversed(before):
            function.__code__ = code


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Give `owner` another attribute for the time of the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def forward_within(
    module: Any, around: Callable[[], AbstractContextManager[object]]
) -> Iterator[None]:
    """Let `module.forward` run within a context of its own, such as a mode of torch's, in each call
    for the time of the block.
    """
    forward = module.forward

    @functools.wraps(forward)  # torch.export asks for its signature
    def run(*args: Any, **kwargs: Any) -> Any:
        with around():
            return forward(*args, **kwargs)

    with replaced(module, "forward", run):
        yield


def recompiled(function: FunctionType, definition: ast.FunctionDef) -> CodeType:
    """The code of `definition`, such that it can be set as `function.__code__`.

    Nothing is executed: the definition is compiled inside a function that has the free variables
    as arguments, and inside the class that it stands in (names such as `self.__x` depend on it, in
    functions inside methods too), and its code is taken out of the result.

    Raises:
        SourceUnavailable: the new code has other free variables, so that it cannot replace the old.
    """
    old = function.__code__
    bare = _bare(definition, old.co_freevars)
    # The innermost class that a function is defined in, in a method too; empty: in none.
    parts = old.co_qualname.split(".")
    names = zip(parts, [*parts[1:-1], ""], strict=False)
    classes = [name for name, after in names if name.isidentifier() and after != "<locals>"]
    owner = next(iter(classes[-1:]), "") if len(parts) > 1 else ""
    body: list[ast.stmt] = [bare]
    if owner:
        body = [ast.ClassDef(name=owner, bases=[], keywords=[], body=body, decorator_list=[])]
    # What is defined here is a local name of the factory: code that names the function or its class
    # means the global one, unless the old code closed over it.
    defined = owner or definition.name
    if defined not in old.co_freevars:
        body.insert(0, ast.Global(names=[defined]))
    given = arguments(old.co_freevars)
    factory = ast.FunctionDef(name=FACTORY, args=given, body=body, decorator_list=[])
    module = ast.Module(body=[ast.copy_location(factory, definition)], type_ignores=[])
    ast.fix_missing_locations(module)
    futures = old.co_flags & _FUTURES
    whole = compile(module, old.co_filename, "exec", flags=futures, dont_inherit=True)
    code = whole
    for name in (FACTORY, *filter(None, [owner]), definition.name):
        inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
        code = next(constant for constant in inner if constant.co_name == name)
    if code.co_freevars != old.co_freevars:
        raise SourceUnavailable(
            f"{old.co_filename}:{old.co_firstlineno} {old.co_qualname} cannot run other code: it "
            f"has the free variables {list(old.co_freevars)}, the new code {list(code.co_freevars)}"
        )
    return _renamed(code, old).replace(co_firstlineno=old.co_firstlineno)


def arguments(names: Iterable[str]) -> ast.arguments:
    """Arguments without default values."""
    given = [ast.arg(arg=name) for name in names]
    return ast.arguments(posonlyargs=[], args=given, kwonlyargs=[], kw_defaults=[], defaults=[])


def _renamed(code: CodeType, outer: CodeType) -> CodeType:
    constants = tuple(
        _renamed(constant, outer if constant.co_name.startswith(OWN) else constant)
        if isinstance(constant, CodeType)
        else constant
        for constant in code.co_consts
    )
    return code.replace(co_name=outer.co_name, co_qualname=outer.co_qualname, co_consts=constants)


def first_line(definition: ast.FunctionDef) -> int:
    """Where Python says that the function begins: at its first decorator."""
    return min([definition.lineno, *(node.lineno for node in definition.decorator_list)])


@functools.lru_cache(maxsize=256)
def _functions(text: str, file: str) -> Mapping[tuple[str, int], ast.FunctionDef]:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise SourceUnavailable(f"{file} cannot be read as Python any more: {error}") from error
    found = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {(node.name, first_line(node)): node for node in found}


def _arguments(definition: ast.FunctionDef) -> list[str]:
    """Names of the arguments in the order of `co_varnames`."""
    spec = definition.args
    listed = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
    return [argument.arg for argument in listed if argument is not None]


def _bare(definition: ast.FunctionDef, free: tuple[str, ...]) -> ast.FunctionDef:
    """A copy without decorators, default values and annotations, that names all of `free`."""
    bare = copy.deepcopy(definition)
    bare.decorator_list, bare.returns = [], None
    nothing = ast.Constant(value=None)
    bare.args.defaults = [nothing for _ in bare.args.defaults]
    bare.args.kw_defaults = [default and nothing for default in bare.args.kw_defaults]
    spec = bare.args
    for argument in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg):
        if argument is not None:
            argument.annotation = None
    if free:  # never run, and dropped by the compiler, but it keeps the closure as it is
        names: list[ast.expr] = [ast.Name(id=name, ctx=ast.Load()) for name in free]
        kept = ast.Expr(value=ast.Tuple(elts=names, ctx=ast.Load()))
        never = ast.If(test=ast.Constant(value=False), body=[kept], orelse=[])
        bare.body.insert(1 if ast.get_docstring(bare) is not None else 0, never)
    return bare
