"""The user's options for AOTInductor, beyond precision and device."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from enginecast.option_fields import Option


@dataclass(frozen=True)
class AOTInductorOptions:
    """Options of one compilation."""

    HEADING: ClassVar[str] = "AOTInductor"

    regional: Annotated[bool, Option("Compile equal blocks once.")] = False
    """Regions that are equal are compiled once, and run with the weights of each."""
