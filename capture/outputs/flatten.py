"""The outputs of a model by name, and which of them an engine returns.

Names are fields of ModelOutput, dict and dataclass, and numbers in tuples.  A cache gives the keys
and values of each layer: `past_key_values.0.key`.

ONNX has one namespace for inputs and outputs, so an output with the name of an input is called
`NAME_out`, and a name that two outputs share is numbered.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from enginecast.capture.python.autocast import autocast_off
from enginecast.errors import CaptureError, UsageError

ASK = "output_hidden_states"
"""The argument that makes a transformers model return its hidden states."""
HIDDEN_STATES = "hidden_states"
MOST_NAMED = 8
"""Outputs that one note names."""
_INDEX = re.compile(r"0|-?[1-9]\d*")
RAW = "raw_"
"""Before `hidden_states.-1`: as it is before the model's last norm."""
_HIDDEN_STATE = re.compile(rf"(?:{RAW})?{HIDDEN_STATES}\.(?P<index>{_INDEX.pattern})")


@dataclass(frozen=True)
class OutputSpec:
    """One output: name, dtype, and each dimension as a number, a symbol's name or an expression."""

    name: str
    dtype: torch.dtype
    dims: tuple[int | str, ...]


@dataclass(frozen=True)
class Named:
    """A model's results, flattened and named."""

    tensors: dict[str, Tensor]
    renamed: dict[str, str]
    """The name of an output to the one it had before, where it had to give way."""
    numbers: tuple[str, ...] = ()
    """Names of the outputs that are plain numbers of Python in what was returned."""
    pairs: tuple[str, ...] = ()
    """Names of the outputs that are complex in what was returned."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the names for the user, as sentences."""
        renamed = (
            f"the output {old!r} is called {new!r}: an input or another output has its name"
            for new, old in self.renamed.items()
        )
        one = "a plain number" if len(self.numbers) == 1 else "plain numbers"
        numbers = f"the model returns {one} as {_some(self.numbers)}: the engine gives tensors"
        pairs = f"{_some(self.pairs)}: complex in the model, and real and imaginary parts side by"
        return (
            *renamed,
            *([f"{numbers} without dimensions"] if self.numbers else []),
            *([f"{pairs} side, in a last dimension of 2, in the engine"] if self.pairs else []),
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join((*names[:MOST_NAMED], *(["..."] if names[MOST_NAMED:] else [])))


class UnknownOutputError(UsageError):
    """The user asked for an output that the model does not have."""

    def __init__(self, name: str, given: Sequence[str]) -> None:
        super().__init__(
            f"--outputs {name}: the model gives no output {name!r}",
            hint=f"It gives {', '.join(given)}.",
        )
        self.given = tuple(given)


@dataclass(frozen=True)
class Wanted:
    """The outputs that an engine should return.

    Args:
        names: of the outputs that stay, in order; empty: all that the model gives.
        hidden_states: names `hidden_states.INDEX` of hidden states that come behind them.
    """

    names: tuple[str, ...] = ()
    hidden_states: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.names or self.hidden_states)

    @property
    def asks_for_hidden_states(self) -> bool:
        """Whether the model has to be asked for its hidden states."""
        return any(hidden_index(name) is not None for name in (*self.names, *self.hidden_states))

    def chosen(self, given: Sequence[str]) -> tuple[str, ...]:
        """Names of the outputs, in order, of a model that gives `given` by itself."""
        return tuple(dict.fromkeys((*(self.names or given), *self.hidden_states)))


def parse_wanted(
    outputs: str | Sequence[str] = (), hidden_states: Sequence[str | int] = ()
) -> Wanted:
    """Read `--outputs A,B` (each may be a list with commas) and `--hidden-state INDEX`.

    Raises:
        UsageError: an empty name, a name given twice, or an index that is not an integer.
    """
    lists = [outputs] if isinstance(outputs, str) else list(outputs)
    names = [name.strip() for text in lists for name in text.split(",")]
    for position, name in enumerate(names):
        if not name or name in names[:position]:
            what = f"{name!r} is given twice" if name else "expected names with commas between them"
            raise UsageError(f"--outputs {','.join(lists)}: {what}")
    indices = [str(index).strip() for index in hidden_states]
    for index in indices:
        if not _INDEX.fullmatch(index):
            raise UsageError(
                f"--hidden-state {index}: expected an integer",
                hint="0 is the first hidden state, -1 the last, -2 the one before it.",
            )
    return Wanted(tuple(names), tuple(f"{HIDDEN_STATES}.{index}" for index in indices))


