"""Our passes, third parties' passes, and names that clash."""

import re
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from exports import cast

from enginecast import plugins
from enginecast.errors import DefectError, PassDefectError
from enginecast.passes import registry
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.registry import PASSES, build, known_passes, pass_class

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


def test_every_pass_that_is_listed_loads() -> None:
    for name in PASSES:
        cls = pass_class(name)
        assert cls.name == name
        assert cls.__doc__, f"{name} has no docstring to list"


def test_third_party_pass_is_found(install: Install) -> None:
    install(my_pass="test_registry_plugin:MyPass")
    assert known_passes()["my-pass"] == "test_registry_plugin:MyPass"
    assert list(known_passes())[: len(PASSES)] == list(PASSES)


BROKEN = [
    ("no_such_module_here:X", "cannot be loaded"),
    ("enginecast.errors:NoSuchClass", "cannot be loaded"),
    ("enginecast.errors:SpecError", "is not a subclass"),
    ("enginecast.passes.ir.base:Pass", "calls itself"),
]


@pytest.mark.parametrize(("where", "message"), BROKEN)
def test_entry_point_that_is_not_a_pass(install: Install, where: str, message: str) -> None:
    install(broken=where)
    with pytest.raises(DefectError, match=message) as caught:
        pass_class("broken")
    assert caught.value.exit_code == 70


@pytest.mark.parametrize(("where", "message"), BROKEN)
def test_a_broken_entry_point_breaks_nothing_else(
    install: Install, where: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    install(broken=where)
    done = cast(capsys, "passes", "--json")
    assert done.code == 0
    [broken] = done.json["broken"]
    assert broken["name"] == "broken"
    assert message in broken["reason"]
    assert len(done.json["passes"]) == len(PASSES)
    assert [pass_.name for pass_ in build("canonicalize")] == ["canonicalize"]


CRASHING = '''
from dataclasses import dataclass
from typing import ClassVar

from enginecast.passes.ir.base import Pass


@dataclass(frozen=True)
class Crashing(Pass):
    """Raises."""

    name: ClassVar[str] = "crashing"

    def run(self, program, context):
        return [{}["missing"]]
'''


UNUSUAL = {
    "import sys; sys.exit(0)": "SystemExit: 0",
    "import asyncio; raise asyncio.CancelledError('x')": "CancelledError: x",
    "class E(Exception):\n    def __str__(self): return 1 / 0\nraise E": "E, whose message cannot",
    "def f(): f()\nf()": "RecursionError",
}


@pytest.mark.parametrize(("code", "said"), UNUSUAL.items())
def test_a_package_may_end_in_any_way(
    install: Install,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: str,
    said: str,
) -> None:
    """sys.exit(0) left with exit code 0, and nothing was exported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"unusual_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    install(broken=f"{name}:X")
    listed = cast(capsys, "passes", "--json")
    assert listed.code == 0
    assert said in listed.json["broken"][0]["reason"]
    body = "\n".join(f"        {line}" for line in code.splitlines())
    (tmp_path / f"{name}_run.py").write_text(
        CRASHING.replace('        return [{}["missing"]]', body), encoding="utf-8"
    )
    install(crashing=f"{name}_run:Crashing")
    crashing = pass_class("crashing")
    program = torch.export.export(torch.nn.Linear(4, 4), (torch.randn(2, 4),))
    with pytest.raises(PassDefectError, match=re.escape(said)):
        run_pipeline([crashing()], program, PassContext())


def test_an_exception_of_a_plugin_is_not_bad_input(
    install: Install,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "crashing_pass.py").write_text(CRASHING, encoding="utf-8")
    (tmp_path / "crashed_model.py").write_text(
        "import torch\n\n\ndef make():\n"
        "    return torch.nn.Linear(4, 4), {'input': torch.randn(2, 4)}\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    install(crashing="crashing_pass:Crashing")
    done = cast(capsys, "opt", "crashed_model:make", "--pipeline", "crashing", "--json")
    assert done.code == 70
    assert f"pass 'crashing': KeyError: 'missing' at {tmp_path / 'crashing_pass.py'}:15" in done.err
    assert 'return [{}["missing"]]' in done.err
    assert "not of enginecast" in done.err
    assert done.json["error"] == "PassDefectError"
    assert (done.json["line"], done.json["package"]) == (15, "a package without a name")
