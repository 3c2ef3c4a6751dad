"""Keep libraries' output off the user's terminal: stdout is for results."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from transformers.utils import logging as transformers_logging

logger = logging.getLogger(__name__)


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Hold back what torch and the model print while it is traced; it goes to our debug log.

    torch dumps the partial graph when it refuses a model, on stderr and in its own log.
    """
    printed = io.StringIO()
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(printed), redirect_stderr(printed):
            # A strict export sees how we collect notes on outputs.
            warnings.filterwarnings("ignore", "While compiling, we found certain side effects")
            yield
    finally:
        logging.disable(disabled)
        logger.debug("printed during torch.export:\n%s", printed.getvalue())


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switch off progress bars and load reports; what matters in them we check and raise."""
    verbosity = transformers_logging.get_verbosity()
    has_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bar:
            transformers_logging.enable_progress_bar()
