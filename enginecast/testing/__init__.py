"""What the tests of a pass need: capture once, run passes on copies, look, compare, and mutate.

    captured = capture(Gated(), torch.randn(4, 8))    # once for a file of tests
    outcome = run_passes(captured, "fuse-silu")       # on a copy of the program
    assert outcome.reasons == []                      # why places were left alone
    check_golden(FOLDER / "fuse_silu.diff", outcome.diff)
    compare(outcome)                                  # with eager and fp64, as an export does
    check_mutations(outcome)                          # and that comparison is able to fail

Holds: helpers that the tests of this repository and of other packages share. Besides tests,
`enginecast.reduce` alone imports it, whose scripts are tests.
"""

from enginecast.public import listing
from enginecast.testing.captured import Captured as Captured
from enginecast.testing.captured import Function as Function
from enginecast.testing.captured import capture as capture
from enginecast.testing.captured import trace as trace
from enginecast.testing.compare import Comparison as Comparison
from enginecast.testing.compare import compare as compare
from enginecast.testing.compare import outputs as outputs
from enginecast.testing.compare import relative_error as relative_error
from enginecast.testing.compare import same_bits as same_bits
from enginecast.testing.golden import check_golden as check_golden
from enginecast.testing.mutations import Mutant as Mutant
from enginecast.testing.mutations import MutationReport as MutationReport
from enginecast.testing.mutations import check_mutations as check_mutations
from enginecast.testing.mutations import mutants as mutants
from enginecast.testing.outcome import Outcome as Outcome
from enginecast.testing.outcome import count as count
from enginecast.testing.outcome import diff as diff
from enginecast.testing.outcome import notes as notes
from enginecast.testing.outcome import reasons as reasons
from enginecast.testing.outcome import run_on as run_on
from enginecast.testing.outcome import run_passes as run_passes
from enginecast.testing.outcome import targets as targets

__all__ = [
    "Captured",
    "Comparison",
    "Function",
    "Mutant",
    "MutationReport",
    "Outcome",
    "capture",
    "check_golden",
    "check_mutations",
    "compare",
    "count",
    "diff",
    "mutants",
    "notes",
    "outputs",
    "reasons",
    "relative_error",
    "run_on",
    "run_passes",
    "same_bits",
    "targets",
    "trace",
]
__dir__ = listing(__all__)
