"""Our passes, third parties' passes, and names that clash."""

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest

from enginecast import plugins
from enginecast.errors import SpecError
from enginecast.passes import registry
from enginecast.passes.registry import PASSES, known_passes, pass_class

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Pretend that another package is installed with these entry points (name -> value)."""

    def pretend(**passes: str) -> None:
        found = [
            EntryPoint(name.replace("_", "-"), value, registry.REGISTRY.group)
            for name, value in passes.items()
        ]
        monkeypatch.setattr(plugins, "entry_points", lambda group: found)

    return pretend


def test_names_are_the_file_names_with_dashes() -> None:
    for name, where in PASSES.items():
        module, _, cls = where.partition(":")
        assert module.rpartition(".")[2] == name.replace("-", "_")
        assert cls == "".join(part.capitalize() for part in name.split("-"))


LOADS_ALONE = """
import os, sys, torch
for where in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            __import__(where)
        except BaseException as error:
            print(where, error)
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(child, 0)
"""


def test_every_pass_loads_alone() -> None:
    """Operators of our own exist once their module was imported: by each that needs them."""
    modules = [where.partition(":")[0] for where in PASSES.values()]
    command = [sys.executable, "-c", LOADS_ALONE, *modules]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_every_pass_that_is_listed_loads() -> None:
    for name in PASSES:
        cls = pass_class(name)
        assert cls.name == name
        assert cls.__doc__, f"{name} has no docstring to list"


def test_every_pass_that_another_must_follow_exists() -> None:
    for name in PASSES:
        assert pass_class(name).after <= PASSES.keys(), name


def test_unknown_pass_names_close_ones_and_all() -> None:
    with pytest.raises(SpecError) as caught:
        pass_class("fuse-rmsnorm")
    assert caught.value.message == "unknown pass 'fuse-rmsnorm'"
    assert "Did you mean 'fuse-rms-norm'" in caught.value.hint
    assert all(name in caught.value.hint for name in PASSES)


def test_third_party_pass_is_found(install: Install) -> None:
    install(my_pass="test_registry_plugin:MyPass")
    assert known_passes()["my-pass"] == "test_registry_plugin:MyPass"
    assert list(known_passes())[: len(PASSES)] == list(PASSES)


@pytest.mark.parametrize("name", ["canonicalize", "fuse_gelu"])
def test_third_party_pass_may_not_take_our_name(install: Install, name: str) -> None:
    install(**{name: "other.package:Theirs"})
    with pytest.raises(SpecError, match=r"other\.package:Theirs") as caught:
        known_passes()
    assert PASSES[name.replace("_", "-")] in caught.value.message


def test_two_third_parties_may_not_share_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [EntryPoint("x", value, registry.REGISTRY.group) for value in ("b:X", "a:X")]
    monkeypatch.setattr(plugins, "entry_points", lambda group: entries)
    with pytest.raises(SpecError, match="two passes are called 'x': a:X and b:X"):
        known_passes()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("no_such_module_here:X", "cannot be loaded"),
        ("enginecast.errors:NoSuchClass", "cannot be loaded"),
        ("enginecast.errors:SpecError", "is not a subclass"),
        ("enginecast.passes.ir.base:Pass", "calls itself"),
    ],
)
def test_entry_point_that_is_not_a_pass(install: Install, where: str, message: str) -> None:
    install(broken=where)
    with pytest.raises(SpecError, match=message):
        pass_class("broken")
