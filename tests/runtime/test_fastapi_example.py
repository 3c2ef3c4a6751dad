"""examples/fastapi_server under load: a real uvicorn on this machine, and real clients."""

import asyncio
import base64
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bundles
import httpx
import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from enginecast.runtime.bundle.manifest import Output, Padding
from enginecast.runtime.bundle.staging import stage
from enginecast.runtime.load import load

APP = Path(__file__).parents[2] / "examples" / "fastapi_server" / "app.py"
CLIENTS = 64
WORDS = ("red", "green", "blue", "fox")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny engine, whose rows of other lengths may run together."""
    padding = Padding(mask="attention_mask", side="any", outputs=("hidden",))
    folder = tmp_path_factory.mktemp("served") / "tiny.bundle"
    return bundles.make_bundle(folder, bundles.manifest(padding=padding))


@contextmanager
def served(bundle: Path, *options: object) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """The address of a server, and its process, which is ended at last."""
    command = [sys.executable, "-W", "error", str(APP), str(bundle), "--port", "0"]
    process = subprocess.Popen(
        [*command, *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:"), process.communicate()
        yield line.removeprefix("listening on ").partition(",")[0], process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def address(bundle: Path) -> Iterator[str]:
    with served(bundle, "--max-delay", 0.02, "--max-texts", 6) as (found, _):
        yield found


def text_of(client: int) -> str:
    """Of one to three words, which tell the clients apart as well as four words can."""
    return " ".join(WORDS[client // 4**place % 4] for place in range(1 + client % 3))


def at_once(
    address: str, ask: Callable[[httpx.AsyncClient, int], Any], count: int = CLIENTS
) -> list[httpx.Response]:
    """What clients get that ask at the same time."""

    async def all_of_them() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(base_url=address, limits=limits, timeout=60) as client:
            return list(await asyncio.gather(*(ask(client, one) for one in range(count))))

    return asyncio.run(all_of_them())


def test_under_load_every_client_gets_its_own_answer(address: str, bundle: Path) -> None:
    """Wrong requests among them get errors, and nobody else does."""
    wrong: dict[int, tuple[Any, str]] = {
        0: ({"texts": []}, "texts: expected 1..6, got 0"),
        1: ({"texts": ["red"] * 7}, "texts: expected 1..6, got 7"),
        2: ({"texts": [3]}, "body.texts.0: Input should be a valid string"),
        3: ({"text": "red"}, "body.texts: Field required"),
    }

    def ask(client: httpx.AsyncClient, number: int) -> Any:
        body: Any = {"texts": [text_of(number), text_of(number + 1)]}
        if number % 8 == 0:
            body = wrong[number // 8 % 4][0]
        return client.post("/embed", json=body)

    found = at_once(address, ask)
    with load(bundle) as engine:
        for number, response in enumerate(found):
            if number % 8 == 0:
                assert response.status_code == 422
                assert response.json()["message"] == wrong[number // 8 % 4][1]
                continue
            assert response.status_code == 200, response.text
            answer = response.json()
            wanted = engine.encode([text_of(number), text_of(number + 1)])
            assert answer["truncated"] == 0
            assert set(answer["outputs"]) == set(wanted)
            for name, value in wanted.items():
                np.testing.assert_array_equal(
                    np.array(answer["outputs"][name], dtype=value.dtype), value
                )
    health = httpx.get(f"{address}/health").json()
    assert health["verdict"] == "verified"
    assert health["joins_requests"] is True  # they did run together
    assert (health["status"], health["requests_under_way"]) == ("ok", 0)


EMBEDDED: dict[str, Any] = {"input": ["red", "green blue fox"], "model": "any"}


def sentence_bundle(folder: Path) -> Path:
    """The tiny engine with the sum of its rows as a second output."""
    content = bundles.manifest()
    embedding = Output(name="sentence_embedding", dtype="float32", shape=("batch", bundles.WIDTH))
    with stage(folder) as staging:
        path = bundles.write_engine(staging.folder)
        bundles.write_tokenizer(staging.folder)
        model = onnx.load(path, load_external_data=False)
        model.graph.initializer.append(helper.make_tensor("one", TensorProto.INT64, [1], [1]))
        made = helper.make_node("ReduceSum", ["hidden", "one"], [embedding.name], keepdims=0)
        model.graph.node.append(made)
        shape = ("batch", bundles.WIDTH)
        model.graph.output.append(
            helper.make_tensor_value_info(embedding.name, TensorProto.FLOAT, shape)
        )
        onnx.save(model, path)
        return staging.publish(
            msgspec.structs.replace(content, outputs=(*content.outputs, embedding))
        )


def test_the_embedding_of_a_text_is_what_is_answered(bundle: Path, tmp_path: Path) -> None:
    """In OpenAI's shape; the mean of tokens only where somebody asked for it, and of no padding."""
    sentences = sentence_bundle(tmp_path / "sentences.bundle")
    with load(sentences) as engine, served(sentences) as (address, _):
        wanted = engine.encode(EMBEDDED["input"])["sentence_embedding"]
        found = httpx.post(f"{address}/v1/embeddings", json=EMBEDDED).json()
        assert {name: found[name] for name in ("object", "model", "usage")} == {
            "object": "list",
            "model": "tiny",
            "usage": {"prompt_tokens": 6, "total_tokens": 6},
        }
        assert [(each["object"], each["index"]) for each in found["data"]] == [
            ("embedding", 0),
            ("embedding", 1),
        ]
        np.testing.assert_array_equal([each["embedding"] for each in found["data"]], wanted)
        asked = {**EMBEDDED, "input": "red", "encoding_format": "base64"}
        (one,) = httpx.post(f"{address}/v1/embeddings", json=asked).json()["data"]
        packed = np.frombuffer(base64.b64decode(one["embedding"]), "<f4")
        np.testing.assert_array_equal(packed, engine.encode("red")["sentence_embedding"][0])
        asked = {"texts": ["red"]}
        assert [*httpx.post(f"{address}/embed", json=asked).json()["outputs"]] == [
            "sentence_embedding"
        ]
        asked["outputs"] = ["hidden"]
        assert [*httpx.post(f"{address}/embed", json=asked).json()["outputs"]] == ["hidden"]
        for path, body, message in [
            ("embed", {**asked, "outputs": ["none"]}, "outputs: 'none' is unknown"),
            ("v1/embeddings", {**EMBEDDED, "dimensions": 9}, "dimensions: the engine gives 3"),
            ("v1/embeddings", {"input": [[1, 2]]}, "body.input"),
        ]:
            refused = httpx.post(f"{address}/{path}", json=body)
            assert refused.status_code == 422
            assert refused.json()["message"].startswith(message)
    with load(bundle) as engine, served(bundle, "--pool", "mean") as (address, _):
        found = httpx.post(f"{address}/v1/embeddings", json=EMBEDDED).json()
        alone = [engine.encode(text) for text in EMBEDDED["input"]]
        means = [each["hidden"][0][each["attention_mask"][0] > 0].mean(0) for each in alone]
        np.testing.assert_allclose([each["embedding"] for each in found["data"]], means, rtol=1e-6)
    with served(bundle) as (address, _):
        refused = httpx.post(f"{address}/v1/embeddings", json=EMBEDDED)
        assert (refused.status_code, refused.json()["error"]) == (422, "NoEmbedding")
        assert "--pool mean" in refused.json()["message"]


