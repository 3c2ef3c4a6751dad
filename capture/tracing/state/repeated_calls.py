"""Detect state that a model's Python code keeps between calls, and random numbers.

A counter that scales the result is a constant in the program, and so is what the last call left.
So eager is called on some inputs, on others, and on the first ones again, which must give the same;
what is found changed in between is named.  What goes on changing with equal inputs, such as a
counter, is followed far ahead.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from enginecast.capture.python.locations import calling_place
from enginecast.capture.tracing.state.watched_names import Change, Watch
from enginecast.errors import CaptureError, EnginecastError
from enginecast.passes.ir.effects import WITHOUT_NOISE

Outputs = Mapping[str, Tensor]
Call = Callable[[nn.Module, Mapping[str, Tensor]], Outputs]

SAME = 1e-5
"""Relative L2 distance of two calls with equal inputs: kernels that add in another order from call
to call stay far below it in fp32."""
MOST_CALLS, MOST_SECONDS = 200, 2.0
"""How often a model is called whose state goes on changing."""
AHEAD = (1_000, 1_000_000)
"""Calls after which a counter is looked at."""


class CalledInTurn:
    """Calls a module; before it does so for the first time, sees whether it keeps anything.

    That costs three runs, and a few more where something changes: the inputs should be small.  What
    the first two gave is what a later call with these inputs gets.
    """

    def __init__(
        self,
        call: Call,
        inputs: Mapping[str, Tensor],
        others: Sequence[Mapping[str, Tensor]] = (),
        trained: frozenset[str] = frozenset(),
    ) -> None:
        """
        Args:
            others: other values, and other sizes.
            trained: the modules that were given in train mode.
        """
        self._call = call
        self._inputs = inputs
        self._others = others
        self._trained = trained
        self._is_done = False
        self._known: list[tuple[nn.Module, Mapping[str, Tensor], Outputs]] = []
        """What the first calls gave, until it is asked for."""
        self.notes: tuple[str, ...] = ()
        """What the module's own code changes without another result, as sentences."""

    def __call__(self, module: nn.Module, inputs: Mapping[str, Tensor]) -> Outputs:
        """Run `module` on `inputs`.

        Raises:
            CaptureError: the result depends on earlier calls, on random numbers, or on the mode.
        """
        if not self._is_done:
            self._is_done = True
            self._look(module)
        for index, (called, known, outputs) in enumerate(self._known):
            if called is module and _are_equal(known, inputs):
                del self._known[index]
                return outputs
        return self._call(module, inputs)

    def _look(self, module: nn.Module) -> None:
        watch = Watch(module)
        try:
            with watch.following():
                first = _copies(self._call(module, _copies(self._inputs)))
            self._known.append((module, self._inputs, first))
            for index, other in enumerate(self._others or [self._inputs]):
                if index and not watch.changes():
                    break
                between = self._try(module, other)
                if between is not None:
                    self._known.append((module, other, _copies(between)))
                again = self._call(module, _copies(self._inputs))
                if any(_differ(first[name], again[name]) for name in first):
                    changes = watch.changes()
                    _compare(first, again, changes, self._draw(module))
        except EnginecastError:
            raise
        except Exception:  # it is reported when the case is run for its own sake
            return
        changes = watch.changes()
        if changes:
            self._go_on(module, first, watch)
        if self._trained:
            self._compare_modes(module, first)
        self.notes = _harmless(changes)

    def _draw(self, module: nn.Module) -> str:
        """The op that draws random numbers, and its line; empty: none was found."""
        with _Draws() as draws:  # not at all times: torch.cond does not run under a mode of ours
            self._try(module, self._inputs)
        place: str = draws.place
        return place

    def _try(self, module: nn.Module, inputs: Mapping[str, Tensor]) -> Outputs | None:
        try:
            return self._call(module, _copies(inputs))
        except EnginecastError:
            raise
        except Exception:  # the model may refuse such inputs, or a counter that it never reaches
            return None

    def _go_on(self, module: nn.Module, first: Outputs, watch: Watch) -> None:
        """Call a module on and on whose state has not settled."""
        watch.look()
        before = self._try(module, self._inputs)
        running = watch.moved()
        if before is None or not running:
            return
        started = time.monotonic()
        for _ in range(MOST_CALLS):
            found = self._try(module, self._inputs)
            if found is not None:
                _compare(first, found, watch.changes())
            if time.monotonic() - started > MOST_SECONDS:
                break
        for change, holder, key, was in running:
            now = holder.names().get(key)
            if not isinstance(was, (int, float)) or not isinstance(now, (int, float)):
                continue
            for calls in AHEAD:
                holder.write(key, now + (1 if now >= was else -1) * calls)
                found = self._try(module, self._inputs)
                holder.write(key, now)
                if found is not None:
                    _compare(first, found, [change])

    def _compare_modes(self, module: nn.Module, first: Outputs) -> None:
        """Refuse a model that was given in train mode, where that gives another result."""
        parts = {name: part for name, part in module.named_modules() if name in self._trained}
        kept = {name: tensor.clone() for name, tensor in module.named_buffers()}
        with torch.random.fork_rng(devices=[]):
            try:
                for part in parts.values():
                    part.training = True
                found = self._try(module, self._inputs)
                written = [n for n, t in module.named_buffers() if not torch.equal(t, kept[n])]
            finally:
                for part in parts.values():
                    part.training = False
                for name, tensor in module.named_buffers():
                    tensor.data.copy_(kept[name])
        same = found is not None and found.keys() == first.keys()
        if same and not written and not any(_differ(first[n], found[n]) for n in first):  # type: ignore[index]
            return
        reasons = [why for name, part in parts.items() if (why := _trains(name, part))]
        reasons = reasons or [f"it writes to {name!r}" for name in written]
        raise CaptureError(
            "the model is in train mode, where it gives another result than for inference: "
            f"{'; '.join(reasons[:4]) or 'its code asks for self.training'}",
            hint="Call .eval() on it first.",
        )


