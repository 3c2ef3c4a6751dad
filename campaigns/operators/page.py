"""The results: a JSON file, and the page that is made from it."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rows import DOCS, Store, cell, table, versions

from operators.examine import OUTCOMES
from operators.samples import BY_PLACE, DTYPES, names

STORE = Store(
    Path(__file__).with_name("results.json"),
    under="operators",
    libraries=("torch", "onnx", "onnxscript", "onnxruntime"),
    order=lambda rows: sorted(names()),
)
read = STORE.read
PAGE = DOCS / "results" / "operators.md"
NOTHING = "no sample that takes and gives tensors of these dtypes, the same at each call"
LONGEST = 200
"""Characters of a reason in a cell."""
REASONS: Mapping[str, str] = {
    r"a size or index depends on the value": "a size depends on the values of a tensor, which"
    " torch.export does not take",
    r"a Python branch or loop depends": "Python code tests the values of a tensor, which"
    " torch.export does not take",
    r"values are read by Python": "Python code reads the values of a tensor, which torch.export"
    " does not take",
    r"torch\.export refused": "torch.export does not take it",
    r"ONNX has no form for (?P<what>\S+)": "ONNX has no operator for {what}",
    r"ONNX has no (?P<what>\w+ of \w+)": "ONNX has no {what}",
    r"to ONNX failed: (?P<what>[^(]+)": "{what}",
    r"could not find an implementation for (?P<what>\w+)": "ONNX Runtime has no kernel of {what}"
    " for this dtype",
    r"CPUExecutionProvider cannot run it": "ONNX Runtime has no kernel for it",
    r"Type 'tensor\((?P<what>\w+)\)' of input .* of operator \((?P<op>\w+)\)": "ONNX has no {op}"
    " of {what}",
    r"bound to different types": "the graph mixes dtypes, which ONNX Runtime refuses",
    r"does not run in all its sizes": "the sample fits no other sizes or values than its own",
    r"torch\.onnx cannot convert": "torch.onnx cannot convert it",
    r"values differ from the reference": "the engine gives other numbers, so verification rejects"
    " it",
    r"its worst row .*(has \d|relative error)": "the engine's roundings are larger than eager's by"
    " more than verification allows",
    r"ONNX Runtime refuses it|the engine does not run": "ONNX Runtime does not run the graph",
    r"the batch was fixed": "it is verified for the batch of the sample alone",
}
"""What a message says -> the reason in plain English; the first that fits."""
GROUPS: Mapping[str, str] = {
    "Convolutions and pools": r"nn\.functional\.(conv|.*pool|unfold|fold)|unfold",
    "Attention, recurrence, embeddings": r"nn\.functional\.(scaled_dot|multi_head|embedding|linear"
    r"|bilinear|one_hot|cosine|pairwise|pdist|channel_shuffle|normalize)|cdist",
    "Norms": r"nn\.functional\..*norm|native_.*norm|_?_?native_batch|norm|renorm|_batch_norm",
    "Resizing, padding, sampling": r"nn\.functional\.(interpolate|upsample|grid|affine|pad|pixel"
    r"|rot)|_upsample|constant_pad|grid_sampler",
    "Losses": r"nn\.functional\..*(loss|nll|cross_entropy|kl_div)",
    "Activations": r"nn\.functional\.|sigmoid|softmax|log_softmax|logit|softplus|silu",
    "Fourier transforms": r"fft\.|stft|istft",
    "Linear algebra": r"linalg\.|cholesky|lu|qr|svd|matmul|mm$|bmm|addmm|addmv|addr|mv$|dot|vdot"
    r"|inner|outer|ger$|einsum|kron|cross|tensordot|baddbmm|addbmm|addmm|pinverse|geqrf|ormqr|orgqr"
    r"|triangular_solve|matrix_exp|logdet|ldl|pca|chain|trace|tri[lu]|det|__rmatmul__|block_diag",
    "Sorting and searching": r"sort|argsort|msort|topk|kthvalue|median|nanmedian|mode|unique"
    r"|searchsorted|bucketize|quantile|nanquantile|arg(max|min|where)|nonzero|isin|histc|bincount"
    r"|count_nonzero|histogram",
    "Reductions and scans": r"sum|nansum|mean|nanmean|prod|std|var|all$|any$|a?max|a?min|cum"
    r"|log(cum)?sumexp|aminmax|trapz|trapezoid|cov|corrcoef|diff|gradient|dist$|allclose|equal$",
    "Indexing": r"gather|scatter|index|masked|take|where|put|select|slice|__getitem__|narrow|diag"
    r"|fill",
    "Shapes": r"view|reshape|resize|expand|repeat|tile|cat$|concat|stack|[hvd]stack|split"
    r"|[hvd]split|chunk|unbind|flip|rot90|roll|permute|transpose|movedim|t$|T$|H$|m[TH]$|mH|swap|squeeze"
    r"|unsqueeze|flatten|unflatten|ravel|meshgrid|broadcast|atleast|combinations|cartesian|as_stri"
    r"|column_stack|contiguous|clone|tensor_split|unsafe_|alias|item",
    "Special functions": r"special\.|erf|lgamma|digamma|polygamma|i0|mvlgamma|igamma",
    "Numbers, one by one": r".",
}
"""Title -> how the names of its operators begin; the first group that fits has an operator."""


def group_of(name: str) -> str:
    """The title under which an operator stands."""
    return next(title for title, pattern in GROUPS.items() if re.match(pattern, name))


def counts(found: Mapping[str, Any], column: str | None = None) -> Counter[str]:
    """How the cells of all operators ended, or those of one dtype."""
    return Counter(
        cell["outcome"]
        for row in found["operators"].values()
        for name, cell in row["cells"].items()
        if column in (None, name)
    )


def page(found: Mapping[str, Any]) -> str:
    """The page's text."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    rows: Mapping[str, Any] = found["operators"]
    asked = {name: row for name, row in rows.items() if row["cells"]}
    whole = sum(_is_verified(row) for row in asked.values())
    yield from (
        "# Operators",
        "",
        "`make operators` exports to ONNX Runtime on CPUs every operator in torch's own test",
        "database (`torch.testing._internal.common_methods_invocations.op_db`) that a model may",
        "call: as a small module, on up to three sample inputs per dtype. Code that shares nothing",
        "with the export's verification compares each published engine with eager again, over its",
        "declared sizes and integers, and on zeros of both signs, tiny, huge, whole, halved and",
        "shifted numbers. What differs is *silently wrong*. The column float16 has engines of",
        "`--precision fp16`, compared with eager in float16.",
        "",
        "Engines refuse infinities and NaN as inputs, but operators may meet them inside a model,",
        "so these are compared in float32, too. The exceptions are what torch leaves open, such as",
        "an integer made of NaN, and resizes and Fourier transforms, whose zeros make NaN of",
        "infinities in torch, in an engine, or in both.",
        "",
        versions(found),
        "",
        f"{len(rows)} of the {len(names())} operators were examined. Of {len(asked)} that an "
        f"engine can have, {whole} ({whole / max(len(asked), 1):.0%}) are verified in every dtype "
        f"tried; {sum(row.get('inside', False) for row in asked.values())} of them were compared "
        "on infinities and NaN that arise inside.",
        "",
    )
    ended = {column: counts(found, column) for column in DTYPES}
    yield from table(
        ("dtype", *OUTCOMES),
        ((column, *(ended[column][outcome] for outcome in OUTCOMES)) for column in DTYPES),
    )
    listed = ", ".join(f"`{name}`" for name in BY_PLACE)
    yield from (
        "",
        'A count, such as "3 of 4", says how many samples are verified, with the reason of the',
        "worst. Complex inputs and results are pairs of real numbers. Operators that may choose",
        f"among equal elements ({listed}) are judged by the elements they chose.",
    )
    for title in GROUPS:
        chosen = {name: row for name, row in asked.items() if group_of(name) == title}
        if chosen:
            yield from ("", f"## {title}", "")
            heads = ("operator", *DTYPES, "reason")
            yield from table(heads, (_cells(name, row) for name, row in chosen.items()))
    reasons: dict[str, list[str]] = {}
    for name, row in rows.items():
        if not row["cells"]:
            reasons.setdefault(row["reason"] or NOTHING, []).append(f"`{name}`")
    lines = (f"- {reason}: {', '.join(found)}" for reason, found in reasons.items())
    yield from ("", "## Not asked", "", *lines)


def _is_verified(row: Mapping[str, Any]) -> bool:
    return all(cell["outcome"] == "verified" for cell in row["cells"].values())


def _cells(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    cells = [_cell(row["cells"].get(column)) for column in DTYPES]
    reasons = dict.fromkeys(cell["reason"] for cell in row["cells"].values() if cell["reason"])
    return f"`{name}`", *cells, cell(plain(next(iter(reasons), "")), LONGEST)


def plain(reason: str) -> str:
    """Why an operator is refused, in plain English."""
    for pattern, said in REASONS.items():
        found = re.search(pattern, reason, re.IGNORECASE)
        if found:
            return said.format(**{name: text.strip() for name, text in found.groupdict().items()})
    return reason


def _cell(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    if found["outcome"] == "verified":
        return "yes"
    some = f", {found['verified']} of {found['samples']} yes" if found["verified"] else ""
    return f"{found['outcome']}{some}"
