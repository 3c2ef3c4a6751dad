"""Graphs that are drawn: 5 to 20 operators with views, writes, integers, ties, masks, empty tensors.

A graph is source code, so that a finding can be read and run.  Each statement was tried in eager
when it was drawn, at three batch sizes; a statement that fails is drawn again.
"""

import copy
import linecache
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from adversary.case import Group, marks, normal, whole

CASES = Group("generated", "drawn graphs")
COUNT = 120
WIDTH = 6
Values = dict[str, Tensor]
EXAMPLE: Values = {"x": normal(3, 4, WIDTH), "i": whole(3, 4, high=WIDTH), "m": marks(3, WIDTH)}
NAMESPACE = {"torch": torch, "F": torch.nn.functional, "Tensor": Tensor}

FLOATS = (
    "{a}.relu()",
    "{a}.tanh()",
    "{a} * {b}",
    "{a} + {b}",
    "{a} - {b} * 0.5",
    "{a} / ({b}.abs() + 0.5)",
    "{a}.sigmoid() * {b}",
    "{a}.softmax(-1)",
    "{a}.round()",
    "{a}.floor() * 0.5",
    "{a}.clamp(-1, 1)",
    "{a}.exp().clamp(max=50.0)",
    "{a}.abs().sqrt()",
    "{a}.square().mean(-1, keepdim=True)",
    "{a}.mean(1, keepdim=True)",
    "{a}.amax(-1, keepdim=True)",
    "{a}.cumsum(-1)",
    "{a}.transpose(1, 2)",
    "{a}.mT.contiguous()",
    "{a}.flip(-1)",
    "{a}.roll(1, 1)",
    "{a}[:, 1:]",
    "{a}[:, :, ::2]",
    "{a}[:, :0]",
    "{a}[..., :1]",
    "{a}[:, -1]",
    "{a}.unsqueeze(1)",
    "{a}.reshape({a}.shape[0], -1)",
    "{a}.flatten(1)",
    "{a}.expand(2, *{a}.shape)[1]",
    "torch.cat([{a}, {a}], -1)",
    "torch.cat([{a}, {b}], 1)",
    "torch.stack([{a}, {a} * 2], -1).sum(-1)",
    "torch.where({c}, {a}, -{a})",
    "torch.where({a} > {b}, {a}, {b} * 0.25)",
    "{a}.masked_fill({c}, -1e4)",
    "{a}.masked_fill({a} > 1, 0.0)",
    "{a}.sort(-1).values",
    "{a}.topk(1, -1).values",
    "{a} @ {a}.mT",
    "{a} @ {b}",
    "{a}.sum()",
    "{a}.sum(-1)",
    "{a}.float()",
    "{i} * 0.5",
    "{c}.float()",
    "{a} + {i}.sum()",
    "F.layer_norm({a}, {a}.shape[-1:])",
    "F.gelu({a})",
    "F.silu({a})",
    "{a} + 1e-8",
    "{a} * 1.00001",
    "{a} // 0.3",
    "{a} % 0.7",
    "{a}.gather(-1, ({a}.argsort(-1)))",
    "{a} * torch.rsqrt({a}.pow(2).mean(-1, keepdim=True) + 1e-6)",
    "F.pad({a}, (1, 1))",
    "{a}.unfold(-1, 2, 1).sum(-1)",
    "torch.einsum('b...i,b...i->b...', {a}, {a})",
)
INTEGERS = (
    "{i} * 3 - 1",
    "{i} // 2",
    "{i} % 3",
    "-{i} // 4",
    "{i} + {i}.flip(-1)",
    "{i}.cumsum(-1)",
    "{i} & 3",
    "{i} << 2",
    "{i}.sum(-1)",
    "{i}.clamp(0, 2)",
    "{a}.argmax(-1)",
    "{a}.round().argmax(-1)",
    "{a}.argsort(-1, stable=True)",
    "({a} * 3).long()",
    "{c}.sum(-1)",
    "{c}.long().cumsum(-1)",
    "{i}.sort(-1).values",
    "{i}[:, ::2]",
    "{i}.amax(-1, keepdim=True)",
    "torch.where({i} > 2, {i}, -{i})",
    "torch.arange({a}.shape[-1])",
    "{i}.int()",
)
BOOLEANS = (
    "{a} > 0",
    "{a} == {a}.round()",
    "{a} >= {a}.mean(-1, keepdim=True)",
    "{i} == 2",
    "{i} != {i}.flip(-1)",
    "~{c}",
    "{c} & {c}.flip(-1)",
    "{c}.any(-1, keepdim=True)",
    "{c}.all(-1)",
    "{c} ^ {c}.roll(1, -1)",
    "{a}.isnan()",
)
WRITES = (
    "{a}.add_(1.0)",
    "{a}[:, 0] = 2.0",
    "{a}[..., 0].mul_(-1.0)",
    "{a}.transpose(-1, -2)[:, 0] += 1.0",
    "{a}.view(-1)[::2].zero_()",
    "{a}.clamp_(max=0.5)",
    "{a}.masked_fill_({a} < -1, 0.0)",
    "{a}[{a} > 1] = 1.0",
    "{i}[:, 0] += 1",
    "{a}.copy_({a}.flip(-1))",
    "{a}.relu_()",
)


