"""The state of a module in Python, which no branch may change."""

from collections.abc import Mapping
from typing import Any

from enginecast.capture.structured_sites import Site, running_module


def state_now() -> dict[tuple[str, str], Any]:
    """Every attribute of every module, and the length of every container among them."""
    module = running_module()
    state: dict[tuple[str, str], Any] = {}
    for path, owner in module.named_modules() if module is not None else ():
        for store in (vars(owner), owner._buffers, owner._parameters):
            for name, value in store.items():
                size = len(value) if isinstance(value, list | dict | set) else 0
                state[path, str(name)] = (value, size)
    return state


def refuse_changes(site: Site, before: Mapping[tuple[str, str], Any]) -> None:
    after = state_now()
    for key in {**before, **after}:
        old, new = before.get(key), after.get(key)
        if old is None or new is None or old[0] is not new[0] or old[1] != new[1]:
            path, name = key
            _put_back(path, name, old)
            raise site.refuse(f"a branch changes the state of the module: {_dotted(path, name)}")


def _put_back(path: str, name: str, old: Any) -> None:
    module = running_module()
    assert module is not None
    owner = module.get_submodule(path)
    for store in (owner._buffers, owner._parameters, vars(owner)):
        if name in store:
            if old is None:
                store.pop(name)
            else:
                store[name] = old[0]
            return


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
