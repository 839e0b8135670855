"""Listening sockets and token authentication of the HTTP servers."""

import socket

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from configs.errors import UserError
from envs.serving import TokenGate, listen, with_token

# Constant, because it is part of the tests' names.
TOKEN = "abcdefghijklmnopqrstuvwxyz_-01234"


@pytest.fixture
def client():
    async def answer(request):
        return PlainTextResponse("inside")

    app = Starlette(
        routes=[Route("/", answer, methods=["GET", "POST"]), Route("/static/page.js", answer)],
        middleware=[Middleware(TokenGate, token=TOKEN, open_paths=("/static/",))],
    )
    return TestClient(app, base_url="http://127.0.0.1:8770")


def test_the_token_is_accepted_in_the_url_and_in_the_header(client):
    assert client.get(with_token("/", TOKEN)).text == "inside"
    assert client.get("/", headers={"authorization": f"Bearer {TOKEN}"}).text == "inside"
    assert client.get("/static/page.js").text == "inside"


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/", {}),
        ("/?token=", {}),
        (f"/?token={TOKEN[:-1]}", {}),
        (f"/?token={TOKEN}x", {}),
        (f"/?other={TOKEN}", {}),
        ("/?token=%ff%00\u00e4", {}),
        ("/", {"authorization": f"Basic {TOKEN}"}),
        ("/", {"authorization": "Bearer "}),
        ("/", {"cookie": f"token={TOKEN}"}),
        ("/static/../?x", {}),
        ("//static/", {}),
    ],
)
def test_requests_without_the_token_are_refused(client, path, headers):
    answer = client.get(path, headers=headers)
    assert answer.status_code == 401
    assert TOKEN not in answer.text


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "http://127.0.0.1:9999", "http://localhost:8770", "https://127.0.0.1:8770", "null"],
)
def test_a_page_of_another_origin_is_refused_even_with_the_token(client, origin):
    assert client.get(with_token("/", TOKEN), headers={"origin": origin}).status_code == 403
    assert client.post(with_token("/", TOKEN), headers={"origin": "http://127.0.0.1:8770"}).text == "inside"


def test_connections_send_without_delay():
    with listen(0) as listener, socket.create_connection(listener.getsockname()[:2]):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_unavailable_port_is_an_error():
    with listen(0) as listener, pytest.raises(UserError):
        listen(listener.getsockname()[1])
    with pytest.raises(UserError, match="70000"):
        listen(70000)