class Drawing:
    """The statements so far, and what they compute at three batch sizes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.states = [_batch(size) for size in (3, 1, 5)]
        self.count = 0

    def step(self) -> None:
        """Draw until a statement runs."""
        for _ in range(50):
            if self._try():
                return

    def _try(self) -> bool:
        kind = self.random.choices((FLOATS, INTEGERS, BOOLEANS, WRITES), (10, 3, 2, 3))[0]
        text = self.random.choice(kind)
        names = {hole: self._name(hole) for hole in "abic" if f"{{{hole}}}" in text}
        if None in names.values():
            return False
        statement = text.format(**names)
        if kind is WRITES:
            # never to an input: what was drawn for that stands in `writes`
            if any(name in EXAMPLE for name in names.values()):
                return False
            return self._run(statement)
        name = f"v{self.count}"
        return self._run(f"{name} = {statement}", name)

    def _name(self, hole: str) -> str | None:
        wanted = {"a": "f", "b": "f", "i": "i", "c": "b"}[hole]
        names = [name for name, value in self.states[0].items() if _kind(value) == wanted]
        recent = names[-4:] if self.random.random() < 0.7 else names
        return self.random.choice(recent) if recent else None

    def _run(self, statement: str, name: str = "") -> bool:
        states = self.states if name else copy.deepcopy(self.states)  # views stay views
        found = [{**state} if name else state for state in states]
        try:
            for state in found:
                exec(statement, NAMESPACE, state)
                if name and not _is_small(state[name]):
                    return False
        except Exception:
            return False
        self.states = found
        self.lines.append(statement)
        self.count += bool(name)
        return True

    def source(self) -> str:
        """A function with some of its values as outputs, one of them perhaps twice."""
        names = [name for name in self.states[0] if name not in EXAMPLE]
        chosen = names[-1:] + self.random.sample(names, min(3, len(names)))
        if self.random.random() < 0.2:
            chosen.append("x")
        body = "\n".join(f"    {line}" for line in self.lines)
        return f"def forward(self, x, i, m):\n{body}\n    return {', '.join(chosen)},\n"


def _batch(size: int) -> Values:
    repeats = (size + 2) // 3
    return {
        name: tensor.repeat(repeats, *(1,) * (tensor.dim() - 1))[:size].clone()
        for name, tensor in EXAMPLE.items()
    }


def _kind(value: Tensor) -> str:
    if value.dtype == torch.bool:
        return "b"
    return "f" if value.is_floating_point() else "i"


def _is_small(value: Tensor) -> bool:
    if value.numel() > 4000 or value.dim() > 4:
        return False
    return not value.is_floating_point() or bool((value.abs() < 1e6).all())


def drawn(seed: int) -> str:
    """The source of one graph."""
    drawing = Drawing(seed)
    for _ in range(drawing.random.randint(5, 20)):
        drawing.step()
    return drawing.source()


def compiled(source: str, name: str) -> Callable[..., Any]:
    """The function, with its source where `inspect` finds it."""
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    namespace: dict[str, Any] = dict(NAMESPACE)
    exec(compile(source, file, "exec"), namespace)
    forward: Callable[..., Any] = namespace["forward"]
    return forward


def used(source: str) -> Sequence[str]:
    """The inputs that it reads."""
    body = source.split("\n", 1)[1]
    return [name for name in EXAMPLE if any(w == name for w in _words(body))]


def _words(text: str) -> list[str]:
    return "".join(letter if letter.isalnum() or letter == "_" else " " for letter in text).split()


for number in range(COUNT):
    text = drawn(number)
    inputs = {name: EXAMPLE[name] for name in used(text)}
    text = text.replace("self, x, i, m", ", ".join(["self", *inputs]))
    CASES.either(
        f"graph {number}", compiled(text, f"graph-{number}"), **inputs, is_quick=number < 3
    )
