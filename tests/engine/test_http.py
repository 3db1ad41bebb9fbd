"""The HTTP transports of the remote engine, against a small real server: answers, streams and errors."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from inferscale_memory.coroutines import run
from inferscale_memory.engine.http import Address, AsyncTransport, SyncTransport, is_loopback
from inferscale_memory.engine.remote import RemoteEngine
from inferscale_memory.errors import ConfigurationError, EngineError, PromptError
from tests.serving import free_port

Answer = tuple[int, bytes] | Callable[[BaseHTTPRequestHandler], None]


class Small:
    """A server that gives the same answer to every request, and records the headers and connections."""

    def __init__(self) -> None:
        self.answer: Answer = (200, b"{}")
        self.headers: list[dict[str, str]] = []
        self.connections: set[Any] = set()
        small = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                small.headers.append(dict(self.headers))
                small.connections.add(self.client_address)
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if callable(small.answer):
                    return small.answer(self)
                status, content = small.answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_POST = do_GET  # noqa: N815  # the name is http.server's

            def log_message(self, *_: object) -> None: ...

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """Some tests let a client give up, which is not an error here."""

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def small() -> Iterator[Small]:
    small = Small()
    yield small
    small.http.shutdown()
    small.http.server_close()


def posted(url: str, *, api_key: str | None = None, timeout: float = 5.0) -> Any:
    """The result of a POST, on which both transports must agree."""
    address = Address.read(url, api_key, timeout)

    async def on_loop() -> Any:
        transport = AsyncTransport(address)
        try:
            return await transport.post("/v1/completions", {"prompt": [1]})
        finally:
            await transport.aclose()

    results: list[Any] = []
    direct = SyncTransport(address)
    for call in (
        lambda: run(direct.post("/v1/completions", {"prompt": [1]})),
        lambda: asyncio.run(on_loop()),
    ):
        try:
            results.append(call())
        except Exception as error:
            results.append(error)
    direct.close()
    if isinstance(results[0], Exception):  # the messages of the operating system differ
        assert type(results[0]) is type(results[1])
        raise results[0]
    assert results[0] == results[1]
    return results[0]


def streamed(url: str) -> list[Any]:
    """The events of a stream, on which both transports must agree."""
    address = Address.read(url, None, 5.0)

    async def collect(transport: SyncTransport | AsyncTransport) -> list[Any]:
        return [event async for event in transport.events("/v1/completions", {})]

    async def on_loop() -> list[Any]:
        return await collect(AsyncTransport(address))

    events = run(collect(SyncTransport(address)))
    assert asyncio.run(on_loop()) == events
    return events


def pieces(*parts: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    """An answer whose parts are sent one by one."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for part in parts:
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            handler.wfile.flush()
        handler.wfile.write(b"0\r\n\r\n")

    return answer


def error(message: str, parameter: str | None = None) -> bytes:
    return json.dumps({"error": {"message": message, "param": parameter, "code": 400}}).encode()


# -- one answer ---


def test_the_json_of_an_answer(small: Small) -> None:
    small.answer = (200, b'{"a": [1, "\xc3\xa9"]}')
    assert posted(small.url, api_key="sesame") == {"a": [1, "é"]}
    assert {headers.get("Authorization") for headers in small.headers} == {"Bearer sesame"}


@pytest.mark.parametrize(
    ("status", "content", "kind", "says"),
    [
        (401, b'{"error": "Unauthorized"}', ConfigurationError, "api_key"),
        (404, error("The model `x` does not exist."), ConfigurationError, "`x` does not exist.*model"),
        (404, b'{"detail": "Not Found"}', ConfigurationError, "Not Found.*base_url"),
        (400, error("too long", "input_tokens"), PromptError, "too long.*shorten"),
        (400, error("Token id 9 is out of vocabulary"), PromptError, "vocabulary"),
        (400, error("top_p must be", "top_p"), ConfigurationError, "top_p must be.*change the option"),
        (422, b'{"detail": [{"msg": "bad"}]}', ConfigurationError, "bad"),
        (500, error("out of memory"), EngineError, "500: out of memory.*log"),
        (503, b"<html>busy</html>", EngineError, "503: <html>busy"),
        (302, b"", EngineError, "302"),
        (200, b"<html>hello</html>", EngineError, "not a vLLM server.*base_url"),
    ],
)
def test_a_refusal_or_failure_names_its_remedy(
    small: Small, status: int, content: bytes, kind: type[Exception], says: str
) -> None:
    small.answer = (status, content)
    with pytest.raises(kind, match=says):
        posted(small.url)


