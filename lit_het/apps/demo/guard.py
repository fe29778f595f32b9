"""Checks the origin and the size of requests to ``lit-het demo``.

Any web page can make the user's browser send requests to this machine, as cross-site requests or under a host name that
it resolves to this machine (DNS rebinding). The headers Host and Origin reveal both, since pages cannot set them.
"""

import dataclasses
import ipaddress
import re
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeAlias

MAX_UPLOAD_BYTES = 64 * 2**20
"""Larger files are refused by the page and by the server."""

_FORM_BYTES = 2**16  # overhead of a form around a file
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

# urlsplit alone would also accept user@name, and a name before a path.
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:[0-9]{1,5})?", re.ASCII)

_Message: TypeAlias = Mapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]
_App: TypeAlias = Callable[[Mapping[str, Any], _Receive, _Send], Awaitable[None]]


@dataclasses.dataclass(frozen=True)
class AllowedHosts:
    """Host names under which a page may be requested.

    Attributes:
        names: host names and addresses.
        any_address: whether all IP addresses are allowed, which is safe: DNS rebinding needs a host name.
        named: the part of ``names`` that the user gave; proxies on these hosts may use other ports.
    """

    names: frozenset[str]
    any_address: bool
    named: frozenset[str]

    @staticmethod
    def of(host: str, named: Iterable[str]) -> "AllowedHosts":
        """Returns the names of a page that is served at an address, and under names given by the user."""
        given = frozenset(name.lower().strip("[]") for name in named)
        address = _address(host)
        return AllowedHosts(given | {*_LOOPBACK, host.lower()}, address is not None and address.is_unspecified, given)

    def problem(self, hosts: list[str], origins: list[str]) -> str:
        """Returns why a request with these headers is refused; empty if it is allowed."""
        name = _name(f"//{hosts[0]}") if len(hosts) == 1 and _HOST.fullmatch(hosts[0]) else None
        if name is None:
            return "a request must have one Host header"
        if not (name in self.names or (self.any_address and _address(name) is not None)):
            return f"{name} is not an allowed host; to allow it, start lit-het demo with --allow-host {name}"
        ours = (f"http://{hosts[0].lower()}", f"https://{hosts[0].lower()}")
        for origin in origins:
            if origin.lower() not in ours and _name(origin) not in self.named:
                return f"pages of {origin} may not send requests to this page"
        return ""


class Guard:
    """ASGI middleware that passes only allowed requests, of HTTP and WebSockets, to an application."""

    def __init__(self, app: _App, allowed: AllowedHosts, max_bytes: int = MAX_UPLOAD_BYTES + _FORM_BYTES):
        self._app, self._allowed, self._max_bytes = app, allowed, max_bytes

    async def __call__(self, scope: Mapping[str, Any], receive: _Receive, send: _Send) -> None:
        """Implements ASGI."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if problem := self._allowed.problem(_values(scope, b"host"), _values(scope, b"origin")):
            await _refuse(scope, send, 403, problem)
        elif scope["type"] == "websocket":
            await self._app(scope, receive, send)
        else:
            await self._limited(scope, receive, send)

    async def _limited(self, scope: Mapping[str, Any], receive: _Receive, send: _Send) -> None:
        """Passes a request to the application, and stops reading it if it is too large."""
        count, has_begun = 0, False

        async def counted() -> _Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self._max_bytes:
                raise _TooLarge
            return message

        async def noted(message: _Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            declared = [length for length in _values(scope, b"content-length") if length.isdecimal()]
            if any(int(length[:20]) > self._max_bytes for length in declared):
                raise _TooLarge
            await self._app(scope, counted, noted)
        except _TooLarge:
            if has_begun:
                raise
            await _refuse(scope, send, 413, f"a request may have at most {self._max_bytes:,} bytes")


class _TooLarge(Exception):
    """A request is too large."""


async def _refuse(scope: Mapping[str, Any], send: _Send, status: int, reason: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": ""})
        return
    # Close the connection: the rest of the request is not read.
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{reason}\n".encode()})


def _values(scope: Mapping[str, Any], name: bytes) -> list[str]:
    return [value.decode("latin1") for header, value in scope["headers"] if header.lower() == name]


def _name(address: str) -> str | None:
    """Returns the name or IP address in ``//name:port``, without the brackets of IPv6; None where there is none."""
    try:
        return urllib.parse.urlsplit(address).hostname
    except ValueError:
        return None


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