def _harmless(changes: Sequence[Change]) -> tuple[str, ...]:
    """Sentences on changes that leave the result as it is."""
    return tuple(
        f"forward changes {change}; an engine keeps no state, and the result is the same"
        for change in changes
        if change.place  # else some library's bookkeeping
    )


def _trains(name: str, module: nn.Module) -> str:
    """What a module does in train mode alone, in words; empty: nothing that is known."""
    rate = getattr(module, "p", getattr(module, "dropout", 0.0))
    if isinstance(rate, float) and rate > 0:
        return f"{name!r} ({type(module).__name__}) drops values"
    if isinstance(module, nn.modules.batchnorm._NormBase) and "Batch" in type(module).__name__:
        return f"{name!r} ({type(module).__name__}) uses and updates the statistics of the batch"
    return ""


class _Draws(TorchDispatchMode):
    """Finds where random numbers are drawn first."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place: str = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.place or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = torch.get_rng_state()
        found = func(*args, **(kwargs or {}))
        if not torch.equal(before, torch.get_rng_state()):
            place = calling_place()
            self.place = f"{func}{f' at {place}' if place else ''}"
        return found


def _compare(first: Outputs, found: Outputs, changes: list[Change], draw: str = "") -> None:
    """Refuse other outputs for equal inputs."""
    for name in first:
        if name not in found or _differ(first[name], found[name]):
            _refuse(changes, name, draw)


def _refuse(changes: list[Change], output: str, draw: str) -> None:
    if draw:
        raise CaptureError(
            f"two calls with equal inputs give different values of {output!r}: the model draws"
            f" random numbers, by {draw}",
            hint=WITHOUT_NOISE,
        )
    if changes:
        raise CaptureError(
            "the model keeps state that changes its result: forward changes "
            f"{'; '.join(map(str, changes[:4]))}, and a later call with equal inputs gives "
            f"another {output!r}",
            hint="An engine keeps no state between calls: make it an input and return the new "
            "value, or keep it in a buffer and give --stateful.",
        )
    raise CaptureError(
        f"two calls with equal inputs give different values of {output!r}: the model draws random "
        "numbers, or keeps state outside of its modules",
        hint=WITHOUT_NOISE,
    )


def _differ(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return True
    if torch.equal(left, right):
        return False
    one, other = left.double().nan_to_num(), right.double().nan_to_num()
    if not torch.equal(left.isfinite(), right.isfinite()):
        return True
    return bool((one - other).norm() > SAME * one.norm())


def _are_equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        found.dtype == right[name].dtype and torch.equal(found, right[name])
        for name, found in left.items()
    )


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
