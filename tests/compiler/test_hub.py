"""Models from the Hugging Face hub, of which a small stand-in listens on 127.0.0.1."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from exports import Exports
from models import add_tokenizer, tiny_bert

from enginecast.capture.sources.huggingface.hub import is_hub_name
from enginecast.errors import BundleError
from enginecast.runtime.bundle.reader import open_bundle
from enginecast.runtime.load import load

SHA = "0123456789abcdef0123456789abcdef01234567"
NAME = "maker/tiny-bert"


class Hub(ThreadingHTTPServer):
    """Serves one repository as the hub does."""

    files: dict[str, bytes]
    asked: list[str]


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, body: bool = True) -> None:
        path = self.path.partition("?")[0]
        files = self.server.files
        if path.startswith(f"/api/models/{NAME}/tree/"):
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
                for name, data in files.items()
            ]
            self._send(200, json.dumps(listed).encode(), body)
        elif path.startswith(f"/api/models/{NAME}"):
            siblings = [{"rfilename": name} for name in files]
            about = {"id": NAME, "sha": SHA, "siblings": siblings, "private": False}
            self._send(200, json.dumps(about).encode(), body)
        elif path.startswith(f"/{NAME}/resolve/") and (name := path.split("/", 5)[5]) in files:
            self.server.asked += [name] if body else []
            self._send(200, files[name], body, ETag=f'"{_oid(files[name])}"')
        else:
            self._send(404, b"{}", body, **{"X-Error-Code": "RepoNotFound"})

    def _send(self, code: int, data: bytes, body: bool, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"X-Repo-Commit": SHA, "Content-Length": len(data), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Keep the log to itself."""


def _oid(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "files"
    tiny_bert(folder)
    add_tokenizer(folder)
    with Hub(("127.0.0.1", 0), Answers) as found:
        found.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        found.files |= {"modeling.py": b"raise SystemExit", "pytorch_model.bin": b"pickle"}
        found.asked = []
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def run(tmp_path: Path, endpoint: str, *words: object) -> "subprocess.CompletedProcess[str]":
    """Run a command with its own cache of the hub, which is read when the library is imported."""
    return subprocess.run(
        [sys.executable, "-m", "enginecast", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | hub_settings(tmp_path, endpoint),
    )


def hub_settings(tmp_path: Path, endpoint: str) -> dict[str, str]:
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    return settings | {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}


@pytest.mark.slow
def test_a_model_is_downloaded_and_exported(hub: Hub, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    bundle = tmp_path / "bundle"
    done = run(tmp_path, endpoint, "export", NAME, "-o", bundle, "--download", "--no-speed")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"loading torch\ndownloading {NAME}\n")
    assert "verified: " in done.stdout
    assert open_bundle(bundle).manifest.model.name == "tiny-bert"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(hub.asked)
    assert not {"modeling.py", "pytorch_model.bin"} & set(hub.asked)


LOAD = """
import sys, numpy, enginecast
with enginecast.load(sys.argv[1], download=True) as engine:
    print(engine.folder, engine.verdict.outcome)
    engine.encode("a b")
sys.exit("torch" in sys.modules)
"""


def test_a_bundle_is_downloaded_on_request_alone(
    hub: Hub, exports: Exports, tmp_path: Path
) -> None:
    folder = exports("t5").folder
    hub.files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.files |= {"README.md": b"about it", "modeling.py": b"raise SystemExit"}
    settings = hub_settings(tmp_path, f"http://127.0.0.1:{hub.server_port}")
    command = [sys.executable, "-c", LOAD, f"{NAME}@main"]
    for offline in ("0", "1"):  # the second time from the cache
        env = os.environ | settings | {"HF_HUB_OFFLINE": offline}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{tmp_path / 'home/enginecast/maker--tiny-bert' / SHA} verified\n"
    assert sorted(hub.asked) == sorted(path.name for path in folder.iterdir())
    with pytest.raises(BundleError, match="it does not exist") as caught:
        load(NAME)
    assert "download=True" in caught.value.hint


@pytest.mark.slow
def test_a_hub_that_is_not_there_lacks(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as gone:
        endpoint = f"http://127.0.0.1:{gone.server_port}"
    done = run(tmp_path, endpoint, "opt", NAME, "--pipeline", "canonicalize", "--download")
    assert (done.returncode, done.stdout) == (3, "")
    assert f"error: {NAME}: {endpoint} cannot be reached: " in done.stderr
    assert (
        f"\nOn a machine that can reach it: hf download {NAME} --local-dir tiny-bert\n"
        in done.stderr
    )
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "model", ["./t5", "/models/t5", "t5", "a/b/c", "package.module:make", "a/b.pt2", "a/..", "-a/b"]
)
def test_what_is_not_a_name(model: str) -> None:
    assert not is_hub_name(model)
