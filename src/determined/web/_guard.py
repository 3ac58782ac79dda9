"""Access control: every request passes here first."""

from __future__ import annotations

import hashlib
import http.cookies
import ipaddress
import secrets
import socket
import urllib.parse

from starlette.datastructures import Headers, QueryParams
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_TOKEN = "token"
_MAX_BODY = 10_000
_SAFE = ("GET", "HEAD")
_POLICY = {
    # Plotly uses style attributes, and exports images.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """Passes on only requests from the page itself or from a user of this machine.

    Requests from other sites are refused by their Origin. With a token, a request must have it. Without one, the Host
    must be an IP address or a name of this machine, which protects against DNS rebinding; the port may differ, as with
    `ssh -L`.
    """

    def __init__(self, app: ASGIApp, token: str | None, host: str) -> None:
        self._app = app
        self._token = token
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}
        # Not shared with the page of another user on another port of this machine.
        self._cookie = f"det_ui_{hashlib.sha256((token or '').encode()).hexdigest()[:8]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the page does not support {scope['type']!r}")
        refusal = self._refusal(scope)
        answer = self._app if refusal is None else refusal

        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_encoded(_POLICY)]
            await send(message)

        await answer(scope, receive, with_policy)

    def _refusal(self, scope: Scope) -> Response | None:
        headers, method = Headers(scope=scope), scope["method"]
        if self._token is None and not self._is_named_by(headers.get("host", "")):
            return PlainTextResponse("Forbidden: this Host is not a name of this machine.\n", 403)
        if not self._is_from_here(headers, is_change=method not in _SAFE):
            return PlainTextResponse("Forbidden: the request comes from another page.\n", 403)
        if self._token is not None and (refusal := self._without_token(self._token, scope, headers)) is not None:
            return refusal
        if method in _SAFE:
            return None
        return _refused_change(method, headers)

    def _without_token(self, token: str, scope: Scope, headers: Headers) -> Response | None:
        query = QueryParams(scope["query_string"])
        if scope["method"] in _SAFE and secrets.compare_digest(query.get(_TOKEN, "").encode(), token.encode()):
            rest = urllib.parse.urlencode([(name, value) for name, value in query.multi_items() if name != _TOKEN])
            # Removed from the URL, which people share.
            answer = RedirectResponse(f"{scope['path']}?{rest}" if rest else scope["path"], 303)
            answer.set_cookie(self._cookie, token, httponly=True, samesite="lax", path="/")
            return answer
        if secrets.compare_digest(self._given_token(headers).encode(), token.encode()):
            return None
        return PlainTextResponse("Unauthorized: open the address that `det ui` printed, with its token.\n", 401)

    def _given_token(self, headers: Headers) -> str:
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return bearer.strip()
        try:
            found = http.cookies.SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except http.cookies.CookieError:
            return ""
        return "" if found is None else found.value

    def _is_from_here(self, headers: Headers, *, is_change: bool) -> bool:
        """Return whether a request comes from this page; one without effects may also come from no page or a link."""
        origin, host = headers.get("origin"), headers.get("host", "")
        if origin is None:
            is_link = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
            return not is_change and (is_link or headers.get("sec-fetch-site", "none") != "cross-site")
        # With a token, there may be a TLS proxy in front of the page.
        return origin == f"http://{host}" or (self._token is not None and origin == f"https://{host}")

    def _is_named_by(self, host: str) -> bool:
        try:
            parts = urllib.parse.urlsplit(f"//{host}")
            name, _ = (parts.hostname or "").rstrip("."), parts.port
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True


def _refused_change(method: str, headers: Headers) -> Response | None:
    if method != "POST":
        return PlainTextResponse("Method Not Allowed\n", 405, headers={"Allow": "GET, HEAD, POST"})
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return PlainTextResponse("Unsupported Media Type: send JSON.\n", 415)
    length = headers.get("content-length", "")
    if "transfer-encoding" in headers or not length.isdecimal() or int(length[:20]) > _MAX_BODY:
        return PlainTextResponse(f"Content Too Large: send at most {_MAX_BODY} bytes.\n", 413)
    return None


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]
