"""Which torch, torch_tensorrt and TensorRT go together."""

from types import ModuleType

import pytest

from enginecast.errors import MissingError
from enginecast.runtime.sessions.tensorrt import versions as tensorrt_versions
from enginecast.runtime.sessions.tensorrt.versions import (
    called_names,
    check_pair,
    import_torch_tensorrt,
    known_pairs,
    lacking_names,
)

GOES = "torch {} goes with {} {}, and {} {} is here"


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (("2.11.0+cu130", "2.11.0", "10.15.1.29"), None),
        (("2.12.1", "2.12.0", "10.16.1.11"), None),
        (("2.13.0+cu132", "2.13.0", "11.0.0.114"), None),
        (("2.13.0", None, None), None),
        (
            ("2.11.0", "2.11.0", "11.0.0.114"),
            GOES.format("2.11.0", "TensorRT", "10.15", "TensorRT", "11.0.0.114"),
        ),
        (
            ("2.12.0", "2.13.0", "10.16.1"),
            GOES.format("2.12.0", "torch_tensorrt", "2.12", "torch_tensorrt", "2.13.0"),
        ),
        (
            ("2.14.0", "2.14.0", "11.1.0"),
            "torch 2.14.0: expected one that a torch_tensorrt is known for: 2.11, 2.12, 2.13",
        ),
    ],
)
def test_what_goes_together(found: tuple[str, str | None, str | None], sentence: str) -> None:
    assert check_pair(*found, cuda="13.0") == ([sentence] if sentence else [])


def test_every_row_has_a_source_and_names() -> None:
    for pair in known_pairs():
        assert f"torch_tensorrt {pair.torch_tensorrt}." in pair.source
        assert f"tensorrt-cu{pair.cuda}" in pair.source
        assert called_names(pair.torch_tensorrt)
    versions = [pair.torch for pair in known_pairs()]
    assert versions == sorted(set(versions))


def test_a_wrong_pair_is_found_before_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_versions, "installed", lambda name: {name: "2.13.0"})
    monkeypatch.setattr(tensorrt_versions, "import_module", _never)
    with pytest.raises(
        MissingError, match=r"torch 2\.11\.0 goes with torch_tensorrt 2\.11"
    ) as stop:
        import_torch_tensorrt("--target-option route=torch", torch="2.11.0", tensorrt="10.15.1.29")
    assert "torch 2.12 with torch_tensorrt 2.12 and TensorRT 10.16" in stop.value.hint
    assert stop.value.exit_code == 3


def test_the_names_against_the_real_one() -> None:
    found = pytest.importorskip("torch_tensorrt", reason="torch_tensorrt is not installed")
    assert called_names(found.__version__), f"{found.__version__} is not in the table"
    assert lacking_names(found.__version__) == []


def _never(name: str) -> ModuleType:
    raise AssertionError(f"{name} was imported")
