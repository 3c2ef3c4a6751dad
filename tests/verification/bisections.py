"""Bisect pipelines of harmful passes over a small encoder of many layers."""

from collections.abc import Sequence
from functools import cache

import torch
from small_programs import NAMES, Block, Encoder, cases, program
from torch import nn
from torch.export import ExportedProgram

from enginecast.passes.ir.base import Pass, PassContext
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.verification.bisect.culprit import Bisection
from enginecast.verification.bisect.search import Subject, bisect
from enginecast.verification.eager.make_reference import make_reference
from enginecast.verification.program.observer import Observer
from enginecast.verification.reference import Reference
from enginecast.verification.report.data import PassCheck

BLOCKS = 6


class Deep(Encoder):
    """The small encoder with more blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])


def deep(dtype: torch.dtype = torch.float32) -> Deep:
    """Seeded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return Deep().eval().requires_grad_(False).to(dtype)


@cache
def deep_program() -> ExportedProgram:
    return program(deep())


@cache
def deep_reference(dtype: str) -> Reference:
    return make_reference(
        deep_program(),
        deep,
        cases(),
        dtype=dtype,
        names=NAMES,
        forward=lambda module, inputs: dict(module(**inputs)),
        mask_input="attention_mask",
    )


def subject_of(passes: Sequence[Pass], dtype: str = "fp32") -> Subject:
    return Subject(deep_program(), tuple(passes), deep_reference(dtype), names=NAMES)


def checks_of(subject: Subject) -> list[PassCheck]:
    """What an export finds after each pass, with what the subject leaves alone left alone."""
    observer: Observer = subject.observer(cases(), subject.program)
    copy = structural_copy(subject.program)
    run_pipeline(subject.passes, copy, PassContext(), [observer], subject.leave)
    return observer.checks


def bisected(passes: Sequence[Pass], dtype: str = "fp32") -> Bisection:
    """Check as an export does, then search on the same cases."""
    subject = subject_of(passes, dtype)
    return bisect(subject, checks_of(subject), cases(), cases())