def test_no_server_at_the_address() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match=f"{url}.*inferscale serve"):
        posted(url)


def test_a_server_that_is_silent(small: Small) -> None:
    over = threading.Event()
    small.answer = lambda _: over.wait(20) and None
    try:
        with pytest.raises(EngineError, match=r"silent for 0\.3 s.*timeout"):
            posted(small.url, timeout=0.3)
    finally:
        over.set()


def test_a_server_that_closes_the_connection(small: Small) -> None:
    small.answer = lambda handler: handler.connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(EngineError, match="broke off"):
        posted(small.url)


def test_a_connection_is_reused(small: Small) -> None:
    transport = SyncTransport(Address.read(small.url, None, 5.0))
    for _ in range(5):
        run(transport.get("/v1/models"))
    transport.close()
    assert len(small.connections) == 1


# -- streams ---


def test_events_in_any_pieces_with_any_characters(small: Small) -> None:
    """Only a newline ends a line: U+2028 and U+0085 may occur unescaped in JSON."""
    text = "one\u2028two\u0085three\x0cfour 日本"
    whole = f"data: {json.dumps({'text': text}, ensure_ascii=False)}\n\n".encode()
    small.answer = pieces(b": still here\n\n", *(bytes([byte]) for byte in whole), b"data: [DONE]\n\n")
    assert streamed(small.url) == [{"text": text}]


def test_a_stream_that_ends_too_early(small: Small) -> None:
    small.answer = pieces(b'data: {"text": "half"}\n\n')
    with pytest.raises(EngineError, match="broke off"):
        streamed(small.url)


def test_an_error_in_the_middle_of_a_stream(small: Small) -> None:
    small.answer = pieces(b'data: {"text": "half"}\n\n', b"data: " + error("no", "prompt") + b"\n\n")
    with pytest.raises(PromptError, match="no"):
        streamed(small.url)


def test_a_stream_that_is_refused(small: Small) -> None:
    small.answer = (400, error("temperature must be", "temperature"))
    with pytest.raises(ConfigurationError, match="temperature"):
        streamed(small.url)


def test_one_failure_among_many_calls_ends_them_all(small: Small) -> None:
    small.answer = (500, b"{}")
    address = Address.read(small.url, None, 5.0)

    async def on_loop() -> None:
        transport = AsyncTransport(address)
        await transport.all([lambda: transport.get("/v1/models")] * 200)

    direct = SyncTransport(address)
    with pytest.raises(EngineError, match="500"):
        run(direct.all([lambda: direct.get("/v1/models")] * 200))
    with pytest.raises(EngineError, match="500"):
        asyncio.run(on_loop())
    direct.close()


# -- addresses ---


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://host", "http://", None])
def test_an_invalid_address_is_refused_at_once(url: Any) -> None:
    with pytest.raises(ConfigurationError, match="base_url"):
        RemoteEngine(url)


def test_an_address_may_end_in_v1() -> None:
    for url in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"):
        assert Address.read(url, None, 1.0).url == "http://h:1"
    assert Address.read("https://h/llm/v1", None, 1.0).url == "https://h/llm"


def test_a_timeout_of_zero_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="timeout"):
        RemoteEngine("http://127.0.0.1", timeout=0)


def test_which_addresses_are_loopback() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""))


def test_a_server_that_is_not_vllm_is_an_error(small: Small) -> None:
    for answer in (b"{}", b"[]", b'{"data": []}', b'{"data": [{"id": "m"}]}'):
        small.answer = (200, answer)
        with RemoteEngine(small.url) as engine, pytest.raises(EngineError, match="not a vLLM server"):
            engine.start()


def test_nothing_is_sent_before_the_first_use(small: Small) -> None:
    RemoteEngine(small.url).close()
    assert small.headers == []