def test_bad_bodies(address: str) -> None:
    with httpx.Client(base_url=address) as client:
        assert client.post("/embed", content=b"{").status_code == 422
        large = client.post("/embed", json={"texts": ["x" * (1 << 20)]})
        assert (large.status_code, large.json()["error"]) == (413, "InputError")
        chunked = client.post("/embed", content=iter([b'{"texts": ["red"]}']))
        assert chunked.status_code == 411
        for found, status in [
            (client.get("/embed"), 405),
            (client.get("/nothing"), 404),
            (client.post("/embed", content=b'{"texts": ["\xff"]}'), None),
            (client.post("/embed", content=b'{"texts": ["\\ud800"]}'), 422),
            (client.post("/embed", content=b"[" * 100_000), None),
        ]:
            assert found.status_code == (status or found.status_code)
            assert found.is_client_error  # which one, releases of FastAPI differ on
            assert set(found.json()) == {"error", "message"}
        assert client.post("/embed", json={"texts": ["red"]}).status_code == 200


def post_red(client: httpx.AsyncClient, _: int) -> Any:
    return client.post("/embed", json={"texts": ["red"]})


def test_too_many_and_too_slow(bundle: Path) -> None:
    options = ("--max-requests", 2, "--max-delay", 0.3)
    with served(bundle, *options) as (address, _):
        found = at_once(address, post_red, 8)
        codes = sorted(response.status_code for response in found)
        assert codes == [200, 200, *[503] * 6]
        refused = next(response for response in found if response.status_code == 503)
        assert refused.json()["error"] == "Overloaded"
        assert refused.headers["retry-after"] == "1"
        assert at_once(address, post_red, 2)[0].status_code == 200  # it goes on
    with served(bundle, "--timeout", 0.05, "--max-delay", 0.5) as (address, _):
        (late,) = at_once(address, post_red, 1)
        assert (late.status_code, late.json()["error"]) == (504, "StoppedError")


def test_a_server_that_ends_answers_first(bundle: Path) -> None:
    with served(bundle, "--max-delay", 0.8, "--max-batch", 4) as (address, process):

        async def ask(client: httpx.AsyncClient, number: int) -> httpx.Response | None:
            if number == 3:  # the others wait for a fourth
                await asyncio.sleep(0.3)
                process.send_signal(signal.SIGTERM)
                return None
            return await client.post("/embed", json={"texts": [text_of(number)]})

        answers = at_once(address, ask, 4)[:3]
        assert [response.status_code for response in answers] == [200] * 3
        assert process.wait(20) in (0, -signal.SIGTERM)
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/health")


@pytest.mark.slow
def test_a_port_in_use_is_one_message(bundle: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = run(bundle, port)
    assert (done.returncode, done.stdout) == (2, "")
    wanted = f"error: --port {port}: cannot listen on 127.0.0.1: Address already in use\n"
    assert done.stderr == wanted
    done = run(tmp_path / "none.bundle", 0)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def run(bundle: Path, port: int) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(APP), str(bundle), "--port", str(port)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
