"""Who may ask the page of `lit-het demo`, and how much at a time."""

import asyncio

import pytest

from lit_het.apps.demo.guard import AllowedHosts, Guard

LOOPBACK = AllowedHosts.of("127.0.0.1", ())
ANYWHERE = AllowedHosts.of("0.0.0.0", ("gpu-box", "proxy.example"))


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:7860", "127.0.0.1:7860", "[::1]:7860"])
def test_this_machine_is_allowed_with_and_without_an_origin(host):
    assert not LOOPBACK.problem([host], [])
    assert not LOOPBACK.problem([host], [f"http://{host}"])


@pytest.mark.parametrize(
    "hosts",
    [
        ["evil.example:7860"],
        ["192.168.1.5:7860"],
        ["localhost.evil.example"],
        ["127.0.0.1.evil.example"],
        [""],
        [],
        ["localhost", "evil.example"],
        ["["],
        ["evil.example@localhost:7860"],
        ["localhost:7860/evil.example"],
        ["localhost:7860, evil.example"],
    ],
)
def test_unknown_host_names_are_refused(hosts):
    assert LOOPBACK.problem(hosts, [])


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://localhost:3000", "file://", "http://localhost:7860.evil.example", "", "["],
)
def test_pages_from_elsewhere_are_refused(origin):
    assert "may not send requests" in LOOPBACK.problem(["localhost:7860"], [origin])
    assert "may not send requests" in LOOPBACK.problem(["localhost:7860"], ["http://localhost:7860", origin])


def test_a_page_for_all_networks_allows_addresses_and_the_names_of_the_user():
    for host in ("192.168.1.5:7860", "[fe80::1]:7860", "gpu-box:7860", "Proxy.Example", "localhost:7860"):
        assert not ANYWHERE.problem([host], [f"http://{host}"])
    assert not ANYWHERE.problem(["10.0.0.7:7860"], ["https://proxy.example"])  # which changes the host
    assert "--allow-host evil.example" in ANYWHERE.problem(["evil.example"], ["http://evil.example"])


def asked(allowed, kind="http", headers=(), chunks=(b"",), max_bytes=100):
    """What a guard lets an application see of a request, and what it answers itself."""
    seen, sent, left = [], [], list(chunks)

    async def app(scope, receive, send):
        while left:
            seen.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive():
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "headers": [(b"host", b"localhost"), *headers]}
    asyncio.run(Guard(app, allowed, max_bytes)(scope, receive, send))
    return seen, sent[0].get("status", sent[0]["type"])


def test_a_body_is_passed_on_to_the_last_byte_that_fits():
    assert asked(LOOPBACK, chunks=[b"x" * 60, b"x" * 40]) == ([b"x" * 60, b"x" * 40], 200)


def test_a_body_that_grows_too_large_is_not_read_to_its_end():
    seen, status = asked(LOOPBACK, chunks=[b"x" * 60] * 1000)
    assert (len(seen), status) == (1, 413)


@pytest.mark.parametrize("length", [b"101", b"9" * 5000])
def test_a_body_that_is_declared_too_large_is_not_read_at_all(length):
    assert asked(LOOPBACK, headers=[(b"content-length", length)], chunks=[b"x"]) == ([], 413)


@pytest.mark.parametrize(("kind", "answer"), [("http", 403), ("websocket", "websocket.close")])
def test_requests_and_sockets_of_other_pages_reach_nothing(kind, answer):
    assert asked(LOOPBACK, kind, [(b"origin", b"http://evil.example")]) == ([], answer)
