"""The user's options for AOTInductor, beyond precision and device."""

from dataclasses import dataclass
from typing import Annotated

from enginecast.option_fields import Option


@dataclass(frozen=True)
class AOTInductorOptions:
    """Options of one compilation."""

    regional: Annotated[bool, Option("Compile equal blocks once.")] = False
    """Regions that are equal are compiled once, and run with the weights of each."""
