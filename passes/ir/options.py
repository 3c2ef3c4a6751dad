"""Convert the fields of a pass to options in a pipeline spec, and back.

fuse-thing{size=8}            size: int = 1
fuse-thing{keep=a,b}          keep: tuple[str, ...] = ()
fuse-thing{to=fp16}           to: Literal["fp16", "bf16"] = "bf16"
"""

import dataclasses
import difflib
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from enginecast.errors import PassDefectError, SpecError
from enginecast.passes.ir.base import Pass
from enginecast.passes.ir.spec import Located, PassSpec, TextPosition, Value
from enginecast.plugins import defect_of

P = TypeVar("P", bound=Pass)

_SCALARS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}


def option_fields(cls: type[Pass]) -> dict[str, tuple[Any, dataclasses.Field[Any]]]:
    """The options of a pass: name -> (annotation, field)."""
    try:
        hints = get_type_hints(cls)
    except Exception as error:  # an annotation is code
        what = f"pass '{cls.name}': the types of its options"
        raise defect_of(cls.__module__, what, error, PassDefectError) from error
    return {
        field.name: (hints[field.name], field) for field in dataclasses.fields(cls) if field.init
    }


def describe(annotation: Any) -> str:
    """The form of a value of this annotation in a spec: "fp16 or bf16", "text,..."."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(map(_spell, arguments))
    if origin is tuple:
        return f"{describe(arguments[0])}, one or more"
    if origin in (Union, types.UnionType):
        return describe(_without_none(annotation))
    return _SCALARS.get(annotation, str(annotation))


def pass_from_spec(cls: type[P], located: Located) -> P:
    """Make the pass that one element of a pipeline describes.

    Raises:
        SpecError: an option that the pass does not have, a value that does not fit, a required
            option that is missing, or values that the pass itself refuses; with a caret there.
    """
    known = option_fields(cls)
    chosen: dict[str, Any] = {}
    for key, values in located.spec.options:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            meant = f"Did you mean '{close[0]}'?  " if close else ""
            options = f"Its options: {', '.join(known)}." if known else "It has no options."
            message = f"pass '{cls.name}' has no option '{key}'"
            raise located.keys[key].error(message, hint=meant + options)
        annotation, places = _without_none(known[key][0]), located.values[key]
        if get_origin(annotation) is tuple:
            element = get_args(annotation)[0]
            pairs = zip(values, places, strict=True)
            chosen[key] = tuple(_scalar(element, given, place, key) for given, place in pairs)
        elif len(values) > 1:
            raise places[1].error(f"option '{key}' takes one value, got {len(values)}")
        else:
            chosen[key] = _scalar(annotation, values[0], places[0], key)
    for key, (annotation, field) in known.items():
        if key not in chosen and _is_required(field):
            raise located.place.error(
                f"pass '{cls.name}' needs option '{key}'", hint=f"Expected {describe(annotation)}."
            )
    try:
        return cls(**chosen)
    except (SpecError, ValueError) as error:
        raise located.place.error(f"pass '{cls.name}' refuses its options: {error}") from error


def spec_from_pass(pass_: Pass) -> PassSpec:
    """The spec that makes an equal pass; options that have their default value are left out.

    Raises:
        SpecError: an option holds a value that has no text: None or an empty tuple, where the
            default is another.
    """
    options = []
    for key, (_, field) in option_fields(type(pass_)).items():
        value = getattr(pass_, key)
        if not _is_required(field):
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            if value == default:
                continue
        if value is None or value == ():
            raise SpecError(
                f"option '{key}' of pass '{pass_.name}': {value!r} cannot be written in a spec"
            )
        options.append((key, value if isinstance(value, tuple) else (value,)))
    return PassSpec(pass_.name, tuple(options))


def _scalar(annotation: Any, value: Value, place: TextPosition, key: str) -> Any:
    if get_origin(annotation) is Literal:
        for choice in get_args(annotation):
            if type(choice) is type(value) and choice == value:
                return choice
    elif annotation is float and type(value) is int:
        return float(value)
    elif annotation in _SCALARS:
        if type(value) is annotation:
            return value
    else:
        # The author of the pass meets this, not its user: the grammar has no values of such a type.
        raise place.error(f"option '{key}' has type {annotation}, which a spec cannot express")
    hint = f'Write "{_spell(value)}", with the quotes.' if annotation is str else ""
    raise place.error(
        f"option '{key}' expects {describe(annotation)}, got {_spell(value)}", hint=hint
    )


def _without_none(annotation: Any) -> Any:
    """T of `T | None`; other annotations as they are."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    rest = [part for part in get_args(annotation) if part is not types.NoneType]
    return rest[0] if len(rest) == 1 else annotation


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _spell(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
