"""A build log alone tells how a bundle was made."""

import logging
import re
import warnings

from exports import Exports

from enginecast.compiler.steps import Steps


def test_a_log_holds_what_a_report_of_a_defect_needs(exports: Exports) -> None:
    bundle = exports("plain").bundle
    assert bundle is not None
    text = (bundle.root / "build.log").read_text(encoding="utf-8")
    titles = re.findall(r"^== (\w+)$", text, re.MULTILINE)
    assert titles == [
        *("request", "machine", "model", "attempts", "capture", "inputs", "steps", "passes"),
        *("verdict", "program"),
    ]
    for needed in (
        "pipeline: canonicalize",
        "fallback: torchscript",
        "torch 2.",
        f"weights: {bundle.manifest.model.fingerprint['weights']}",
        "a program of torch.export: taken",
        "export taken",
        "case 'smallest': ",
        "lowered: ",
        "fuse-rms-norm: ",
        '"outcome": "verified"',
        "= aten.matmul.default(",
    ):
        assert needed in text, needed
    assert re.search(r"^capture: \d+\.\d\d s$", text, re.MULTILINE)


def test_warnings_of_libraries_are_in_the_log() -> None:
    steps = Steps()
    shown: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: shown.append(str(message))
        with steps.listening():
            warnings.warn("deprecated", UserWarning, stacklevel=1)
            logging.getLogger("torch.test").warning("slow %s", "kernel")
            logging.getLogger("torch.test").info("nothing")
        warnings.warn("after", UserWarning, stacklevel=1)
    assert steps.lines == ["warning: deprecated", "warning of torch.test: slow kernel"]
    assert shown == ["deprecated", "after"]
