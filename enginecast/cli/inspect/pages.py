"""What `enginecast inspect MODEL` prints."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import Any

from rich.console import Console

from enginecast.cli.terminal.output import say
from enginecast.compiler.inspection.dtypes import INDEX, Dtypes, some
from enginecast.compiler.inspection.network import NetworkCheck
from enginecast.compiler.inspection.plan import Inspection
from enginecast.compiler.inspection.precision import Advice
from enginecast.compiler.inspection.script import ScriptInspection
from enginecast.passes.ir.quantization_plan import LayerPlan, QuantizationPlan
from enginecast.passes.precision.census import Held
from enginecast.passes.quantize.plan.planning import form_in_words
from enginecast.passes.rescale_streams import Fitted
from enginecast.verification.report.layout import print_table
from enginecast.verification.report.tables import print_emulation

SHOWN_CODE = 60
_NUMBER = re.compile(r"\d[\d.e+-]*")


def print_inspection(found: Inspection, console: Console) -> None:
    """Show a plan on a terminal."""
    before, after = found.nodes
    say(console, f"{found.model}: {before} nodes captured, {after} after the passes")
    for line in found.inputs:
        say(console, f"  input {line}")
    for line in found.outputs:
        say(console, f"  output {line}")
    console.print()
    stored = [
        (row.dtype, str(row.tensors), f"{row.elements:,}", "\n".join(row.examples))
        for row in found.census
    ]
    print_table(console, ("stored as", "tensors", "elements", "such as"), stored)
    console.print()
    plans = []
    for plan in found.passes:
        reasons = Counter(line.split(": ", 1)[-1] for line in plan.left_alone)
        alone = "\n".join(f"{count}: {reason}" for reason, count in reasons.items())
        plans.append((plan.spec, str(plan.rewritten), alone))
    print_table(console, ("pass", "would rewrite", "would leave alone"), plans)
    console.print()
    print_census(found.dtypes, console)
    console.print()
    print_attempts(found.attempts, console)
    print_flow(found.control_flow, console)
    console.print()
    print_advice(found.advice, console)
    console.print()
    expected = ", ".join(f"{count} {kind}" for kind, count in found.expected.items() if count)
    say(console, f"sites to fuse: {expected or 'none'}")
    where = "this machine runs it" if found.runs_here else "no provider of this machine runs it"
    say(console, f"{found.precision} for {found.device}: {where}")
    if found.regions:
        console.print()
        print_regions(found.regions, console)
    if found.quantization is not None:
        print_plan(found.quantization, console)
    if found.emulation is not None:
        console.print()
        print_emulation(found.emulation, console)
    if found.tensorrt is not None:
        console.print()
        print_network(found.tensorrt, console)


def print_census(found: Dtypes, console: Console) -> None:
    """Layers of one kind share a row."""
    layers: dict[str, list[Held]] = {}
    for held in found.census.held:
        layers.setdefault(INDEX.sub("*", held.module), []).append(held)
    rows = []
    for module, all_held in layers.items():
        cells = [module or "(the model)"]
        for kinds in (("parameter",), ("buffer", "constant"), ("edge",)):
            counts: Counter[str] = Counter()
            for held in all_held:
                if held.kind in kinds:
                    counts[held.dtype] += held.count
            cells.append(", ".join(f"{count} {dtype}" for dtype, count in counts.most_common()))
        rows.append(cells)
    print_table(console, ("module", "parameters", "buffers", "values"), rows)
    console.print()
    if found.census.meetings:
        meetings = found.census.meetings
        met = (
            (m.what, str(m.count), m.source or m.by, some(m.modules), m.becomes) for m in meetings
        )
        columns = ("where float dtypes meet", "times", "at", "in", "in the engine")
        print_table(console, columns, met)
        console.print()
    for note in found.notes:
        console.print(f"- {note}")


def print_attempts(lines: Sequence[str], console: Console) -> None:
    """Show how a model was captured, or why not."""
    for line in lines:
        say(console, line)
    console.print()


def print_flow(found: Sequence[dict[str, Any]], console: Console) -> None:
    """A row for each line that decides; those whose code and action are short stay in one line."""
    if not found:
        say(console, "control flow: nothing in the model's code depends on tensors")
        return
    rows = []
    for one in found:
        place = f"{PurePath(one['file']).name}:{one['line']}" if one["file"] else "(no line)"
        code = (one["code"] or one["reason"])[:SHOWN_CODE]
        # "x12 True/False scan, export": how often, which values, and who saw it
        times = f"x{one['count']} " if one["count"] > 1 else ""
        values = f"{'/'.join(one['ways'])} " if one["ways"] else ""
        seen = f"{times}{values}{', '.join(one['witnesses'])}"
        module = one["module"] or "(the model)"
        rows.append((one["kind"], place, code, one["decides"], module, seen, one["action"]))
    columns = ("control flow", "at", "code", "decided by", "module", "seen", "what is done")
    print_table(console, columns, rows, whole=2)


def print_advice(advice: Advice, console: Console) -> None:
    """What each precision means and costs."""
    rows = []
    for option in advice.options:
        count, size = option.weight_bytes, ""
        if count:
            size = f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
        bits = "" if option.headroom_bits is None else f"{option.headroom_bits:g} bits"
        error = "" if option.error is None else f"{option.error:.1e}"
        rows.append((option.precision, size, bits, error, option.sentence))
    columns = ("precision", "weights", "headroom", "error", "on the inputs that were run")
    print_table(console, columns, rows)
    say(
        console,
        f"the cheapest that is safe: --precision {advice.recommended} (ranges of"
        f" {len(advice.cases)} verification inputs, run in fp32)",
    )


def print_regions(regions: Sequence[Fitted], console: Console) -> None:
    """What is done about values that fp16 does not hold; layers that are alike share a row."""
    rows: dict[tuple[str, ...], list[Fitted]] = {}
    for one in regions:
        done = f"fp32: {one.reason}" if one.power is None else f"2^-{one.power}"
        rows.setdefault((INDEX.sub("*", one.module), one.source, done), []).append(one)
    table = []
    for (module, source, done), alike in rows.items():
        worst = max(alike, key=lambda one: one.largest)
        bits = "" if worst.headroom_bits is None else f"{worst.headroom_bits:.1f} bits"
        small = max(one.subnormal for one in alike)
        table.append(
            (
                f"{module if len(alike) > 1 else worst.module or '(the model)'} {source}",
                str(sum(one.values for one in alike)),
                f"{worst.largest:.3g}",
                worst.plain,
                bits,
                f"{small:.1%}" if small >= 0.0005 else "",
                done,
            )
        )
    columns = (
        *("fitted into fp16", "values", "largest", "plain fp16", "headroom", "subnormal"),
        "scaled by, or kept in",
    )
    print_table(console, columns, table, whole=6)


def print_plan(plan: QuantizationPlan, console: Console) -> None:
    """What becomes of each layer, and of the whole."""
    error = "not measured" if plan.predicted_error is None else f"{plan.predicted_error:.3g}"
    head = f"{plan.format} plan for {plan.arch}: predicted error {error}"
    say(console, f"{head}, allowed {plan.max_error:.3g}")
    columns = ("layers", "n", "weight", "choice", "error", "outputs", "gain", "reason")
    print_table(console, columns, map(_layer_row, grouped(plan.layers)), whole=4)
    for note in plan.notes:
        say(console, note)


def grouped(layers: Iterable[LayerPlan]) -> list[Sequence[LayerPlan]]:
    """Layers that differ in the numbers of their modules, errors and gains alone, in order."""
    found: dict[tuple[object, ...], list[LayerPlan]] = {}
    for layer in layers:
        key = (
            INDEX.sub("*", layer.module),
            layer.shape,
            layer.choice,
            form_in_words(layer),
            layer.block,
            _NUMBER.sub("#", layer.reason),
        )
        found.setdefault(key, []).append(layer)
    return list(found.values())


def _layer_row(group: Sequence[LayerPlan]) -> Sequence[str]:
    def number(choose: Callable[..., float], values: Iterable[float | None]) -> str:
        known = [value for value in values if value is not None]
        return f"{choose(known):.2g}" if known else ""

    first = max(group, key=lambda layer: layer.error or 0.0)
    keeps = first.choice == "keep"
    return (
        INDEX.sub("*", first.module) if len(group) > 1 else first.module or "<root>",
        str(len(group)),
        " x ".join(map(str, first.shape)),
        "keep" if keeps else form_in_words(first),
        number(max, (layer.error for layer in group)),
        number(max, (layer.end_to_end for layer in group)),
        "" if keeps else number(min, (layer.gain for layer in group)),
        first.reason,
    )


def print_network(found: NetworkCheck, console: Console) -> None:
    """Operators, violations and the profile."""
    say(console, found.summary())
    if found.operators:
        counts = sorted(found.operators.items())
        rows = ((name, str(n), found.support(name)) for name, n in counts)
        print_table(console, ("operator", "n", "support"), rows, whole=2)
    for violation in found.violations:
        say(console, f"  {violation}")
    if found.unknown:
        several = "1 tensor is" if found.unknown == 1 else f"{found.unknown} tensors are"
        say(console, f"{several} of unknown size, and not looked at for being too large")
    if found.profile:
        ranges = []
        for one in found.profile:
            shapes = (one.least, one.optimal, one.greatest)
            ranges.append((one.name, *(" x ".join(map(str, s)) or "scalar" for s in shapes)))
        print_table(console, ("input", "least", "tuned for", "greatest"), ranges, whole=4)


def print_script(found: ScriptInspection, console: Console) -> None:
    """A file of TorchScript."""
    say(console, f"{found.model}: a TorchScript module, which returns {found.returns}")
    for given in found.inputs:
        say(console, f"input {given}")
    for dtype, count in found.weights.items():
        say(console, f"weights: {count:,} elements in {dtype}")
    where = "none" if not found.script_branches else str(found.script_branches)
    say(console, f"branches and loops that depend on inputs: {where}")
    rows = ((name, str(count)) for name, count in found.operators.items())
    print_table(console, ("operator", "times"), rows)
    say(
        console,
        "an export calls it as it is (--target torchscript), or converts it where it has no"
        " branches (--target onnxruntime in fp32)",
    )
