"""Who may ask the page of ``lit-het demo``, and how much at a time.

Any page of the web may make the user's browser send requests to this machine, under a name of its own that it lets
point here (DNS rebinding) or as a request to another site. The headers Host and Origin tell, as pages cannot set them.
"""

import dataclasses
import ipaddress
import re
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeAlias

MAX_UPLOAD_BYTES = 64 * 2**20
"""Files of more bytes are refused, by the page and, as it reads, by the server."""

_FORM_BYTES = 2**16  # what a form adds to a file
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

# urlsplit would also find a name in user@name, or before a path.
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:[0-9]{1,5})?", re.ASCII)

_Message: TypeAlias = Mapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]
_App: TypeAlias = Callable[[Mapping[str, Any], _Receive, _Send], Awaitable[None]]


@dataclasses.dataclass(frozen=True)
class Doors:
    """Under which names a page may be asked for.

    Attributes:
        names: host names and addresses.
        any_address: whether every IP address is one of them: no name of others can be among those.
        named: those of ``names`` that the user has named: a proxy there may have a port of its own.
    """

    names: frozenset[str]
    any_address: bool
    named: frozenset[str]

    @staticmethod
    def of(host: str, named: Iterable[str]) -> "Doors":
        """Returns those of a page that is served at an address, and under names that the user has given."""
        given = frozenset(name.lower().strip("[]") for name in named)
        address = _address(host)
        return Doors(given | {*_LOOPBACK, host.lower()}, address is not None and address.is_unspecified, given)

    def problem(self, hosts: list[str], origins: list[str]) -> str:
        """Returns why a request with these headers is refused, nothing if it is not."""
        name = _name(f"//{hosts[0]}") if len(hosts) == 1 and _HOST.fullmatch(hosts[0]) else None
        if name is None:
            return "a request names one host"
        if not (name in self.names or (self.any_address and _address(name) is not None)):
            return f"this page is not known as {name}; start lit-het demo with --allow-host {name} if it should be"
        ours = (f"http://{hosts[0].lower()}", f"https://{hosts[0].lower()}")
        for origin in origins:
            if origin.lower() not in ours and _name(origin) not in self.named:
                return f"pages of {origin} may not ask this one"
        return ""


class Guard:
    """Passes on to an ASGI application what it may be asked, HTTP and WebSockets alike."""

    def __init__(self, app: _App, doors: Doors, max_bytes: int = MAX_UPLOAD_BYTES + _FORM_BYTES):
        self._app, self._doors, self._max_bytes = app, doors, max_bytes

    async def __call__(self, scope: Mapping[str, Any], receive: _Receive, send: _Send) -> None:
        """Implements ASGI."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if problem := self._doors.problem(_values(scope, b"host"), _values(scope, b"origin")):
            await _refuse(scope, send, 403, problem)
        elif scope["type"] == "websocket":
            await self._app(scope, receive, send)
        else:
            await self._limited(scope, receive, send)

    async def _limited(self, scope: Mapping[str, Any], receive: _Receive, send: _Send) -> None:
        """Stops reading a request that is too large, before or while it is stored."""
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
            await _refuse(scope, send, 413, f"at most {self._max_bytes:,} bytes are taken")


class _TooLarge(Exception):
    """A request has more bytes than are taken."""


async def _refuse(scope: Mapping[str, Any], send: _Send, status: int, reason: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": ""})
        return
    # What the other side is still sending is not worth reading.
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
