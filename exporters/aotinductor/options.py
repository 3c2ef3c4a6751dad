"""The user's options for AOTInductor, beyond precision and device."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AOTInductorOptions:
    """Options of one compilation."""

    regional: bool = False
    """Compile regions that are equal once, and run them with the weights of each."""
