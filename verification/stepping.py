"""Call an engine with state repeatedly, and feed it its own outputs.  Needs neither torch nor the
model.
"""

from itertools import count, takewhile

from enginecast.errors import EnginecastError, first_line
from enginecast.runtime.engine import Engine
from enginecast.runtime.stepping import Stepper
from enginecast.verification.engine import feeds_of, runs_natively, where_it_ran
from enginecast.verification.reference import Reference
from enginecast.verification.verdict import judge


def step_failures(engine: Engine, reference: Reference) -> tuple[str, ...]:
    """Report where consecutive calls differ from those of the model, which keeps its own state.

    Args:
        reference: with the cases "call 1 in turn", ..., as far as they were stored.
    """
    known = {case.name: case for case in reference.cases}
    names = list(takewhile(known.__contains__, (f"call {n} in turn" for n in count(1))))
    measured, failures = {}, list[str]()
    try:
        stepper = Stepper(engine)
        for name in names:
            feeds = {
                n: feed
                for n, feed in feeds_of(engine, known[name]).items()
                if n not in stepper.state
            }
            outputs = stepper.run(feeds, check_finite=False)
            measured[name] = reference.compare(known[name], outputs)
    except EnginecastError as error:
        failures.append(f"call {len(measured) + 1}: {first_line(error)}")
    verdict = judge(
        measured,
        reference.floor.only(frozenset(names)),
        where=where_it_ran(engine),
        engine_ran=runs_natively(reference.floor.dtype, engine.provider),
    )
    if names and verdict.outcome == "rejected":
        failures += verdict.reasons
    return tuple(f"consecutive calls: {each}" for each in failures)
