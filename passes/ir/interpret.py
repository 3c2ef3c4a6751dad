"""Run an exported program node by node, with little memory and an optional observer.

`program.module()` evaluates every weight expression (the casts of an fp64 reference, say) before
the first layer runs. Here a weight expression is evaluated right before its first use, and every
value is freed after its last one, so that the memory used stays near that of one layer.

Several cases run side by side, node by node: each weight is read and cast once for all of them,
which is most of the time that a model of some billion parameters takes.
"""

from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind
from torch.fx import Interpreter, Node

from enginecast.errors import InputError, VerificationError
from enginecast.library_names import aten
from enginecast.passes.ir.blocks import Block, is_structured, run_structured
from enginecast.passes.ir.deferred_weights import deferred_weights
from enginecast.passes.ir.edit import (
    dtype_of,
    weight_expressions,
    weight_specs,
    weight_tensor,
)
from enginecast.passes.ir.source import checked, source_line
from enginecast.passes.ir.traits import Trait, has
from enginecast.progress import counted

_SECOND_FACTOR: Mapping[Any, int] = {
    aten.mm.default: 1,
    aten.bmm.default: 1,
    aten.matmul.default: 1,
    aten.addmm.default: 2,
    aten.baddbmm.default: 2,
}
"""Matrix products, and the argument position of the factor that may be a weight."""
ALIGNMENT = 64
"""Bytes; where torch's allocator puts what it computes."""

Watch = Callable[[int, Node, Tensor], None]
"""Called with the case number, the node and its tensor, for every tensor that depends on the
inputs, as soon as it is computed; must not keep or change it."""
Feed = Callable[[int, Node, Tensor], Tensor]
"""Called after `Watch`, except for nodes within a block; returns the value that the node's readers
get instead."""


