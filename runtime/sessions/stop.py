"""Stop a run in progress."""

import threading
from collections.abc import Callable


class Stop:
    """Stops a run from another thread, once."""

    def __init__(self) -> None:
        self.reason = ""
        """Why it was stopped; empty: it was not."""
        self._act: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def set_act(self, act: Callable[[], None] | None) -> None:
        """Say how the run is stopped; None: it is over."""
        with self._lock:
            self._act = act
            if act is not None and self.reason:
                act()

    def stop(self, reason: str) -> None:
        """Stop it, now or as soon as it begins."""
        with self._lock:
            self.reason = self.reason or reason
            if self._act is not None:
                self._act()
