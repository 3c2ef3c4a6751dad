"""What the GPU benchmarks share: options, one model at several sizes, the file of results.

Every case writes its floor, then one row for each engine as it is made, then times: the file holds
what there is whenever a run ends.  A row has

    ms                 median of the interleaved rounds, from CUDA events
    over_compiled      time of torch.compile's engine over this one's: above 1 is faster
    of_floor           time of the model's matrix products alone, measured in this run, over `ms`
    error              relative L2 distance to eager fp32 of the same weights, over valid rows
    lowest_cosine      of one valid row with that of eager fp32
    make_seconds       to make it, compilation and first runs included
    peak_bytes         weights and the most that a run allocates at once, as torch counts
    device_bytes       what the driver says was taken, graphs and compiled code included, without
                       weights that are shared with eager
"""

import argparse
import copy
import functools
import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_models import WEIGHTS, Case
from gpu_ours import Measured, ours_bf16, ours_fp8, plan_by_sizes, planned_products
from gpu_peers import AbsentError, Bench, Made, captured, compiled, eager, on_cpu, ort, torchao_fp8
from gpu_products import Product, Timed, floors, products_of, time_product
from gpu_results import (
    COMPILED,
    FP8_ENGINES,
    Results,
    compare,
    distance,
    failures,
    show,
)
from gpu_timing import Budget, BudgetSpent, Memory, interleaved, summary
from machine import RESULTS, machine
from torch import Tensor, nn

ENGINES = (COMPILED, "enginecast fp8", "enginecast bf16", "eager bf16", *FP8_ENGINES[:1], "ort")
"""In the order in which they are made, should the time not suffice for all."""
RESERVE = 0.15
"""Share of the budget that is kept for the rounds."""


@dataclass(frozen=True)
class Model:
    """A model and the sizes that it is run at."""

    name: str
    make: Callable[[], nn.Module]
    cases: tuple[Case, ...]


def parser(doc: str, name: str) -> argparse.ArgumentParser:
    """The options that all of these benchmarks have."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", default="", help="MODEL, SIZE or both: t5-xxl,8x512")
    made.add_argument("--engines", default=",".join(ENGINES), help="names, comma-separated")
    made.add_argument("--rounds", type=int, default=25)
    made.add_argument("--budget-s", type=float, help="stop after so many seconds")
    made.add_argument("--cpu", action="store_true", help="tiny shapes: a smoke test of this script")
    made.add_argument("--commit", help="of this checkout, where git is not at hand")
    made.add_argument("--out", type=Path, help=f"default: results/{name}.json")
    return made


def main(name: str, options: argparse.Namespace, models: Sequence[Model]) -> int:
    """Run the cases that were asked for; 1 where an engine failed that should have run."""
    device = "cpu" if options.cpu else "cuda"
    budget = Budget(options.budget_s)
    default = RESULTS / (f"{name}-cpu-smoke.json" if options.cpu else f"{name}.json")
    results = Results(options.out or default)
    results.content = {
        "cases": {},
        "finished": False,
        "machine": machine(options.commit, device),
        "weights": WEIGHTS,
    }
    if options.cpu:
        results.content["smoke"] = "of the script, on tiny shapes: no figure here means anything"
    results.write()
    try:
        for model in wanted(models, options.only):
            run_model(model, device, options, budget, results)
        results.content["finished"] = True
    except BudgetSpent:
        print("the budget is spent")
    results.write()
    print(results.path)
    return 1 if failures(results.content) else 0


def wanted(models: Sequence[Model], only: str) -> list[Model]:
    """Models with the cases whose name or size, or both, were given; all without any."""
    asked = {part for part in only.split(",") if part}
    found = []
    for model in models:
        cases = tuple(case for case in model.cases if asked <= {case.model, case.size})
        if cases:
            found.append(Model(model.name, model.make, cases))
    if not found:
        names = ", ".join(case.name for model in models for case in model.cases)
        raise SystemExit(f"--only {only}: there are {names}")
    return found


def run_model(
    model: Model, device: str, options: argparse.Namespace, budget: Budget, results: Results
) -> None:
    with budget.limit():
        encoder = model.make()
        references = fp32_outputs(encoder, model.cases)
        twin = functools.cache(lambda: on_cpu(encoder))
    for case, reference in zip(model.cases, references, strict=True):
        program = functools.cache(lambda case=case: captured(twin(), case))
        bench = Bench(case, encoder, device, torch.bfloat16, program)
        run_case(bench, reference, options, budget, results)
        gc.collect()


def fp32_outputs(encoder: nn.Module, cases: Sequence[Case]) -> list[Tensor]:
    """What the same weights give in fp32, in CPU memory."""
    wide = copy.deepcopy(encoder).float()
    with torch.no_grad():
        return [wide(**case.inputs).cpu() for case in cases]


def run_case(
    bench: Bench,
    reference: Tensor,
    options: argparse.Namespace,
    budget: Budget,
    results: Results,
) -> None:
    """The floor, the engines one by one, then all of them in turns."""
    case = bench.case
    rows: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {"engines": rows}
    results.content["cases"][case.name] = found
    reserve = min(60.0, RESERVE * (options.budget_s or 0.0))
    made: dict[str, Made] = {}
    spent: BudgetSpent | None = None
    try:
        with budget.limit(reserve):
            measured = measure_products(bench, found)
            results.write()
            for name in ENGINES:
                if name in options.engines.split(","):
                    make_one(name, bench, reference, measured, rows, made)
                    results.write()
    except BudgetSpent as stop:
        spent = stop
    runs = {name: each.run for name, each in made.items()}
    with budget.limit():
        times = interleaved(runs, options.rounds, bench.device, max(1.0, budget.left() / 3))
    for name, rounds in times.items():
        rows[name] |= summary(rounds)
    compare(rows, found.get("floor_ms", {}))
    results.write()
    show(case.name, rows)
    if spent is not None:
        raise spent


def measure_products(bench: Bench, found: dict[str, Any]) -> Measured:
    """Time every product of the model, and of the plan's layers, which passes may have merged."""
    torch._dynamo.reset()  # engines of the case before, and what they hold
    counted = products_of(bench.encoder, bench.case.inputs)
    timed = [time_product(product, n, bench.device) for product, n in sorted(counted.items())]
    found["floor_ms"] = floors(timed)
    found["products"] = [each.to_json() for each in timed]
    rows = bench.case.valid.numel()
    merged = planned_products(plan_by_sizes(bench), rows)
    found["merged_products"] = _more(merged, timed, bench.device)
    return {
        (each.product.n, each.product.k): each
        for each in timed
        if each.product.of_weight and each.product.m == rows
    }


