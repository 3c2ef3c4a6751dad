"""The audit of the locked packages."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LOCK = """\
msgspec==0.22.0 \\
    --hash=sha256:{0}
numpy==2.4.6 \\
    --hash=sha256:{0}
"""
FLAW = {
    "id": "PYSEC-0000-1",
    "summary": "reads beyond its end",
    "affected": [
        {
            "package": {"name": "numpy", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "9.9"}]}],
        }
    ],
}


@contextmanager
def database(status: int = 200, *, stops_after: int = 1000) -> Iterator[tuple[str, list[str]]]:
    """A database that knows of one flaw, and the packages that it was asked about."""
    asked: list[str] = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name that http.server calls
            question: dict[str, Any] = json.loads(
                self.rfile.read(int(self.headers["Content-Length"]))
            )
            asked.append(question["package"]["name"])
            if len(asked) > stops_after:
                self.close_connection = True
                return
            found = {"vulns": [FLAW]} if asked[-1] == "numpy" else {}
            body = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/query", asked
        finally:
            server.shutdown()


def audit(folder: Path, url: str, accepted: str = "") -> tuple[int, str]:
    (folder / "requirements.lock").write_text(LOCK.format("0" * 64), "utf-8")
    (folder / "accepted.txt").write_text(accepted, "utf-8")
    command = [sys.executable, str(ROOT / "release" / "audit.py"), "--url", url]
    command += ["--lock", str(folder / "requirements.lock")]
    command += ["--accepted", str(folder / "accepted.txt")]
    run = subprocess.run(command, capture_output=True, text=True)
    return run.returncode, run.stdout + run.stderr


@pytest.mark.slow
def test_a_vulnerability_fails_the_audit_unless_it_was_accepted(tmp_path: Path) -> None:
    with database() as (url, asked):
        code, text = audit(tmp_path, url)
        assert code == 1, text
        assert "2 of 2 packages asked about, 1 vulnerabilities" in text
        assert "numpy 2.4.6: PYSEC-0000-1 (fixed in 9.9) reads beyond its end" in text
        assert set(asked) == {"msgspec", "numpy"}
        code, text = audit(tmp_path, url, "PYSEC-0000-1 arrays are never read there\n")
        assert (code, "0 vulnerabilities, 1 accepted" in text) == (0, True), text
    code, text = audit(tmp_path, url, "PYSEC-0000-1\n")
    assert (code, "expected a reason" in text) == (1, True), text
