"""The call of a module once for each answer to a test of values: `torch.cond` over complete calls.

Some code has None for a tensor on one path, such as an attention mask that masks nothing, and what
follows depends on that: no operator gives a tensor or None.  Here both calls go on by themselves up
to their results, and the test, which each of them reads again, chooses between these.  The module
is the innermost one that asks and whose results have one structure.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.jit import ScriptModule
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from enginecast.capture.control_flow.detect.recorder import place_of_reader
from enginecast.capture.control_flow.operators.dispatch import if_return
from enginecast.capture.control_flow.operators.sites import RewriteRefused, Site, running
from enginecast.capture.control_flow.operators.values import is_open
from enginecast.capture.python.locations import SourceLocation, is_user_code
from enginecast.capture.python.object_changes import mark
from enginecast.capture.python.recompile import forward_within, replaced
from enginecast.capture.python.tensor_facts import COMPUTED, TensorFacts, storage

MOST_ANSWERS = 3
"""On one path; each doubles the number of calls in the program."""
MOST_HELD, MOST_WITHIN = 20_000, 20
"""Values that are looked at in one object, and how deep, for a change that one path makes."""
Facts = Mapping[object, bool]
"""By what a test is: its answer."""


class _Asked(BaseException):
    """A test that has no answer yet; no code of a model catches this."""

    def __init__(self, test: Tensor, key: object, place: SourceLocation) -> None:
        super().__init__()
        self.test = test
        self.key = key
        self.place = place


@dataclass(frozen=True)
class _Call:
    """A call of a module, which may run several times."""

    part: nn.Module
    run: partial[Any]
    given: "_Held"
    """What its arguments held before it ran."""

    def state(self) -> "_Held":
        """What it may write to, as that is now."""
        return _Held([*self.run.args, *self.run.keywords.values(), *_reached_from(self.part)])


class _Held:
    """What Python objects hold that a call is given.

    What a path leaves there is not one of its results: code after the call would find what the last
    path has left.  Writes into tensors need no check here: `probe` sees them.
    """

    def __init__(self, objects: Sequence[object]) -> None:
        self._marks = [(each, self._mark(each)) for each in objects]

    def _mark(self, value: object) -> Any:
        if isinstance(value, dict) and "__builtins__" in value:  # the variables of a file
            value = {name: each for name, each in value.items() if name[:2] != "__"}
        return mark(value, MOST_HELD, MOST_WITHIN, has_writes=False)

    def refuse_changes(self, site: Site) -> None:
        for value, before in self._marks:
            if self._mark(value) != before:
                kind = type(value).__name__
                raise site.refuse(
                    f"the call around it writes into a {kind} that it has from outside"
                )


def _reached_from(module: nn.Module) -> Iterator[object]:
    """What the code of a module and of those in it may write to without being given it."""
    files: set[int] = set()
    for part in module.modules():
        yield from vars(part).values()
        for kind in type(part).__mro__:
            forward = vars(kind).get("forward")
            if not isinstance(forward, FunctionType):
                continue
            if not is_user_code(forward.__code__.co_filename):
                continue
            yield from vars(kind).values()
            if id(forward.__globals__) not in files:
                files.add(id(forward.__globals__))
                yield forward.__globals__


class _Paths:
    """Traces calls of modules in the paths that tests of values lead to."""

    def __init__(self) -> None:
        self._sites: list[Site] = []
        self._indices: dict[SourceLocation, int] = {}
        self._tracers: list[Any] = []
        self._calls = 0
        """How many calls of modules the code that runs is inside of."""
        self._is_over = False
        """Whether there were too many tests."""
        self._tests = _Tests()

    @contextmanager
    def active(self, module: nn.Module) -> Iterator[list[Site]]:
        """Let `module` and those in it run in all their paths; gives where tests choose."""
        with running(self._sites, module), ExitStack() as stack:
            for part in module.modules():
                if not isinstance(part, ScriptModule):
                    stack.enter_context(replaced(part, "forward", self._split_up(part)))
            stack.enter_context(forward_within(module, lambda: self._tests))
            yield self._sites

    def _split_up(self, part: nn.Module) -> Callable[..., Any]:
        forward = part.forward

        @functools.wraps(forward)
        def split(*args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            try:
                given = _Held([*args, *kwargs.values()])
                return self._follow(_Call(part, partial(forward, *args, **kwargs), given), {})
            finally:
                self._calls -= 1

        return split

    def _follow(self, call: _Call, facts: Facts) -> Any:
        """What `call` gives where these tests have these answers."""
        mode = get_proxy_mode()
        tracer: Any = self._tracers[-1] if mode is None else mode.tracer
        stack = dict(tracer.module_stack)
        self._tracers.append(tracer)
        try:
            with self._tests.knowing(facts):
                return call.run()
        except _Asked as asked:
            tracer.module_stack.clear()  # of the modules that the run was inside of
            tracer.module_stack.update(stack)
            return self._split(call, facts, asked)
        finally:
            self._tracers.pop()

    def _split(self, call: _Call, facts: Facts, asked: _Asked) -> Any:
        index = self._indices.setdefault(asked.place, len(self._sites))
        if index == len(self._sites):
            self._sites.append(Site(asked.place.file, asked.place.line, "forward", "if"))
        if self._tests.depth + len(facts) >= MOST_ANSWERS:
            self._is_over = True
            raise self._sites[index].refuse(f"more than {MOST_ANSWERS} tests decide its path")
        site, before = self._sites[index], call.state()

        def path(answer: bool) -> Any:
            found = self._follow(call, {**facts, asked.key: answer})
            before.refuse_changes(site)
            return found

        then, otherwise = partial(path, True), partial(path, False)
        try:
            call.given.refuse_changes(site)
            return if_return(index, asked.test, then, otherwise, (), "the result")
        except RewriteRefused:
            if self._is_over or self._calls == 1:
                raise
            raise asked from None  # of the module that calls this one


def every_path(module: nn.Module) -> AbstractContextManager[list[Site]]:
    """Let `module` and those in it run in all their paths; gives where tests choose."""
    return _Paths().active(module)


class _Tests(TorchFunctionMode):
    """Answers tests from what is known; the same test has the same answer each time."""

    def __init__(self) -> None:
        super().__init__()
        self._known: list[Facts] = []
        self._keys = TensorFacts[object]()
        """How each tensor is computed."""

    @property
    def depth(self) -> int:
        """How many answers are known where the code runs."""
        return sum(map(len, self._known))

    @contextmanager
    def knowing(self, facts: Facts) -> Iterator[None]:
        """Within the block, these tests have these answers, too."""
        self._known.append(facts)
        try:
            yield
        finally:
            self._known.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__bool__ and is_open(args[0]):
            key = self._key(args[0])
            for facts in self._known:
                if key in facts:
                    return facts[key]
            raise _Asked(args[0], key, place_of_reader())
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in COMPUTED and isinstance(result, Tensor) and result not in self._keys:
            self._note(result, self._computed(name, result, args, kwargs))
        return result

    def _computed(self, name: str, result: Tensor, args: Any, kwargs: Any) -> object:
        """How `result` is computed; equal for equal values, however often they are computed."""
        if isinstance(args[0], Tensor) and _is_all_of(result, args[0]):
            return self._key(args[0])
        leaves, spec = pytree.tree_flatten((args, kwargs))
        parts = (
            self._key(leaf) if isinstance(leaf, Tensor) else (type(leaf), str(leaf))
            for leaf in leaves
        )
        return (name, str(spec), *parts)

    def _key(self, tensor: Tensor) -> object:
        """How a tensor is computed, or which one it is, and how often it was written to."""
        key = self._keys.of(tensor)
        return key if key is not None else self._note(tensor, (id(tensor), tensor._version))

    def _note(self, tensor: Tensor, key: object) -> object:
        self._keys.note(tensor, key)
        return key


def _is_all_of(part: Tensor, whole: Tensor) -> bool:
    """Whether a view is the tensor itself, such as a slice up to its end."""
    if part.dtype != whole.dtype or part.dim() != whole.dim() or storage(part) != storage(whole):
        return False
    places = zip(_layout(part), _layout(whole), strict=True)
    return all(statically_known_true(one == other) for one, other in places)


def _layout(tensor: Tensor) -> list[Any]:
    return [*tensor.shape, *tensor.stride(), tensor.storage_offset()]
