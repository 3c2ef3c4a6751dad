"""The options of AOTInductor, as the command line has them."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from enginecast.exporters.aotinductor.options import AOTInductorOptions


@dataclass(frozen=True)
class AOTInductorFlags:
    """How AOTInductor compiles."""

    PANEL: ClassVar[str] = "AOTInductor"

    regional: Annotated[
        bool,
        typer.Option("--regional", help="Compile equal blocks once."),
    ] = False

    def options(self) -> AOTInductorOptions | None:
        """What was given on the command line; None: nothing was."""
        return AOTInductorOptions(regional=True) if self.regional else None