def hidden_index(name: str) -> int | None:
    """The index of a hidden state by the name of its output; None for any other output."""
    match = _HIDDEN_STATE.fullmatch(name)
    return None if match is None else int(match["index"])


ALL = Wanted()


def name_result(
    value: Any,
    wanted: Wanted = ALL,
    inputs: Collection[str] = (),
    own_hidden: bool = True,
    *,
    takes_numbers: bool = True,
) -> Named:
    """Flatten what a model returned to tensors by name, in order; None is left out.

    A field keeps its name, an item of a tuple is `output_0`, or `hidden_states.0` inside a field.

    Args:
        value: what `forward` returned.
        wanted: the outputs that are kept.
        inputs: names that no output may have.
        own_hidden: whether hidden states that nobody named are outputs.
        takes_numbers: whether numbers become tensors without dimensions, and complex tensors pairs
            of real ones; only code can do that.

    Raises:
        CaptureError: something that is kept and is neither a tensor nor a container of tensors, or
            no tensor at all.
        UsageError: the model does not give what is wanted.
    """
    found = list(_walk(value, ()))
    names = free_names([name for name, _ in found], inputs)
    leaves = {new: leaf for new, (_, leaf) in zip(names, found, strict=True)}
    own = [name for name in leaves if own_hidden or not _is_hidden_state(name)]
    numbers = {
        n: _as_tensor(leaf) for n, leaf in leaves.items() if takes_numbers and _is_number(leaf)
    }
    pairs = {
        name: torch.view_as_real(leaf.resolve_conj())
        for name, leaf in leaves.items()
        if takes_numbers and isinstance(leaf, Tensor) and leaf.is_complex()
    }
    leaves |= numbers | pairs
    given = tuple(name for name in own if isinstance(leaves[name], Tensor))
    chosen = wanted.chosen(own)
    tensors = {name: _chosen(name, value, leaves, given) for name in chosen}
    if not tensors:
        raise CaptureError("the model returns no tensor")
    before = {new: old for new, (old, _) in zip(names, found, strict=True)}
    renamed = {n: old for n, old in before.items() if n != old and n in tensors}
    kinds = (tuple(name for name in tensors if name in kind) for kind in (numbers, pairs))
    return Named(tensors, renamed, *kinds)


def free_names(names: Sequence[str], inputs: Collection[str]) -> list[str]:
    """`names`, each once and none of `inputs`; names that are free stay, whatever their place.

    The first of equal names keeps it: a, a, x with an input x are a, a_2, x_out.
    """
    kept: dict[str, int] = {}
    for position, name in enumerate(names):
        if name not in inputs:
            kept.setdefault(name, position)
    used = {*inputs, *kept}
    free = []
    for position, name in enumerate(names):
        chosen = name
        if kept.get(name) != position:
            chosen = base = f"{name}_out" if name in inputs else name
            number = 2
            while chosen in used:
                chosen, number = f"{base}_{number}", number + 1
            used.add(chosen)
        free.append(chosen)
    return free


def run_named(
    module: nn.Module, inputs: Mapping[str, Tensor], wanted: Wanted, *, autocasts: bool = False
) -> dict[str, Tensor]:
    """Run a module and name its outputs, as the captured program names them.

    Args:
        autocasts: whether its own regions of torch.autocast cast, as they do for its users.

    Raises:
        CaptureError, UsageError: see `name_result`.
    """
    asking, own_hidden = _asking(module, wanted)
    with nullcontext() if autocasts else autocast_off():
        returned = _called(module, module.forward, {**inputs, **asking})
    return name_result(returned, wanted, inputs, own_hidden).tensors


