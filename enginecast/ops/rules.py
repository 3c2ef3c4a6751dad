"""The rules by which something takes ops one by one: a target, or the emulator."""

from collections.abc import Callable
from typing import Any, TypeVar

from enginecast.library_names import MissingOperator

Rule = TypeVar("Rule")


class Rules(dict[Any, Rule]):
    """Op -> its rule, registered where the rule is defined.

    TRANSLATIONS: Rules[Callable[..., Any]] = Rules()

    @TRANSLATIONS.rule(own.quantize.default)
    def _quantize(...): ...
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[Any, str] = {}
        """Ops that have no rule, and why."""

    def rule(self, *ops: Any) -> Callable[[Rule], Rule]:
        """Register the decorated rule for these ops."""

        def register(rule: Rule) -> Rule:
            self.update((op, rule) for op in ops if not isinstance(op, MissingOperator))
            return rule

        return register

    def refuse(self, *ops: Any, reason: str) -> None:
        """Say why these ops have no rule."""
        self.refused.update(dict.fromkeys(ops, reason))
