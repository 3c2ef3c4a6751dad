"""No folder grows beyond its line in budget.toml."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATED = {"build", "demo", "dist", "site"}
BUDGET: dict[str, int] = tomllib.loads((ROOT / "budget.toml").read_text(encoding="utf-8"))["lines"]


def lines(folder: str) -> int:
    """Lines of Python in a folder; rglob does not follow the links in enginecast/."""
    files = (ROOT / folder).rglob("*.py")
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


@pytest.mark.parametrize("folder", BUDGET)
def test_a_folder_keeps_its_budget(folder: str) -> None:
    assert lines(folder) <= BUDGET[folder], (
        f"{folder} is over its budget: delete something, or raise its line of budget.toml in a"
        " commit whose message says what the lines are worth"
    )


def test_every_folder_with_code_has_a_budget() -> None:
    folders = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("*/**/*.py")}
    assert {name for name in folders if name[0] != "." and name not in GENERATED} == set(BUDGET)
