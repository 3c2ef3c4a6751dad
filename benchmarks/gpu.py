"""All that only a GPU can show, within minutes: each engine verified on the card, and timed.

    make gpu [ONLY=t5-xxl-6,vit] [MINUTES=8]     or     make gpu DRY=1
    python benchmarks/gpu.py [--only NAME,...] [--engines TEXT,...] [--minutes 8] [--dry-run]
                             [--commit COMMIT] [--out FILE.json]

First a T5 of XXL's width (of base, where the memory is small): eager and torch.compile in bf16, our
program compiled ahead of time in bf16 and fp8, torchao's fp8, and each matrix product in bf16 and
fp8 by itself.  Then T5, ViT and Segformer from folders: exported for ONNX Runtime's CUDA provider,
AOTInductor, TensorRT and TensorRT-RTX, each verified on the GPU, rows of batches included, and
timed beside eager and torch.compile on inputs and outputs that stay there.  Last the tests marked
`gpu`, in the time that is left.

The file of results is written after every row: benchmarks/results/gpu-NAME.json, with the versions
and the commit.  A row has

    ms                 median of the interleaved rounds, from CUDA events; with the quarters
    over_compiled      time of torch.compile in bf16 over this one's: above 1 is faster
    of_floor           time of the model's matrix products alone, measured in this run, over `ms`
    error              relative L2 distance to eager fp32 of the same weights, over valid rows
    lowest_cosine      of one valid row with that of eager fp32
    make_seconds       to make and verify it, compilation and first runs included
    peak_bytes         weights and the most that a run allocates at once, as torch counts
    verdict, layers    of an engine that was exported
    absent, failed     instead of all these: what is missing, or what went wrong

`--dry-run` runs tiny models on the CPU, in the order and by the code of the real run: it shows that
the script works, and nothing else.  It has not run on a GPU yet.  Without a package index, take a
checkout and the missing wheels along (`pip download --no-deps -d wheels msgspec`), and there

    python -m pip install --no-index --no-deps --target site wheels/*.whl
    PYTHONPATH=.:site python benchmarks/gpu.py --commit COMMIT --out gpu.json
"""

import argparse
import copy
import functools
import gc
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_exports import BUILDS, DRY, exported
from gpu_models import T5, WEIGHTS, Subject, encoder, make_t5, subjects, texts
from gpu_ours import Measured, ours_bf16, ours_fp8, plan_by_sizes, planned_products
from gpu_peers import AbsentError, Bench, Made, captured, compiled, eager, on_cpu, torchao_fp8
from gpu_products import Product, Timed, floors, products_of, time_product
from gpu_results import COMPILED, Results, compare, distance, failures, show
from gpu_timing import Budget, BudgetSpent, Memory, interleaved, summary
from machine import RESULTS, machine
from torch import Tensor

from enginecast.doctor.checks import driver

RESERVE = 0.15
"""Share of a case's time that is kept for the rounds."""
ROUNDS = 25
XXL_BYTES = 24 << 30
"""Free memory of a GPU that takes the T5 of XXL's width."""
TESTS_SECONDS = 90.0


@dataclass
class Work:
    """One model at one size, and the engines that are made of it."""

    valid: Tensor
    """The rows of the output that count."""
    reference: Tensor
    """What eager fp32 gives, in CPU memory."""
    engines: Mapping[str, Callable[[], Made]]
    found: dict[str, Any] = field(default_factory=dict)
    """What was found besides the engines' rows."""


@dataclass(frozen=True)
class Plan:
    """A case of the run."""

    name: str
    share: float
    """Of the time that is left when its turn comes."""
    make: Callable[[Path], Work]


def main(arguments: list[str] | None = None) -> int:
    """1 where an engine failed that should have run, 3 without a GPU."""
    options = options_of(arguments)
    device = "cpu" if options.dry_run else "cuda"
    transformers.utils.logging.disable_progress_bar()
    if device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA GPU here; make gpu DRY=1 needs none", file=sys.stderr)
        return 3
    here = machine(options.commit, device) | {"driver": driver()}
    results = Results(options.out or place_of(here))
    results.content = {"cases": {}, "finished": False, "machine": here, "weights": WEIGHTS}
    if options.dry_run:
        torch.set_num_threads(1)
        results.content["smoke"] = "of the script, on tiny shapes: no figure here means anything"
    budget, spent = Budget(60 * options.minutes), False
    for plan in wanted(plans(device), options.only):
        spent |= not run(plan, device, budget.left() * plan.share, options, results)
    if device == "cuda" and budget.left() > 10:
        results.content["tests"] = run_tests(min(budget.left(), TESTS_SECONDS))
    results.content["finished"] = not spent
    results.write()
    print(results.path)
    return 1 if failures(results.content) else 0


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", default="", help="models, comma-separated")
    made.add_argument("--engines", default="", help="parts of engines' names, comma-separated")
    made.add_argument("--minutes", type=float, default=8.0)
    made.add_argument("--rounds", type=int, default=ROUNDS)
    made.add_argument("--dry-run", action="store_true", help="tiny models, on the CPU")
    made.add_argument("--commit", help="of this checkout, where git is not at hand")
    made.add_argument("--out", type=Path, help="the file of results")
    return made.parse_args(arguments)


def place_of(here: Mapping[str, Any]) -> Path:
    """The file of a machine's results; a dry run's is no result, and lies elsewhere."""
    if "gpu" not in here:
        return Path(tempfile.gettempdir()) / "gpu-dry-run.json"
    return RESULTS / f"gpu-{re.sub(r'[^a-z0-9]+', '-', str(here['gpu']).lower()).strip('-')}.json"


