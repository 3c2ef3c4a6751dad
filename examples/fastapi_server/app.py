"""Embeddings of texts over HTTP: FastAPI in front of an engine, with requests joined into batches.

    python examples/fastapi_server/app.py my.bundle --port 8000

POST /v1/embeddings {"input": ["a photo of a fox"]} is OpenAI's endpoint; POST /embed {"texts":
["a photo of a fox"], "outputs": ["last_hidden_state"]} gives outputs of the engine by name; GET
/health says what runs, and what its verdict is.  What is wrong with a request is 4xx, what is wrong
here is 5xx, both as {"error": ..., "message": ...}.  SIGTERM and Ctrl-C answer the requests that
are under way first.
"""

import argparse
import asyncio
import base64
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

import enginecast
from enginecast.errors import (
    BundleError,
    EnginecastError,
    InputError,
    StoppedError,
    UsageError,
)
from enginecast.runtime import Batcher
from enginecast.runtime.engine import Encoded, Engine


@dataclass(frozen=True)
class Limits:
    """What one request and all together may take.

    Args:
        texts: of a request.
        body: bytes of a request.
        requests: under way at once; more get 503.
        seconds: for an answer; slower ones get 504.
        delay: seconds that a request waits at most for others.
        batch: rows that run together; None: as many as the engine takes.
    """

    texts: int = 32
    body: int = 1 << 20
    requests: int = 256
    seconds: float = 10.0
    delay: float = 0.005
    batch: int | None = None


DIGITS = 18
"""Of a Content-Length that Python reads as a number."""


class RefusedError(Exception):
    """What is answered in place of outputs."""

    def __init__(self, status: int, error: str, message: str) -> None:
        super().__init__(message)
        self.status, self.error, self.message = status, error, message


class Texts(BaseModel):
    """The body of a request."""

    model_config = {"extra": "forbid"}

    texts: list[str]
    outputs: list[str] | None = None
    """None: the embedding of each text, where the engine gives one, or else all."""


class Embeddings(BaseModel):
    """The body of a request to OpenAI's endpoint."""

    model_config = {"extra": "forbid"}

    input: str | list[str]
    model: str = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str = ""


EMBEDDINGS = ("sentence_embedding", "text_embeds")
"""Outputs that are a text's embedding: of sentence-transformers, and of CLIP and its kin."""


@dataclass(frozen=True)
class Embedding:
    """How the outputs of an engine become an embedding of each text.

    Args:
        output: its name; empty: the engine gives none.
        is_pooled: whether it is the mean of the rows of a text's tokens, padding aside.
    """

    output: str
    is_pooled: bool = False

    @classmethod
    def of(cls, engine: Engine, output: str | None, pool: str | None) -> "Embedding":
        """What was asked for, or else what the engine has.

        Raises:
            UsageError: it has no such output, or of another shape.
        """
        kinds = {spec.name: len(spec.shape) for spec in engine.outputs}
        rank = 3 if pool else 2  # [texts, tokens, width], or [texts, width]
        fitting = [name for name, found in kinds.items() if found == rank]
        if pool and not any(spec.kind == "attention_mask" for spec in engine.inputs):
            raise UsageError(
                f"--pool {pool}: the engine takes no attention mask to leave out padding"
            )
        if output is None:
            known = fitting if pool else [name for name in EMBEDDINGS if name in fitting]
            if pool and len(fitting) != 1:
                given = ", ".join(fitting) or "none"
                raise UsageError(
                    f"--pool {pool}: expected one output with rows of tokens, got {given}",
                    hint="Choose one with --output.",
                )
            return cls(known[0] if known else "", bool(pool))
        if output not in fitting:
            shape = "[texts, tokens, width]" if pool else "[texts, width]"
            raise UsageError(
                f"--output {output}: expected an output {shape}: {', '.join(fitting) or 'none'}"
            )
        return cls(output, bool(pool))

    def require(self) -> None:
        """Refuse to embed texts where the engine does not.

        Raises:
            RefusedError: with what to choose.
        """
        if not self.output:
            message = (
                "the engine gives rows of tokens, and no embedding of a text: start the server with"
                " --pool mean, or with --output NAME of one that is [texts, width]"
            )
            raise RefusedError(422, "NoEmbedding", message)

    def __call__(self, found: Encoded) -> np.ndarray[Any, Any]:
        """One row for each text, float32."""
        values = np.asarray(found[self.output]).astype(np.float32)
        if not self.is_pooled:
            return values
        mask = np.asarray(found["attention_mask"])[..., None]
        # What is in the rows of padding is not a number in some models.
        summed = np.where(mask > 0, values, 0).sum(1, dtype=np.float64)
        return (summed / np.maximum(mask.sum(1), 1)).astype(np.float32)


