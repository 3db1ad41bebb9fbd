"""JSON and event streams over HTTP: one implementation for a blocking client and for an event loop's client.

A `Transport` sends requests and turns failures into errors of this library, each with its remedy. It knows nothing
about prompts. It does not follow redirects: a request carries credentials that only one server may see.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from inferscale_memory.coroutines import run
from inferscale_memory.errors import ConfigurationError, EngineError, PromptError

T = TypeVar("T")
AT_ONCE = 64
"""The most requests that one call keeps in flight."""
IDLE_S = 4.0
"""Seconds for which an idle connection is kept. uvicorn, which serves vLLM, closes it after 5 s."""
ABOUT_THE_PROMPT = frozenset({"prompt", "input_text", "input_tokens", "max_tokens", "prompt_token_ids"})
"""The parameters that vLLM names in an error when the fault is in the prompt."""


@dataclass(frozen=True, slots=True)
class Address:
    """A server and how to reach it.

    Attributes:
        url: scheme, host and port (and a path, behind a proxy), without a slash at the end.
        api_key: the --api-key that the server was started with; None if it has none.
        timeout_s: seconds the server may be silent before a request fails.
    """

    url: str
    api_key: str | None
    timeout_s: float

    @staticmethod
    def read(base_url: str, api_key: str | None, timeout_s: float) -> Address:
        """Raises ConfigurationError if `base_url` is not the address of a server or the timeout is not positive."""
        try:
            url = httpx.URL(base_url)
        except (TypeError, httpx.InvalidURL):
            url = httpx.URL("")
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigurationError(
                f"base_url {base_url!r} is not the address of a server: pass one such as 'http://127.0.0.1:8000'"
            )
        if not timeout_s > 0:
            raise ConfigurationError(f"timeout is {timeout_s!r}: pass seconds, more than 0")
        return Address(base_url.rstrip("/").removesuffix("/v1").rstrip("/"), api_key, timeout_s)

    def options(self) -> dict[str, Any]:
        """Options for an httpx client. Its pool has no limit, because vLLM queues better than a client can."""
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {
            "base_url": self.url,
            "headers": headers,
            "timeout": httpx.Timeout(self.timeout_s, connect=min(10.0, self.timeout_s), pool=None),
            "limits": httpx.Limits(
                max_connections=None, max_keepalive_connections=AT_ONCE, keepalive_expiry=IDLE_S
            ),
            # A proxy named in the environment cannot reach a server on this machine's loopback.
            "trust_env": not is_loopback(httpx.URL(self.url).host),
        }


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Transport(ABC):
    """Sends requests to one server. The subclasses differ only in how they wait."""

    def __init__(self, address: Address) -> None:
        self._address = address

    async def get(self, path: str) -> Any:
        """The JSON at `path`. Raises the same errors as `post`."""
        return await self._call("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a JSON body and return the server's JSON.

        Raises:
            PromptError, ConfigurationError: the server refuses the request; the caller has to change it.
            EngineError: no server answers, it fails, or its answer is not JSON.
        """
        return await self._call("POST", path, body)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """The JSON of each event of a stream, until the server sends [DONE]. Closing the generator early also ends the
        request at the server. Raises the same errors as `post`."""
        with self._explained():
            response = await self._send("POST", path, body)
            try:
                if response.status_code != 200:
                    raise self._error(response.status_code, await self._read(response))
                async with aclosing(self._pieces(response)) as pieces:
                    async for data in _data(pieces):
                        if data == b"[DONE]":
                            return
                        event = self._json(data)
                        if isinstance(event, dict) and event.get("error"):
                            raise self._error(_code(event["error"]), data)
                        yield event
                raise EngineError(
                    f"the server at {self._address.url} broke off an answer; its log may say why"
                )
            finally:
                await self._close(response)

    @abstractmethod
    async def all(self, calls: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
        """Run `calls`, at most `AT_ONCE` at the same time; their results in order."""

    # -- how a subclass waits ------------------------------------------------------------------------------------

    @abstractmethod
    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response: ...
    @abstractmethod
    async def _read(self, response: httpx.Response) -> bytes: ...
    @abstractmethod
    def _pieces(self, response: httpx.Response) -> AsyncGenerator[bytes, None]: ...
    @abstractmethod
    async def _close(self, response: httpx.Response) -> None: ...

    # -- inside -------------------------------------------------------------------------------------------------

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        with self._explained():
            response = await self._send(method, path, body)
            try:
                content = await self._read(response)
            finally:
                await self._close(response)
        if response.status_code != 200:
            raise self._error(response.status_code, content)
        return self._json(content)

    def _json(self, content: bytes) -> Any:
        try:
            return json.loads(content)
        except ValueError:
            raise EngineError(
                f"what answers at {self._address.url} is not a vLLM server (its answer is not JSON): correct base_url"
            ) from None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise errors of the connection as EngineError."""
        url = self._address.url
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise EngineError(
                f"no server answers at {url} ({error}): start one with `inferscale serve MODEL`, or correct base_url"
            ) from error
        except httpx.TimeoutException as error:
            raise EngineError(
                f"the server at {url} was silent for {self._address.timeout_s:g} s: pass a longer timeout, request "
                "less, or check its load"
            ) from error
        except httpx.TransportError as error:
            raise EngineError(
                f"the connection to {url} broke off ({error or type(error).__name__}): check whether the server was "
                "stopped, then try again"
            ) from error

    def _error(self, status: int, content: bytes) -> Exception:
        """The error that tells the caller what to do about a refusal."""
        url = self._address.url
        message, parameter = _message(content)
        if status in (401, 403):
            return ConfigurationError(f"the server at {url} refuses the API key: pass its api_key")
        if status == 404:
            return ConfigurationError(
                f"the server at {url} does not have what was requested ({message}): correct base_url or model"
            )
        if status in (400, 413, 422):
            if parameter in ABOUT_THE_PROMPT or "vocabulary" in message:
                return PromptError(
                    f"the server refuses the prompt ({message}): shorten it, or check its token ids"
                )
            return ConfigurationError(
                f"the server refuses the request ({message}): change the option, or how the server is started"
            )
        return EngineError(f"the server at {url} failed (status {status}: {message}); its log may say why")


class SyncTransport(Transport):
    """Sends requests on the calling thread. Many threads may use one transport.

    Its coroutines never suspend, so `coroutines.run` can drive them without an event loop.
    """

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._client = httpx.Client(**address.options())

    def close(self) -> None:
        self._client.close()

    async def all(self, calls: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
        # Python starts no threads while it exits.
        if len(calls) < 2 or not threading.main_thread().is_alive():
            return [await call() for call in calls]
        with ThreadPoolExecutor(min(len(calls), AT_ONCE), "inferscale-remote") as pool:
            return list(pool.map(lambda call: run(call()), calls))

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        return self._client.send(self._client.build_request(method, path, json=body), stream=True)

    async def _read(self, response: httpx.Response) -> bytes:
        return response.read()

    async def _pieces(self, response: httpx.Response) -> AsyncGenerator[bytes, None]:
        for piece in response.iter_bytes():
            yield piece

    async def _close(self, response: httpx.Response) -> None:
        response.close()


class AsyncTransport(Transport):
    """Sends requests on one event loop."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._client = httpx.AsyncClient(**address.options())

    async def aclose(self) -> None:
        await self._client.aclose()

    async def all(self, calls: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
        room = asyncio.Semaphore(AT_ONCE)

        async def one(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
            async with room:
                return await call()

        tasks = [asyncio.ensure_future(one(call)) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        return await self._client.send(self._client.build_request(method, path, json=body), stream=True)

    async def _read(self, response: httpx.Response) -> bytes:
        return await response.aread()

    async def _pieces(self, response: httpx.Response) -> AsyncGenerator[bytes, None]:
        async for piece in response.aiter_bytes():
            yield piece

    async def _close(self, response: httpx.Response) -> None:
        await response.aclose()


async def _data(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events. The pieces of the body may be split anywhere.

    Only a newline ends a line: a model's text may contain characters that str.splitlines also splits at.
    """
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _message(content: bytes) -> tuple[str, str | None]:
    """(message of an error, the parameter it names)."""
    try:
        error = json.loads(content)
    except ValueError:
        return content[:200].decode(errors="replace"), None
    error = error.get("error", error.get("detail", error)) if isinstance(error, dict) else error
    if isinstance(error, dict):
        parameter = error.get("param")
        return str(error.get("message", error)), str(parameter) if parameter else None
    return str(error), None


def _code(error: Any) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500