def wanted(found: list[Plan], only: str) -> list[Plan]:
    """The cases that were asked for; all without any."""
    asked = {part for part in only.split(",") if part}
    if unknown := asked - {plan.name for plan in found}:
        raise SystemExit(
            f"--only {','.join(unknown)}: there are {', '.join(p.name for p in found)}"
        )
    return [plan for plan in found if plan.name in asked or not asked]


def plans(device: str) -> list[Plan]:
    """All cases, the most wanted first."""
    if device == "cpu":
        name, size = "t5-tiny", (2, 16)
    else:
        name = "t5-xxl-6" if torch.cuda.mem_get_info()[0] > XXL_BYTES else "t5-base"
        size = (8, 512)
    shared = {"t5": 0.5, "vit": 0.5, "segformer": 0.8}
    return [
        Plan(name, 0.4, lambda _: of_products(name, size, device)),
        *(
            Plan(one.name, shared[one.name], functools.partial(of_exports, one, device))
            for one in subjects(small=device == "cpu").values()
        ),
    ]


def of_products(name: str, size: tuple[int, int], device: str) -> Work:
    """A T5 in bf16 without an export: its products, and what is compiled of it."""
    case, model = texts(name, *size, device), make_t5(T5[name], device, torch.bfloat16)
    with torch.no_grad():
        reference = copy.deepcopy(model).float()(**case.inputs).cpu()
    program = functools.cache(lambda: captured(on_cpu(model), case))
    bench = Bench(case, model, device, torch.bfloat16, program)
    found: dict[str, Any] = {}
    measured = measure_products(bench, found)
    return Work(
        case.valid,
        reference,
        {
            COMPILED: lambda: compiled(bench),
            "enginecast fp8": lambda: ours_fp8(bench, measured),
            "enginecast bf16": lambda: ours_bf16(bench),
            "eager bf16": lambda: eager(bench),
            "torchao fp8": lambda: torchao_fp8(bench),
        },
        found,
    )


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


def of_exports(subject: Subject, device: str, scratch: Path) -> Work:
    """A model from its folder, for every runtime."""
    folder, case = subject.save(scratch / "model"), subject.case(device)
    with torch.no_grad():
        reference = encoder(subject, folder, device, torch.float32)(**case.inputs).cpu()
    model = encoder(subject, folder, device, torch.bfloat16)
    bench = Bench(case, model, device, torch.bfloat16, _no_program)
    builds = BUILDS[subject.name] if device == "cuda" else DRY
    engines: dict[str, Callable[[], Made]] = {
        build.name: functools.partial(
            exported, subject, folder, scratch / build.name.replace(" ", "-"), build, case
        )
        for build in builds
    }
    peers: dict[str, Callable[[], Made]] = {
        COMPILED: lambda: compiled(bench, "reduce-overhead"),
        "eager bf16": lambda: eager(bench),
    }
    return Work(case.valid, reference, peers | engines)


def _no_program() -> Any:
    raise NotImplementedError("engines are exported from a folder here")


def run(
    plan: Plan, device: str, seconds: float, options: argparse.Namespace, results: Results
) -> bool:
    """The engines of a case one by one, then all of them in turns; whether the time sufficed."""
    rows: dict[str, dict[str, Any]] = {}
    budget, made, spent = Budget(seconds), dict[str, Made](), False
    results.content["cases"][plan.name] = case = {"engines": rows}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with budget.limit(RESERVE * seconds):
                work = plan.make(Path(scratch))
                for name in asked(work.engines, options.engines):
                    make_one(name, work, device, rows, made)
                    case |= work.found
                    results.write()
        except BudgetSpent:
            spent = True
        except Exception as error:  # of the model itself, or of its products
            rows["model"] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        try:
            with budget.limit():
                runs = {name: each.run for name, each in made.items()}
                times = interleaved(runs, options.rounds, device, max(1.0, budget.left() / 2))
            for name, rounds in times.items():
                rows[name] |= summary(rounds)
        except BudgetSpent:
            spent = True
        compare(rows, case.get("floor_ms", {}))
        results.write()
        show(plan.name, rows)
    gc.collect()
    return not spent


def asked(engines: Mapping[str, Any], parts: str) -> Iterator[str]:
    """The engines whose names hold one of the parts; all without any."""
    return (name for name in engines if not parts or any(p in name for p in parts.split(",")))


def make_one(
    name: str, work: Work, device: str, rows: dict[str, dict[str, Any]], made: dict[str, Made]
) -> None:
    """Make one engine and look at what it gives; what fails is a row, too."""
    row = rows[name] = {"stopped": "the time was spent while it was made"}
    start, memory = time.perf_counter(), Memory(device)
    try:
        engine = work.engines[name]()
        error, cosine = distance(engine.run(), work.reference, work.valid)
    except AbsentError as reason:
        row["absent"] = str(reason)
    except Exception as error:  # however a library fails, the other rows count
        row["failed"] = f"{type(error).__name__}: {error}"[:2000]
    else:
        row |= {"error": error, "lowest_cosine": cosine, **engine.details}
        if device == "cuda":  # nobody counts what a CPU's engines take
            taken = memory.peak_of(engine.run)
            row["peak_bytes"] = taken["peak"] + engine.shared_bytes
            row["device_bytes"] = taken["device"]
        made[name] = engine
    row["make_seconds"] = round(time.perf_counter() - start, 1)
    del row["stopped"]


def run_tests(seconds: float) -> str:
    """The last line of the tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:xdist"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"not finished within {seconds:.0f} s"
    return (done.stdout.strip().splitlines() or [done.stderr[-200:]])[-1]


if __name__ == "__main__":
    sys.exit(main())
