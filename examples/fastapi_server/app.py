"""Embeddings of texts over HTTP: FastAPI in front of an engine, with requests joined into batches.

    python examples/fastapi_server/app.py my.bundle --port 8000

POST /embed {"texts": ["a photo of a fox"]} gives the outputs of the engine; GET /health says what
runs, and what its verdict is.  What is wrong with a request is 4xx, what is wrong here is 5xx, both
as {"error": ..., "message": ...}.  SIGTERM and Ctrl-C answer the requests that are under way first.
"""

import argparse
import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from enginecast.runtime.engine import Engine


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


class Service:
    """An engine, its batcher, and the threads in which requests wait."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.engine, self._limits = engine, limits
        self.batcher = Batcher(
            engine, max_batch=limits.batch, max_delay=limits.delay, max_waiting=limits.requests
        )
        self._threads = ThreadPoolExecutor(limits.requests, thread_name_prefix="embed")
        self.under_way = 0

    async def embed(self, texts: list[str]) -> bytes:
        """The answer to a request, as JSON."""
        most = self._limits.texts
        if not 1 <= len(texts) <= most:
            raise RefusedError(422, "InputError", f"texts: expected 1..{most}, got {len(texts)}")
        if self.under_way >= self._limits.requests:
            message = f"{self.under_way} requests are under way, as many as may"
            raise RefusedError(503, "Overloaded", message)
        self.under_way += 1
        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, self._answer, texts)
            return await running
        finally:
            self.under_way -= 1

    def _answer(self, texts: list[str]) -> bytes:
        found = self.batcher.encode(texts, timeout=self._limits.seconds)
        outputs = {name: as_list(value) for name, value in found.items()}
        return json.dumps({"outputs": outputs, "truncated": found.truncated}).encode()

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


def make_app(engine: Engine, limits: Limits) -> FastAPI:
    """The application of an engine, which it closes at its end."""
    service = Service(engine, limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(title="enginecast", lifespan=lifespan)

    @app.post("/embed")
    async def embed(body: Texts) -> Response:
        return Response(await service.embed(body.texts), media_type="application/json")

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
        app = make_app(engine, limits)
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