def _called(
    function: Callable[..., Any], forward: Callable[..., Any], given: Mapping[str, Any]
) -> Any:
    """Call a module or its forward by keyword, but for parameters that are positional alone."""
    parameters = inspect.signature(forward).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY]
    first = [given[name] for name in names if name in given]
    return function(*first, **{name: each for name, each in given.items() if name not in names})


def name_outputs(module: nn.Module, arguments: Sequence[str], wanted: Wanted = ALL) -> list[str]:
    """Make `module.forward` take `arguments` by keyword and return tensors by name, in place.

    Wrapping the module instead would put a prefix before every module path in the program.

    Returns:
        A list that gets notes on the names when `forward` is called.
    """
    forward: Callable[..., Any] = module.forward
    asking, own_hidden = _asking(module, wanted)
    notes: list[str] = []
    expected = set(arguments)
    hooks, module._forward_hooks = module._forward_hooks, OrderedDict()

    def named_forward(*args: Any, **inputs: Any) -> Any:
        if args or inputs.keys() != expected:
            return forward(*args, **inputs)  # the model's own code calls it once more
        returned = _called(forward, forward, {**inputs, **asking})
        for key, hook in hooks.items():  # those of the model itself see what it returns
            has_names = key in module._forward_hooks_with_kwargs
            changed = hook(module, (), *([inputs] if has_names else []), returned)
            returned = returned if changed is None else changed
        try:
            outputs = name_result(returned, wanted, inputs, own_hidden)
        except CaptureError as error:
            place = return_place(forward)
            where = f" at {place}" if place else ""
            raise CaptureError(f"{error.message}{where}", hint=error.hint) from None
        notes[:] = outputs.notes
        return outputs.tensors

    named_forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in arguments]
    )
    module.forward = named_forward
    return notes


def gives_hidden_states(module: nn.Module) -> bool:
    """Whether a module returns hidden states without being asked."""
    config = getattr(module, "config", None)
    parameter = inspect.signature(module.forward).parameters.get(ASK)
    if parameter is None and not hasattr(config, ASK):
        return True  # nothing says that asking makes a difference
    default = parameter is not None and parameter.default is True
    return default or bool(getattr(config, ASK, False))


def _is_hidden_state(name: str) -> bool:
    """Also `encoder_hidden_states.0`, and those of a part: `text_model_output.hidden_states.0`."""
    return any(part.endswith(HIDDEN_STATES) for part in name.split("."))


def _asking(module: nn.Module, wanted: Wanted) -> tuple[dict[str, bool], bool]:
    """What `forward` is called with besides its inputs: a request for hidden states, or nothing;
    and whether hidden states that nobody named are outputs.
    """
    parameters = inspect.signature(module.forward).parameters
    takes = ASK in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not takes or not wanted.asks_for_hidden_states:
        return {}, True
    _leave_norm_out(module, (*wanted.names, *wanted.hidden_states))
    return {ASK: True}, gives_hidden_states(module)


def _leave_norm_out(module: nn.Module, names: Sequence[str]) -> None:
    """Have a language model's last norm give what it takes, where a name asks for that.

    A hook does it whatever the version of transformers ties `hidden_states[-1]` to, and is what
    `QwenImage21Pipeline` of diffusers 0.42.1 does.
    """
    if not any(name.startswith(RAW) for name in names):
        return
    normed = [
        name for name in names if not name.startswith(RAW) and hidden_index(name) in (None, -1)
    ]
    inner = getattr(module, "model", module)
    norm = getattr(getattr(inner, "language_model", inner), "norm", None)
    if normed or not isinstance(norm, nn.Module):
        why = f"{normed[0]} is behind it" if normed else "the model has no model.norm"
        raise UsageError(f"--outputs {','.join(names)}: cannot leave out the last norm, as {why}")
    if _as_given not in norm._forward_hooks.values():
        norm.register_forward_hook(_as_given)


def _as_given(module: nn.Module, given: tuple[Any, ...], output: Any) -> Any:
    return given[0]


