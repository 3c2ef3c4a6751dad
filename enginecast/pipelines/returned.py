"""Outputs of an engine, packed as the method that it stands for returns them."""

import inspect
import sys
import typing
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack
from transformers.utils import ModelOutput

from enginecast.capture.outputs.flatten import HIDDEN_STATES
from enginecast.capture.outputs.partial import ALWAYS, assemble
from enginecast.errors import InputError, UsageError
from enginecast.runtime.bundle.manifest import Manifest

MOMENTS, POSTERIOR = "moments", "latent_dist"
"""The output of an encoder's engine, and the field that pipelines read.

See `calls.take_named_tensors`."""


class AbsentOutputError(InputError, AttributeError):
    """An output that the engine does not give was used.

    An AttributeError, too: accelerate asks by `hasattr` what an output is.
    """


@dataclass(frozen=True)
class Returned:
    """What a method of a class returns.

    Args:
        owner: of the engine, for errors: "text_encoder".
        kind: class of what is returned; None: a tensor, or a tuple of tensors.
        names: for each field, the outputs that fill it.
        posterior: what an autoencoder makes of the moments.
        are_all: whether the engine gives all that the model does.
    """

    owner: str
    kind: type[Any] | None
    names: Mapping[str, tuple[str, ...]]
    posterior: type[Any] | None
    are_all: bool

    @classmethod
    def of(cls, owner: str, model_class: type[nn.Module], manifest: Manifest) -> "Returned":
        """
        Raises:
            UsageError: what the method returns has no place for the outputs.
        """
        assert manifest.call is not None
        method = inspect.unwrap(getattr(model_class, manifest.call.entry))
        moved = {f"{each.name}_out": each.name for each in manifest.inputs}
        names: dict[str, tuple[str, ...]] = {}  # `sample_out` is `sample`, as an input is too
        for output in manifest.outputs:
            field = moved.get(output.name, output.name).partition(".")[0]
            names[field] = (*names.get(field, ()), output.name)
        space = vars(sys.modules[model_class.__module__])
        posterior = None
        if MOMENTS in names:
            names = {POSTERIOR: names[MOMENTS]}
            classes = (each for name, each in space.items() if name.endswith("Distribution"))
            posterior = next((each for each in classes if hasattr(each, "mode")), None)
        try:
            hint = typing.get_type_hints(method).get("return")
        except (NameError, TypeError):  # of what is imported for type checkers alone
            hint = None
        declared = _fitting([hint, *typing.get_args(hint)], names)
        imported = _fitting(space.values(), names)
        kind = next(iter(declared), None) or min(
            imported, key=lambda each: len(fields(each)), default=None
        )
        if (kind is None) != all(name.startswith("output_") for name in names) or (
            MOMENTS in [o.name for o in manifest.outputs] and posterior is None
        ):
            raise UsageError(
                f"{owner}: {model_class.__name__}.{manifest.call.entry} returns nothing that has"
                f" {', '.join(names)}"
            )
        return cls(owner, kind, names, posterior, not manifest.outputs_chosen)

    def packed(
        self, outputs: Mapping[str, Tensor], *, as_dict: bool, hidden: bool, count: int | None
    ) -> Any:
        """
        Args:
            as_dict: False: a tuple of what is there.
            hidden: whether hidden states were asked for.
            count: of hidden states that the model has, where that is known.
        """
        if self.kind is None:
            found = tuple(outputs.values())
            return found[0] if len(found) == 1 else found
        if issubclass(self.kind, ModelOutput):
            flat = {
                name if "." in name else field: outputs[name]
                for field, names in self.names.items()
                for name in names
            }
            if self.are_all:
                count = len(self.names.get(HIDDEN_STATES, ())) or count
            always = () if self.are_all else ALWAYS
            made: Any = assemble(
                self.kind, flat, count, self._refusal, hidden=hidden, always=always
            )
        else:
            made = self.kind(**{field: self._value(field, outputs) for field in self.names})
        return made if as_dict else made.to_tuple()

    def _value(self, field: str, outputs: Mapping[str, Tensor]) -> Any:
        names = self.names[field]
        if field == POSTERIOR and self.posterior is not None:
            return self.posterior(outputs[names[0]])
        if any("." in name for name in names):
            return tuple(t for name, t in outputs.items() if name.partition(".")[0] == field)
        return outputs[names[0]]

    def _refusal(self, name: str, there: str) -> Exception:
        option = "--outputs"
        if name.startswith(HIDDEN_STATES):
            option = "--hidden-state" if "." in name else "--hidden-state INDEX"
        return AbsentOutputError(
            f"{self.owner}: the engine does not give {name}; it gives {there}",
            hint=f"Export {self.owner} again, with {option} {name.rpartition('.')[2]}.",
        )


def tensor_of(value: Any, dtype: str) -> Tensor:
    """An output as torch's, where it lies."""
    found: Tensor = value if isinstance(value, Tensor) else from_dlpack(value)
    return found.bool() if dtype == "bool" else found


def _fitting(values: Iterable[Any], names: Iterable[str]) -> list[type[Any]]:
    """Those that are classes of outputs with fields for all names."""
    packs = [each for each in values if inspect.isclass(each) and issubclass(each, OrderedDict)]
    return [
        each
        for each in packs
        if is_dataclass(each) and {*names} <= {field.name for field in fields(each)}
    ]
