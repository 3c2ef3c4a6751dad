"""Passes that are wrong on purpose are found: the pass, its sites, the module."""

import re
from dataclasses import replace

import pytest
from bisections import bisected, checks_of, subject_of
from harmful_passes import (
    Brittle,
    Elsewhere,
    Siteless,
    Stubborn,
    TouchExactly,
    TouchLinears,
)
from small_programs import cases

from enginecast.passes.canonicalize import Canonicalize
from enginecast.passes.unify_dtype import UnifyDtype
from enginecast.verification.bisect.culprit import Bisection
from enginecast.verification.bisect.search import bisect

LINEARS = 12


def named(found: Bisection) -> list[str]:
    return [guilty.site.module for culprit in found.culprits for guilty in culprit.sites]


def is_fine_without(found: Bisection, subject_passes: tuple[TouchLinears, ...]) -> bool:
    """Whether an export that leaves out what was found sees nothing wrong."""
    checks = checks_of(replace(subject_of(subject_passes), leave=found.leave))
    return not any(check.failure for check in checks)


def test_a_pipeline_that_keeps_its_promises_has_no_culprit() -> None:
    found = bisected([Canonicalize(), TouchLinears()])
    assert (found.culprits, found.helps, found.hint()) == ((), False, "")


@pytest.mark.parametrize(
    "wrong",
    [
        ("blocks.3.second",),
        pytest.param(("blocks.5.second",), marks=pytest.mark.slow),
        pytest.param(("blocks.0.first",), marks=pytest.mark.slow),
        pytest.param(("blocks.1.first", "blocks.4.second"), marks=pytest.mark.slow),
        ("blocks.0.second", "blocks.1.second", "blocks.5.first"),
    ],
)
def test_every_guilty_site_is_named_and_no_other(wrong: tuple[str, ...]) -> None:
    passes = (TouchLinears(), TouchLinears(wrong))
    found = bisected(passes)
    assert named(found) == list(wrong)
    (culprit,) = found.culprits
    assert (culprit.position, culprit.name, culprit.rewritten) == (1, "touch-linears", LINEARS)
    assert all(g.error is not None and g.error.arises for g in culprit.sites)
    assert found.helps
    assert found.hint() == f"--drop-guilty would leave {len(wrong)} of {LINEARS} sites out"
    assert is_fine_without(found, passes)
    assert not is_fine_without(replace(found, leave=()), passes)
    line = found.lines()[0]
    assert re.fullmatch(
        rf"pass touch-linears, site {wrong[0]}, small_programs.py:\d+, error \S+x the noise floor;"
        r" isolated error \S+x \(arises here\)",
        line,
    ), line


def test_the_error_is_carried_on_but_arises_in_one_module() -> None:
    found = bisected([TouchLinears(("blocks.2.first",))])
    arising = {error.module for error in found.modules if error.arises}
    off = {error.module for error in found.modules if error.off}
    assert arising == {"blocks.2.first"}
    assert {"blocks.2", "blocks.3", "blocks.5.norm"} <= off
    later = next(error for error in found.modules if error.module == "blocks.5.second")
    assert later.accumulated > 10
    assert later.isolated is not None
    assert later.isolated < 2
    assert "(accumulated)" in later.words()


def test_a_changed_bit_is_found_where_it_is_changed() -> None:
    found = bisected([TouchExactly(("blocks.2.second",), by=2.0**-22)])
    assert named(found) == ["blocks.2.second"]
    arising = {error.module for error in found.modules if error.arises}
    assert arising == {"blocks.2.second"}
    assert "other bits than before" in found.lines()[0]
    assert "arises here" in found.lines()[0]


@pytest.mark.parametrize(
    ("harmful", "reason"),
    [
        (Siteless(), "it reports no site that it rewrote"),
        (Stubborn(("blocks.5.second",)), "it rewrites sites that it was asked to leave alone"),
        (Elsewhere(), "it does harm with all of its sites left alone, too"),
    ],
)
def test_a_pass_whose_sites_cannot_be_separated_is_named_with_its_module(
    harmful: TouchLinears, reason: str
) -> None:
    found = bisected([Canonicalize(), harmful, Canonicalize()])
    (culprit,) = found.culprits
    assert (culprit.position, culprit.sites, culprit.reason) == (1, (), reason)
    assert culprit.module is not None
    assert culprit.module.module == "blocks.5.second"
    assert (found.helps, found.hint()) == (False, "")
    (line,) = found.lines()
    assert line.endswith(f"; {reason}")


def test_a_pass_that_does_not_run_without_its_sites_is_named_as_a_whole() -> None:
    found = bisected([Brittle(("blocks.3.second",))])
    (culprit,) = found.culprits
    assert culprit.reason.startswith("it does not run with all of its sites left alone: pass 'brit")
    assert "too few linears are left" in culprit.reason
    assert not found.helps


@pytest.mark.slow
def test_passes_that_keep_their_promises_and_are_wrong_together_are_bisected() -> None:
    """Each makes the error a few times larger, which is allowed; in the end it is too large."""
    by = (1e-3, 2e-3, 4e-3, 8e-3)
    passes = (UnifyDtype(to="fp16"), *(TouchLinears(("blocks.0.second",), by=b) for b in by))
    subject = subject_of(passes, "fp16")
    checks = checks_of(subject)
    assert not any(check.failure for check in checks)
    found = bisect(subject, checks, cases(), cases())
    assert found.culprits
    assert set(named(found)) == {"blocks.0.second"}
    first = found.culprits[0].position
    assert first >= 2
    assert "pipeline" in found.culprits[0].failure
    assert found.helps
    again = bisect(replace(subject, leave=found.leave), checks, cases(), cases())
    assert again.culprits == ()