class Service:
    """An engine, its batcher, and the threads in which requests wait."""

    def __init__(self, engine: Engine, limits: Limits, embedding: Embedding) -> None:
        self.engine, self._limits, self._embedding = engine, limits, embedding
        self.batcher = Batcher(
            engine, max_batch=limits.batch, max_delay=limits.delay, max_waiting=limits.requests
        )
        self._threads = ThreadPoolExecutor(limits.requests, thread_name_prefix="embed")
        self.under_way = 0

    async def embed(self, texts: list[str], answer: Callable[[Encoded], Any]) -> bytes:
        """What `answer` makes of the outputs, as JSON."""
        most = self._limits.texts
        if not 1 <= len(texts) <= most:
            raise RefusedError(422, "InputError", f"texts: expected 1..{most}, got {len(texts)}")
        if self.under_way >= self._limits.requests:
            message = f"{self.under_way} requests are under way, as many as may"
            raise RefusedError(503, "Overloaded", message)
        self.under_way += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._answer, texts, answer)
        finally:
            self.under_way -= 1

    def _answer(self, texts: list[str], answer: Callable[[Encoded], Any]) -> bytes:
        found = self.batcher.encode(texts, timeout=self._limits.seconds)
        return json.dumps(answer(found)).encode()

    def outputs(self, found: Encoded, wanted: list[str] | None) -> dict[str, Any]:
        """The answer of /embed."""
        if wanted is None:
            chosen = self._embedding.output if not self._embedding.is_pooled else ""
            wanted = [chosen] if chosen else [*found]
        if unknown := [name for name in wanted if name not in found]:
            message = f"outputs: {unknown[0]!r} is unknown, expected some of {', '.join(found)}"
            raise RefusedError(422, "InputError", message)
        outputs = {name: as_list(found[name]) for name in wanted}
        return {"outputs": outputs, "truncated": found.truncated}

    def embeddings(self, found: Encoded, body: Embeddings) -> dict[str, Any]:
        """The answer of OpenAI's endpoint."""
        rows = self._embedding(found)
        if body.dimensions not in (None, rows.shape[1]):
            message = f"dimensions: the engine gives {rows.shape[1]}, got {body.dimensions}"
            raise RefusedError(422, "InputError", message)

        def written(row: np.ndarray[Any, Any]) -> Any:
            if body.encoding_format == "float":
                return row.tolist()
            return base64.b64encode(row.astype("<f4").tobytes()).decode()

        tokens = int(np.asarray(found.get("attention_mask", 0)).sum())
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": place, "embedding": written(row)}
                for place, row in enumerate(rows)
            ],
            "model": self.engine.manifest.model.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def health(self) -> dict[str, Any]:
        """What runs, and whether it was verified."""
        engine, record = self.engine, self.engine.record
        return {
            "status": "ok",
            "model": engine.manifest.model.name,
            "backend": engine.backend,
            "precision": engine.manifest.asked_precision,
            "verdict": record.verdict.outcome,
            "requests_under_way": self.under_way,
            "joins_requests": self.batcher.joins,
        }

    def close(self) -> None:
        """Answer those who wait, and end the threads."""
        self._threads.shutdown()
        self.batcher.close()
        self.engine.close()


def as_list(value: Any) -> Any:
    """An output as JSON has it."""
    array = np.asarray(value)
    is_small_float = array.dtype.name in ("float16", "bfloat16")
    return (array.astype(np.float32) if is_small_float else array).tolist()


