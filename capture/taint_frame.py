"""One activation of a function that the scan walks through, and what the walk offers it."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from enginecast.capture.findings import Finding, Kind
from enginecast.capture.taint import CLEAN, PLAIN, Value
from enginecast.capture.taint_source import FunctionNode, line_of


@dataclass(frozen=True)
class Arguments:
    """What a call passes on."""

    positional: tuple[Value, ...] = ()
    named: Mapping[str, Value] = field(default_factory=dict)
    rest: Value | None = None
    """Of *args and **kwargs of which the elements are not known."""

    @property
    def all(self) -> tuple[Value, ...]:
        rest = () if self.rest is None else (self.rest,)
        return (*self.positional, *self.named.values(), *rest)

    def prepend(self, value: Value) -> "Arguments":
        return Arguments((value, *self.positional), self.named, self.rest)


@dataclass(frozen=True, eq=False)
class Local:
    """A function that is defined within the code that is walked."""

    node: FunctionNode
    frame: "Frame"


class Walk(Protocol):
    """What frames need of the walk."""

    is_eager: bool

    def evaluate(self, node: ast.expr, frame: "Frame") -> Value: ...

    def execute(self, statements: list[ast.stmt], frame: "Frame") -> frozenset[str]: ...

    def call(
        self, function: Value, arguments: Arguments, frame: "Frame", node: ast.expr
    ) -> Value: ...

    def call_node(self, node: ast.Call, frame: "Frame") -> Value: ...

    def attribute(self, value: Value, name: str, frame: "Frame") -> Value | None: ...

    def write_state(self, owner: object, name: str, *, is_constant: bool = False) -> None: ...


@dataclass(eq=False)
class Frame:
    """Names and findings of one activation."""

    walk: Walk
    file: str
    function: str
    module: str
    """Dotted path of the module that runs."""
    names: dict[str, Value]
    globals: Mapping[str, Any]
    outer: "Frame | None" = None
    owner: type | None = None
    """The class in which the function is defined, for `super()`."""
    tries: int = 0
    """How many `try` bodies are around."""
    is_quiet: bool = False
    """Within an expression of which the reads do not matter, such as a raise."""
    returns: list[Value] = field(default_factory=list)
    met: dict[tuple[object, ...], Finding] = field(default_factory=dict)
    inner: dict[tuple[object, ...], list[Finding]] = field(default_factory=dict)
    """Findings of the functions that it called, by call."""

    def lookup(self, name: str) -> Value | None:
        frame: Frame | None = self
        while frame is not None:
            if name in frame.names:
                return frame.names[name]
            frame = frame.outer
        return None

    def evaluate(self, node: ast.expr | None) -> Value:
        return CLEAN if node is None else self.walk.evaluate(node, self)

    def attribute(self, value: Value, name: str) -> Value | None:
        """`value.name` of a known object; None when it has none that can be told."""
        return self.walk.attribute(value, name, self)

    def meet(
        self,
        kind: Kind,
        node: ast.AST,
        value: Value,
        *,
        blocking: bool,
        shown: ast.AST | None = None,
    ) -> None:
        """Note what is met at a node."""
        if self.is_quiet:
            return
        line = getattr(node, "lineno", 0)
        key = (line, getattr(node, "col_offset", 0), kind)
        self.met[key] = Finding(
            kind=kind,
            file=self.file,
            line=line,
            code=line_of(self.file, line),
            function=self.function,
            module=self.module,
            tensor=ast.unparse(shown or node),
            decides="state" if kind == "state" else value.decides,
            witnesses=("scan",),
            is_blocking=blocking,
        )

    def write(self, node: ast.AST, owner: Value, name: str, value: Value) -> None:
        """Note that a module's attribute is written; a constant is the same in every call."""
        is_constant = value.is_known and isinstance(value.const, PLAIN)
        self.meet("state", node, owner, blocking=not is_constant)
        self.walk.write_state(owner.const, name, is_constant=is_constant)

    def decide(self, kind: Kind, node: ast.AST, test: ast.expr, value: Value) -> None:
        """Note that Python decides by a value, where that matters to a capture."""
        if value.vague:
            return
        if value.is_data or "state" in value.labels:
            self.meet(kind, node, value, blocking=True, shown=test)
        elif value.labels & {"shapes", "dtypes"}:
            # A loop over a shape is unrolled at the example's size; a branch on one is a guard.
            is_loop = kind in ("for", "while", "comprehension") and "shapes" in value.labels
            self.meet(kind, node, value, blocking=is_loop, shown=test)

    def read(self, kind: Kind, node: ast.AST, value: Value, *, blocking: bool = False) -> Value:
        """Note that Python reads a tensor's values; what it then has."""
        if self.tries:
            kind, blocking = "try", True
        self.meet(kind, node, value, blocking=blocking)
        return Value(labels=value.labels, read=True)

    def all_met(self) -> list[Finding]:
        """Its own findings and those of what it called."""
        return [*self.met.values(), *(each for inner in self.inner.values() for each in inner)]
