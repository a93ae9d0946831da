"""The pages that log a browser in and out.

Scripts send HTTP basic authentication and get 401. Only requests for HTML are led to the form. The
gate refuses forms of other sites, and ``SameSite`` keeps the cookie from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from nsqtools.web.access import COOKIE
from nsqtools.web.pages.site import Addresses, environment, theme_of


def is_browser(request: Request) -> bool:
    """Return whether a person waits for a page, who has not sent a user and a password."""
    accept, authorization = (request.headers.get(name, "") for name in ("accept", "authorization"))
    return "text/html" in accept and not authorization


def to_login(request: Request, to: Addresses) -> Response:
    """Return a redirect to the form, which leads back to the requested page."""
    path, query = request.url.path, request.url.query
    target = f"{path}?{query}" if query else path
    if request.method != "GET" or target == to.page("/"):  # a form is not sent again
        target = ""
    return RedirectResponse(to.page("/login", next=target), 303)


def login_page(
    request: Request, to: Addresses, fields: Mapping[str, str], error: str = ""
) -> Response:
    """Return the page with the form, and with the reason if a login failed."""
    page = environment().get_template("login.html")
    values = {"to": to, "theme": theme_of(request), "error": error, "user": fields.get("user", "")}
    text = page.render(**values, next=fields.get("next") or request.query_params.get("next", ""))
    return HTMLResponse(text, 401 if error else 200)


def logged_in(fields: Mapping[str, str], to: Addresses, token: str, *, is_secure: bool) -> Response:
    """Return a redirect to the requested page, with the cookie of a session."""
    target = fields.get("next", "")
    # An address of another site begins with two slashes or has a scheme.
    if not target.startswith("/") or target.startswith(("//", "/\\")):
        target = to.page("/")
    response = RedirectResponse(quote(target, safe="/%?&=#+:,.~"), 303)
    path = to.page("/")
    response.set_cookie(COOKIE, token, path=path, httponly=True, samesite="lax", secure=is_secure)
    return response


def logged_out(to: Addresses) -> Response:
    """Return a redirect to the form that removes the cookie."""
    response = RedirectResponse(to.page("/login"), 303)
    response.delete_cookie(COOKIE, path=to.page("/"))
    return response