def _chosen(name: str, value: Any, leaves: Mapping[str, Any], given: Sequence[str]) -> Tensor:
    leaf = leaves.get(name)
    index = hidden_index(name)
    if leaf is None and index is not None:
        leaf = _hidden_state(value, name, index)
    if leaf is None:
        raise UnknownOutputError(name, given)
    if isinstance(leaf, Tensor):
        return leaf
    raise CaptureError(
        f"the model returns {_what(leaf)} as {name}, expected tensors in tuples, dicts or"
        " dataclasses",
        hint=f"Leave it out: --outputs {','.join(given)}."
        if given
        else "Wrap the model so that it returns tensors.",
    )


def _hidden_state(value: Any, name: str, index: int) -> Tensor:
    get = value.get if isinstance(value, Mapping) else partial(getattr, value)
    states = get(HIDDEN_STATES, None)
    if not isinstance(states, (tuple, list)) or not states:
        raise UsageError(
            f"--hidden-state {index}: the model gives no hidden states",
            hint=f"Its forward has to take {ASK} and to return them as hidden_states.",
        )
    if not -len(states) <= index < len(states):
        raise UsageError(
            f"--hidden-state {index}: the model gives {len(states)} hidden states",
            hint=f"Expected {-len(states)}..{len(states) - 1}.",
        )
    found = states[index]
    if not isinstance(found, Tensor):
        raise CaptureError(f"the model returns {_what(found)} as {name}, expected a tensor")
    return found


def _what(leaf: Any) -> str:
    return "a plain number" if _is_number(leaf) else f"a {type(leaf).__name__}"


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _as_tensor(number: Any) -> Tensor:
    """int64, float32 or bool, without dimensions."""
    if isinstance(number, (bool, torch.SymBool)):
        return _as_tensor(torch.sym_ite(number, 1, 0)) == 1
    is_float = isinstance(number, (float, torch.SymFloat))
    return torch.scalar_tensor(number, dtype=torch.float32 if is_float else torch.int64)


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Names and leaves: tensors, and whatever is not a container of tensors."""
    if value is None:
        return
    items = None if isinstance(value, Tensor) else _items(value)
    if items is None:
        yield ".".join(path) or "output_0", value
        return
    for key, item in items:
        name = key if path or not key.isdigit() else f"output_{key}"
        yield from _walk(item, (*path, name))


def _items(value: Any) -> Iterator[tuple[str, Any]] | None:
    """What a container holds, by name; None for anything else."""
    if isinstance(value, Mapping):  # ModelOutput too
        return ((str(key), item) for key, item in value.items())
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return ((name, getattr(value, name)) for name in names)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, (tuple, list)):
        return ((str(index), item) for index, item in enumerate(value))
    # Keys and values by layer, of a cache whose layers have no other tensors.
    layers = getattr(value, "layers", None)
    if not isinstance(layers, list) or not layers or isinstance(value, nn.Module):
        return None
    for layer in layers:
        held = {
            name
            for name, item in getattr(layer, "__dict__", {}).items()
            if isinstance(item, Tensor)
        }
        if {name for name in held if not name.startswith("_")} != {"keys", "values"}:
            return None
    pairs = ({"key": layer.keys, "value": layer.values} for layer in layers)
    return ((str(index), pair) for index, pair in enumerate(pairs))


def return_place(forward: Callable[..., Any]) -> str:
    """`FILE:LINE` of the one return statement of a function, or else of its first line.

    Empty where the source is not available.
    """
    function = inspect.unwrap(forward)
    try:
        lines, first = inspect.getsourcelines(function)
        file = inspect.getsourcefile(function)
        [tree] = ast.parse(textwrap.dedent("".join(lines))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return ""
    found = [node.lineno for node in _returns(tree)]
    return f"{file}:{first + found[0] - 1}" if len(found) == 1 else f"{file}:{first}"


def _returns(node: ast.AST) -> Iterator[ast.Return]:
    """Return statements of a function, without those of functions inside of it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Return):
            yield child
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _returns(child)
