"""Without keys `dpray serve` answers callers on its machine, who call it by its own names."""

from __future__ import annotations

import pytest
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from tests.serving.front import CHAT, EMBEDDINGS, GOOD, ask, assert_openais, guard


def test_only_this_machine_is_served() -> None:
    app = guard(keys=[], auth="none")
    here = {"Host": "127.0.0.1:8000"}

    assert ask(app, json=GOOD[CHAT], key=None, headers=here).status_code == 200
    assert ask(app, "http://localhost:8000/v1/models", key="any").status_code == 200
    assert_openais(ask(app, "http://far.example/v1/models", key="any"), 403, "not_local")
    # As uvicorn tells of a proxy on this machine, in Serve too.
    proxied = ProxyHeadersMiddleware(app)
    sent = {"json": GOOD[CHAT], "headers": here | {"X-Forwarded-For": "10.0.0.7"}}
    assert_openais(ask(proxied, key=None, **sent), 403, "not_local")
    for far in ("10.0.0.7", "testclient"):
        sent = {"json": GOOD[CHAT], "headers": here, "client": (far, 1)}
        assert_openais(ask(app, key=None, **sent), 403, "not_local")


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]", "127.1.2.3"])
def test_this_machine_is_called_by_its_own_names(name: str) -> None:
    app = guard(keys=[], auth="none")
    for host in (name, f"{name}:8000"):
        assert ask(app, json=GOOD[CHAT], key=None, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example:8000", "10.0.0.7", "127.0.0.1.evil.example", "localhost.evil.example", "",
     "evil.example#127.0.0.1", "127.0.0.1@evil.example", "[", "::1"],
)  # fmt: skip
def test_a_page_whose_name_leads_here_by_now_is_not_served(host: str) -> None:
    """DNS rebinding: a browser on this machine sends what a page asks for, whose name its owner has
    let lead to 127.0.0.1. With keys the page has none."""
    app = guard(keys=[], auth="none")
    for path, body in ((CHAT, GOOD[CHAT]), (EMBEDDINGS, GOOD[EMBEDDINGS])):
        answer = ask(app, path, json=body, key=None, headers={"Host": host})
        assert_openais(answer, 403, "not_local")
    assert ask(guard(), json=GOOD[CHAT], headers={"Host": host}).status_code == 200