def _more(merged: Counter[Product], timed: list[Timed], device: str) -> list[dict[str, Any]]:
    """Time the products that merging made; they join `timed`."""
    known = {each.product for each in timed}
    fresh = [time_product(p, n, device) for p, n in sorted(merged.items()) if p not in known]
    timed += fresh
    return [each.to_json() for each in fresh]


def make_one(
    name: str,
    bench: Bench,
    reference: Tensor,
    measured: Measured,
    rows: dict[str, dict[str, Any]],
    made: dict[str, Made],
) -> None:
    """Make one engine and look at what it gives; what fails is a row, too."""
    makers: dict[str, Callable[[], Made]] = {
        COMPILED: lambda: compiled(bench),
        "enginecast fp8": lambda: ours_fp8(bench, measured),
        "enginecast bf16": lambda: ours_bf16(bench),
        "eager bf16": lambda: eager(bench),
        "torchao fp8": lambda: torchao_fp8(bench),
        "ort": lambda: ort(bench),
    }
    row = rows.setdefault(name, {})
    row["stopped"] = "the budget was spent while it was made"
    start, memory = time.perf_counter(), Memory(bench.device)
    try:
        engine = makers[name]()
        error, cosine = distance(engine.run(), reference, bench.case.valid)
    except AbsentError as reason:
        row["absent"] = str(reason)
    except Exception as error:  # however a peer fails, the other rows count
        row["failed"] = f"{type(error).__name__}: {error}"[:600]
    else:
        row |= {"error": error, "lowest_cosine": cosine, **engine.details}
        if bench.device == "cuda":  # nobody counts what a CPU's engines take
            taken = memory.peak_of(engine.run)
            row["peak_bytes"] = taken["peak"] + engine.shared_bytes + engine.hidden_bytes
            row["device_bytes"] = taken["device"]
        made[name] = engine
    row["make_seconds"] = round(time.perf_counter() - start, 1)
    del row["stopped"]