class AssertionFailedError(VerificationError):
    """An assertion of the program does not hold.

    Args:
        message: as for `VerificationError`.
        case: index of the case among those that were run.
        hint: as for `VerificationError`.
    """

    def __init__(self, message: str, case: int, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.case = case


def interpret(
    program: ExportedProgram,
    inputs: Mapping[str, Tensor],
    *,
    names: Sequence[str] | None = None,
    watch: Watch | None = None,
) -> dict[str, Tensor]:
    """Run a program on one case; see `interpret_cases`."""
    return interpret_cases(program, [inputs], names=names, watch=watch)[0]


def interpret_cases(
    program: ExportedProgram,
    cases: Sequence[Mapping[str, Tensor]],
    *,
    names: Sequence[str] | None = None,
    watch: Watch | None = None,
    feed: Feed | None = None,
) -> list[dict[str, Tensor]]:
    """Run a program on several cases without altering it, its buffers or the inputs.

    Args:
        program: as exported or as a pass left it.
        cases: inputs by placeholder name; names that the program does not have are ignored.
        names: names of the tensor outputs, in order; None: `output_names`.
        watch: sees every tensor that depends on the inputs.
        feed: may replace each of them for its readers; None: nothing is replaced.

    Returns:
        For each case the tensor outputs by name: bit-equal with a run of that case alone.

    Raises:
        InputError: an input is missing, or `names` does not fit the number of outputs.
    """
    with torch.no_grad():
        results = Run(program, cases, watch, feed).results()
    return [named(found, names) for found in results]


def named(results: Sequence[Any], names: Sequence[str] | None) -> dict[str, Tensor]:
    """The tensors among a case's outputs, by name."""
    tensors = [result for result in results if isinstance(result, Tensor)]
    wanted = output_names(len(tensors)) if names is None else tuple(names)
    if len(wanted) != len(tensors):
        raise InputError(
            f"the program has {len(tensors)} tensor outputs, "
            f"got {len(wanted)} names: {', '.join(wanted)}"
        )
    return dict(zip(wanted, tensors, strict=True))


def output_names(count: int) -> tuple[str, ...]:
    """Default output names, since FX names change with every pass."""
    return tuple(f"output_{index}" for index in range(count))


class Run(Interpreter):
    """One run; the environments hold the values that are still needed.

    `verification.emulate.run` and `compiler.prepare.cases` derive from it; what they override is
    public.
    """

    def __init__(
        self,
        program: ExportedProgram,
        cases: Sequence[Mapping[str, Tensor]],
        watch: Watch | None = None,
        feed: Feed | None = None,
    ) -> None:
        super().__init__(program.graph_module, garbage_collect_values=False)
        self._program = program
        self._watch = watch
        self._replace = feed
        self._weights = weight_expressions(program)
        self._specs = weight_specs(program)
        self._deferred = deferred_weights(program)
        self._leaves: dict[Node, Tensor] = {}
        """The weights that deferred ones are computed from."""
        for weight in self._deferred.values():
            self._leaves |= weight.compute.tensors
            self._weights |= set(weight.compute.nodes)
        self._feeds = [dict(_feed(program, inputs)) for inputs in cases]
        self._shared: dict[Node, Any] = {}
        self._own: list[dict[Node, Any]] = [{} for _ in cases]

    def results(self) -> list[list[Any]]:
        """The user outputs of each case, in order."""
        order = schedule(self._program, self._weights)
        pending = Counter(source for node in order for source in node.all_input_nodes)
        for node in counted(order, "ops"):
            if node.op == "output":
                return [self.user_outputs(node, own) for own in self._own]
            if node in self._weights:
                self.env = self._shared
                self._shared[node] = self.evaluate(node, 0)
            else:
                for case, own in enumerate(self._own):
                    self.env = ChainMap(own, self._shared)  # type: ignore[assignment]  # a mapping
                    own[node] = self.evaluate(node, case)
            for source in (node, *node.all_input_nodes):
                pending[source] -= source is not node
                if pending[source] == 0:
                    for values in (self._shared, *self._own):
                        values.pop(source, None)
        raise AssertionError("a graph without an output node")

    def evaluate(self, node: Node, case: int) -> Any:
        """The value of one node from the values in `self.env`."""
        if node.op == "placeholder":
            result = self._given(node, case)
            # Whoever makes a new tensor of a weight, element by element, reads it wherever it is.
            copied = all(
                has(user, Trait.GATHERS)
                or (has(user, Trait.CASTS) and dtype_of(user) != dtype_of(node))
                for user in node.users
            )
            is_weight = node in self._weights and isinstance(result, Tensor) and result.numel()
            if is_weight and not copied and result.data_ptr() % ALIGNMENT:
                # A tensor of a mapped file may be unaligned, and a product with one row then sums
                # in another order: two equal programs would differ in their last bits.
                return result.clone()
            return result
        if is_structured(node):
            args, _ = self.fetch_args_kwargs_from_env(node)
            return run_structured(
                node, args, partial(self.run_block, case=case), lambda op, *values: op(*values)
            )
        if has(node, Trait.CHECKS):
            return run_check(node, case, partial(self.run_node, node))
        result = run_number(node, case, partial(self.run_node, node))
        if isinstance(result, Tensor) and node not in self._weights:
            if self._watch is not None:
                self._watch(case, node, result)
            if self._replace is not None and node.graph is self._program.graph:
                return self._replace(case, node, result)
        return result

    def _given(self, node: Node, case: int) -> Any:
        """The value of a placeholder; a deferred weight is computed when it is needed."""
        if node in self._leaves:
            return self._leaves[node]
        spec = self._specs.get(node.name)
        if spec is None:
            return self._feeds[case][node.name]
        if spec.target in self._deferred:
            outer, env = self.env, dict[Node, Any]()
            self.env = env
            try:
                for inner in self._deferred[spec.target].compute.nodes:
                    env[inner] = result = self.evaluate(inner, 0)
            finally:
                self.env = outer
            if not isinstance(result, Tensor) or _is_multiplied(node, result):
                return result
            return result.contiguous()
        return weight_tensor(self._program, spec)

    def run_block(self, block: Block, values: list[Any], case: int) -> list[Any]:
        """The results of one block in a case.

        Its nodes are evaluated and watched like those outside. Afterwards `self.env` is the block's
        environment.
        """
        env: dict[Node, Any] = dict(zip(block.placeholders, values, strict=True))
        self.env = env
        pending = Counter(source for n in block.module.graph.nodes for source in n.all_input_nodes)
        for node in block.module.graph.nodes:
            if node.op == "output":
                return [
                    env[result] if isinstance(result, Node) else result for result in block.results
                ]
            if node.op == "get_attr":
                env[node] = getattr(block.module, str(node.target))
            elif node.op == "call_function":
                env[node] = self.evaluate(node, case)
                self.env = env
            for source in node.all_input_nodes:
                pending[source] -= 1
                if not pending[source]:
                    env.pop(source, None)
        raise AssertionError("a graph without an output node")

    def user_outputs(self, node: Node, own: dict[Node, Any]) -> list[Any]:
        """The user outputs of one case."""
        self.env = ChainMap(own, self._shared)  # type: ignore[assignment]
        values: Any = self.map_nodes_to_values(node.args[0], node)
        specs = self._program.graph_signature.output_specs
        return [
            value
            for spec, value in zip(specs, values, strict=True)
            if spec.kind is OutputKind.USER_OUTPUT
        ]


def _is_multiplied(weight: Node, tensor: Tensor) -> bool:
    """Whether a weight is a transposed view that only products read, as their second factor.

    It stays a view then.  A product of one to three rows with a contiguous one may be summed term
    by term (seen with MKL on AMD: 3.5 times eager's error for 1536 terms), which no engine does:
    they order weights as their kernels like it.
    """
    if tensor.dim() < 2 or tensor.is_contiguous() or not tensor.mT.is_contiguous():
        return False
    return all(
        user.target in _SECOND_FACTOR
        and [place for place, one in enumerate(user.args) if one is weight]
        == [_SECOND_FACTOR[user.target]]
        for user in weight.users
    )


def _feed(program: ExportedProgram, inputs: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
    weights = weight_specs(program)
    for spec in program.graph_signature.input_specs:
        name = spec.arg.name
        if name in weights:
            continue  # read when they are needed
        if isinstance(spec.arg, ConstantArgument):
            yield name, spec.arg.value
        elif spec.target is not None and spec.target in program.constants:
            yield name, program.constants[spec.target]
        elif name in inputs:
            yield name, inputs[name]
        else:
            raise InputError(f"input {name!r} of the program is missing; got {', '.join(inputs)}")


def schedule(program: ExportedProgram, weights: set[Node]) -> list[Node]:
    """The graph's order with every weight expression moved to right before its first use.

    Args:
        weights: pure nodes that depend on weights alone, closed under inputs.
    """
    order: list[Node] = []
    placed: set[Node] = set()

    def place(node: Node) -> None:
        for source in node.all_input_nodes:
            if source in weights and source not in placed:
                place(source)
        placed.add(node)
        order.append(node)

    for node in program.graph.nodes:
        if node not in weights:
            place(node)
    return order


def run_number(node: Node, case: int, call: Callable[[], Any]) -> Any:
    """Compute a node of Python number arithmetic, which may fail on a path that the model does not
    take.

    Raises:
        AssertionFailedError: the arithmetic divides by zero or overflows.
    """
    try:
        return call()
    except ArithmeticError as error:
        place = source_line(node) or node.name
        raise AssertionFailedError(
            f"the program fails at {place}: {error}",
            case,
            hint="torch.export captured only the path that does not fail; rewrite the `try` there.",
        ) from error


def run_check(node: Node, case: int, call: Callable[[], Any]) -> Any:
    """Call an assertion.

    Raises:
        AssertionFailedError: the assertion does not hold; names the line of the model's code.
    """
    try:
        return call()
    except RuntimeError as error:
        place = source_line(node) or node.name
        said = checked(next(iter(str(error).splitlines()), ""))
        raise AssertionFailedError(
            f"the assertion at {place} fails: {said}",
            case,
            hint="Give inputs that satisfy it (--inputs), or narrow the sizes (--dynamic).",
        ) from error
