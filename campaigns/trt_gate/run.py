"""The gate's table: what the installed TensorRT-RTX answers, for each operator of ONNX.

Every network of `networks.txt` is parsed and built in a process of its own, in each of the types
that ONNX allows.  The table is `exporters/tensorrt/gate/operators.json`, with a line for each
operator, so that a difference between two versions is a diff to be read.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import ROOT, Campaign, Ended
from rows import Store

from enginecast.exporters.tensorrt.gate.operators import schema_of
from trt_gate.ask import LIBRARY, ask
from trt_gate.networks import (
    ASKED,
    Form,
    Signature,
    first_signature,
    forms,
    network,
    signatures,
)

FILE = ROOT / "exporters/tensorrt/gate/operators.json"


@dataclass
class Row:
    """What is taken of an operator."""

    op: str
    takes: list[str] = field(default_factory=list)
    """Types of its variables: "FP32 FP16;INT64" are two signatures."""
    refused: dict[str, list[str]] = field(default_factory=dict)
    """What is not taken, in the same words, by the message."""


class Table(Store):
    """`operators.json`."""

    def write(self, found: Mapping[str, Any], file: Path) -> None:
        """A line for each operator."""
        lines = [f'  "{op}": {json.dumps(row)}' for op, row in found["operators"].items()]
        head = f'{{"library": "{LIBRARY}", "operators": {{'
        file.write_text("\n".join([head, ",\n".join(lines), "}}\n"]), encoding="utf-8")


class Gate(Campaign[str, Row]):
    """A row for each operator."""

    row, store = Row, Table(FILE, under="operators", keys=("op",))
    seconds = 120
    jobs = 1

    def items(self) -> Sequence[str]:
        return list(forms())

    def examine(self, item: str, folder: Path) -> Row:
        return examine(item)

    def ended(self, row: Row, child: Ended[str]) -> None:
        if child.status:
            # Each question is in a process of its own: this one is not to die.
            raise SystemExit(f"{row.op}: {child.reason}")

    def said(self, row: Row) -> str:
        return f"{row.op}: {', '.join(row.takes) or 'not taken'}"


def examine(op: str) -> Row:
    """Ask for all types, then for what else the networks of an operator vary."""
    row = Row(op)
    base, *others = forms()[op]
    taken, refused = [], dict[str, list[Signature]]()
    for types in signatures(op):
        said = ask(network(base, types))
        if said:
            refused.setdefault(said, []).append(types)
        else:
            taken.append(types)
    row.takes = compressed(taken)
    row.refused = {said: compressed(types) for said, types in refused.items()}
    if taken:
        for key, said in _varied(base, others, _usual(op, taken)):
            row.refused.setdefault(said, []).append(key)
    return row


def _usual(op: str, taken: Sequence[Signature]) -> list[Signature]:
    """What is asked in one type: in floats, and in integers where these are taken as well."""
    first = first_signature(op)
    first = first if first in taken else taken[0]
    integers = ("INT64", *first[1:])
    return [first, integers] if integers in taken and first != integers else [first]


def _varied(
    base: Form, others: Sequence[Form], usual: Sequence[Signature]
) -> Iterator[tuple[str, str]]:
    """What is not taken besides types, and what is said of it."""

    def refusal(form: Form, **how: Any) -> str:
        said = [ask(network(form, types, **how)) for types in usual]
        return said[0] if all(said) else ""

    asked = [(form.label, form, dict[str, Any]()) for form in others]
    for index, word in enumerate(base.inputs):
        if word.startswith("="):
            asked.append((f"computed {index}", base, {"computed": index}))
    if base.inputs and base.inputs[0].startswith("["):
        asked.append(("dynamic", base, {"dynamic": True}))
    if not base.text:
        outputs = schema_of(base.op).outputs
        asked += [(f"output {n - 1}", base, {"outputs": n}) for n in range(2, len(outputs) + 1)]
    for key, form, how in asked:
        said = refusal(form, **how)
        if said:
            yield key, said


def compressed(found: Iterable[Signature]) -> list[str]:
    """Signatures as products: "FP32 FP16;INT32 INT64" are four."""
    found = list(found)
    if found == [()]:
        return [""]  # no type varies
    heads: dict[str, list[Signature]] = {}
    for head, *rest in found:
        heads.setdefault(head, []).append(tuple(rest))
    tails: dict[tuple[str, ...], list[str]] = {}
    for head, rests in heads.items():
        tails.setdefault(tuple(compressed(rests) if rests[0] else ("",)), []).append(head)
    return [
        ";".join(filter(None, (" ".join(sorted(names, key=ASKED.index)), tail)))
        for rests, names in tails.items()
        for tail in rests
    ]


CAMPAIGN = Gate()
