"""Code that knows that it is traced: what it does then is not what eager does.

`torch.compiler.is_exporting()` can be answered as eager answers it.  A test of a tensor's type or
of how it prints cannot, and shows only where eager runs on real tensors.
"""

import torch
from torch import nn

from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.outputs.flatten import Wanted, name_outputs
from enginecast.capture.python.locations import is_user_code
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.python.recompile import replaced
from enginecast.capture.sources.source import Source
from enginecast.capture.tracing.trace import Traced
from enginecast.capture.tracing.walk import Walker

SEED = 0
OWN = (
    "_transformer_encoder",
    "_native_multi_head",
    "aminmax",
    "mkldnn_rnn",
    "linspace",
    "im2col",
    "rand",
    "normal",
    "uniform",
    "bernoulli",
)
"""Begin the names of operators that torch itself takes in eager alone or calls otherwise there, or
draws with."""


def unlike_eager(source: Source, traced: Traced, wanted: Wanted, is_strict: bool) -> str:
    """Where the user's code runs other operators on real tensors than its program, whose weights
    are fake still: a sentence, empty where it does not or where that cannot be said.
    """
    empty = source.empty()
    if traced.had_levels or not any(_is_users(part) for part in empty.modules()):
        return ""
    module, names = source.eager(), tuple(spec.name for spec in traced.inputs)
    for each in (empty, module):
        name_outputs(each, names, wanted)
    inputs = sample(traced.inputs, example_sizes(traced.inputs), SEED)
    try:
        # In inference mode eager runs some operators whole that a trace takes apart.
        with quiet_torch(), replaced(torch, "inference_mode", torch.no_grad):
            walker = Walker(empty, traced.program, traced.inputs)
            eager = walker.real(module, inputs)
            captured = walker.captured(example_sizes(traced.inputs), copies_count=eager.writes)
    except Exception:  # the model's own code
        return ""
    if eager.outputs == captured.outputs or eager.has_strangers or captured.has_strangers:
        return ""
    step, other = eager.leaves(captured), captured.leaves(eager)
    if any(found is not None and found.name.startswith(OWN) for found in (step, other)):
        return ""
    numpy = (step, other) if is_strict else (step,)
    if any(found is not None and found.name == "lift_fresh" for found in numpy):
        return ""  # Dynamo translates what numpy does: values decide
    place = next((found.place for found in (step, other) if found is not None), None)
    if place is None or not is_user_code(place.file):
        return ""  # a branch of a library: values decide
    ran = step.name if step is not None else "nothing more"
    return (
        f"unverified branch: {place}: eager runs {ran}, and the trace, which the code can tell from"
        f" eager, {other.name if other is not None else 'nothing more'}"
    )


def _is_users(module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and is_user_code(code.co_filename)
