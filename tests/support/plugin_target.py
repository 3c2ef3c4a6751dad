"""examples/plugin_target, as if it were installed."""

import shutil
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin_target"
PROJECT = tomllib.loads((EXAMPLE / "pyproject.toml").read_text("utf-8"))["project"]
Install = Callable[[Mapping[str, Mapping[str, str]]], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a distribution with these entry points (group -> name -> value) beside the others."""

    def installed(groups: Mapping[str, Mapping[str, str]]) -> None:
        info = tmp_path / "site" / "enginecast_pt2-0.1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Name: enginecast-pt2\nVersion: 0.1.0\n", encoding="utf-8")
        lines = [
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
            for group, entries in groups.items()
        ]
        (info / "entry_points.txt").write_text("".join(lines), encoding="utf-8")
        monkeypatch.syspath_prepend(str(info.parent))

    return installed


@pytest.fixture
def plugin(install: Install, tmp_path: Path) -> None:
    install(PROJECT["entry-points"])
    shutil.copytree(EXAMPLE / "enginecast_pt2", tmp_path / "site" / "enginecast_pt2")