def make_app(engine: Engine, limits: Limits, embedding: Embedding) -> FastAPI:
    """The application of an engine, which it closes at its end."""
    service = Service(engine, limits, embedding)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(title="enginecast", lifespan=lifespan)

    @app.post("/embed")
    async def embed(body: Texts) -> Response:
        answer = partial(service.outputs, wanted=body.outputs)
        return Response(await service.embed(body.texts, answer), media_type="application/json")

    @app.post("/v1/embeddings")
    async def embeddings(body: Embeddings) -> Response:
        embedding.require()
        texts = [body.input] if isinstance(body.input, str) else body.input
        answer = partial(service.embeddings, body=body)
        return Response(await service.embed(texts, answer), media_type="application/json")

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return service.health()

    @app.middleware("http")
    async def bounded(request: Request, call_next: Any) -> Response:
        """Refuse large bodies before they are read."""
        length = request.headers.get("content-length")
        if request.method == "POST" and (length is None or not length.isdecimal()):
            return answer(411, "InputError", "expected a body with Content-Length")
        if length is not None and (len(length) > DIGITS or int(length) > limits.body):
            message = f"the body has {length[:DIGITS]} bytes, at most {limits.body} are read"
            return answer(413, "InputError", message)
        response: Response = await call_next(request)
        return response

    add_errors(app)
    return app


def add_errors(app: FastAPI) -> None:
    """Every error as one body; the hint of ours says what to do."""

    @app.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> Response:
        return answer(error.status, error.error, error.message)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        found = error.errors()[0]
        place = ".".join(str(part) for part in found["loc"])
        return answer(422, "InputError", f"{place}: {found['msg']}")

    @app.exception_handler(HTTPException)  # no such path or method, a body that is not JSON
    async def plain(_: Request, error: HTTPException) -> Response:
        return answer(error.status_code, "InputError", str(error.detail))

    @app.exception_handler(EnginecastError)
    async def ours(_: Request, error: EnginecastError) -> Response:
        return answer(status_of(error), type(error).__name__, error.message, error.hint)


def status_of(error: EnginecastError) -> int:
    """A wrong input is the client's, all else is not."""
    if isinstance(error, InputError):
        return 422
    return 504 if isinstance(error, StoppedError) else 500


def answer(status: int, error: str, message: str, hint: str = "") -> Response:
    content = {"error": error, "message": message} | ({"hint": hint} if hint else {})
    headers = {"Retry-After": "1"} if status == 503 else None
    return JSONResponse(content, status, headers)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Embeddings of texts over HTTP.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    key = "load only what this key's owner signed"
    parser.add_argument("--public-key", "--trust", dest="trust", type=Path, help=key)
    parser.add_argument("--output", metavar="NAME", help="the output that is a text's embedding")
    parser.add_argument(
        "--pool", choices=("mean",), help="embed a text as the mean of its tokens' rows"
    )
    parser.add_argument("--require", choices=("verified", "verified-by-emulation"))
    defaults = Limits()
    parser.add_argument("--max-texts", type=int, default=defaults.texts)
    parser.add_argument("--max-body", type=int, default=defaults.body, help="bytes")
    parser.add_argument("--max-requests", type=int, default=defaults.requests)
    parser.add_argument("--timeout", type=float, default=defaults.seconds, help="seconds")
    parser.add_argument("--max-delay", type=float, default=defaults.delay, help="seconds")
    parser.add_argument("--max-batch", type=int)
    return parser.parse_args()


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens; before the engine is loaded, which may take long."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(1024)
    except (OSError, OverflowError) as error:
        listening.close()
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"--port {port}: cannot listen on {host}: {why}") from error
    return listening


def serve(given: argparse.Namespace) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    limits = Limits(
        given.max_texts,
        given.max_body,
        given.max_requests,
        given.timeout,
        given.max_delay,
        given.max_batch,
    )
    with bound(given.host, given.port) as listening:
        engine = enginecast.load(
            given.bundle, device=given.device, public_key=given.trust, require=given.require
        )
        if engine.manifest.text is None:
            raise BundleError(f"{given.bundle}: expected a bundle of a text model")
        app = make_app(engine, limits, Embedding.of(engine, given.output, given.pool))
        host, port = listening.getsockname()[:2]
        print(f"listening on http://{host}:{port}, {engine!r}", flush=True)
        config = uvicorn.Config(
            app, log_level="warning", lifespan="on", timeout_graceful_shutdown=60
        )
        uvicorn.Server(config).run(sockets=[listening])


def main() -> int:
    try:
        serve(arguments())
    except EnginecastError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
