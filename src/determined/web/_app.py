"""The routes of the page."""

from __future__ import annotations

import csv
import importlib.util
import io
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import jinja2
from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from determined import errors
from determined._home import Home
from determined._version import VERSION
from determined.experiment import control, wording
from determined.tracking import encode_json
from determined.web._guard import Guard
from determined.web._live import changes
from determined.web._pages import Page, Pages

logger = logging.getLogger("determined.web")


class _IdConvertor(IntegerConvertor):
    """Ids of at most 18 digits, which the database can hold."""

    regex = "[0-9]{1,18}"


register_url_convertor("id", _IdConvertor())


def _plotly() -> pathlib.Path:
    """Return the path of the JavaScript in the package plotly, without importing it."""
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'plotly'", name="plotly")
    return pathlib.Path(found.origin).parent / "package_data" / "plotly.min.js"


_HERE = pathlib.Path(__file__).parent
_FILES = {
    "page.css": _HERE / "static" / "page.css",
    "page.js": _HERE / "static" / "page.js",
    "plotly.js": _plotly(),
}
_EXPERIMENT_ACTIONS: dict[str, Callable[[int, Home], object]] = {
    "pause": control.pause,
    "activate": control.activate,
    "cancel": control.cancel,
    "kill": control.kill,
}


def make_app(home: Home, token: str | None = None, host: str = "localhost") -> ASGIApp:
    """Return the app that serves a home folder; with a token, requests must have it."""
    site = _Site(home)
    routes = [
        Route("/", site.page(site.pages.experiments)),
        Route("/experiments/{id:id}", site.page(site.pages.experiment)),
        Route("/experiments/{id:id}/curves", site.data(site.pages.experiment_curves)),
        Route("/experiments/{id:id}/trials.csv", site.trials_csv),
        Route("/experiments/{id:id}/{action:str}", site.control_experiment, methods=["POST"]),
        Route("/trials/{id:id}", site.page(site.pages.trial)),
        Route("/trials/{id:id}/curves", site.data(site.pages.trial_curves)),
        Route("/trials/{id:id}/kill", site.kill_trial, methods=["POST"]),
        Route("/live/", site.live(site.pages.experiments)),
        Route("/live/experiments/{id:id}", site.live(site.pages.experiment)),
        Route("/live/trials/{id:id}", site.live(site.pages.trial)),
        Route("/static/{name:str}", static),
    ]
    handlers: Any = {404: site.not_found, errors.DeterminedException: site.explain, OSError: site.explain}
    handlers[Exception] = site.explain
    return Guard(Starlette(routes=routes, exception_handlers=handlers), token, host)


def static(request: Request) -> Response:
    """Return a static file."""
    path = _FILES.get(request.path_params["name"])
    if path is None:
        return PlainTextResponse("Not Found\n", 404)
    found = path.stat()
    tag = f'"{found.st_mtime_ns:x}-{found.st_size:x}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}  # revalidated, and sent only if it changed
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return FileResponse(path, headers=headers)


class _Site:
    """Answers requests with pages on a home folder."""

    def __init__(self, home: Home) -> None:
        self.pages = Pages(home)
        self._home = home
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=jinja2.StrictUndefined
        )
        self._templates.filters |= {
            "cell": wording.cell,
            "when": wording.when,
            "percent": wording.percent,
            "bytes": wording.bytes_text,
            "state": wording.state_text,
        }
        self._templates.globals |= {"version": VERSION, "duration": wording.duration, "searcher": wording.searcher}

    def page(self, make: Callable[..., Page]) -> Callable[[Request], Response]:
        """Return a handler that answers with a whole page."""

        def answer(request: Request) -> Response:
            page = make(request.query_params, **request.path_params)
            return self._html(page.template, page.context | {"curves": page.curves})

        return answer

    def data(self, make: Callable[..., Any]) -> Callable[[Request], Response]:
        """Return a handler that answers with JSON."""

        def answer(request: Request) -> Response:
            found = encode_json(make(request.query_params, **request.path_params))
            return Response(_encoded(found), media_type="application/json", headers={"Cache-Control": "no-store"})

        return answer

    def live(self, make: Callable[..., Page]) -> Callable[[Request], Any]:
        """Return a handler that sends the parts of a page whenever they change."""

        def parts(request: Request) -> dict[str, str]:
            page = make(request.query_params, **request.path_params)
            template = self._templates.get_template(page.template)
            context = template.new_context(page.context | {"curves": page.curves})
            rendered = {name: "".join(template.blocks[name](context)) for name in page.live}
            return rendered | {"curves": page.curves}

        async def answer(request: Request) -> Response:
            stream = () if request.method == "HEAD" else changes(request, lambda: parts(request))
            return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

        return answer

    def trials_csv(self, request: Request) -> Response:
        """Return all trials of an experiment as comma-separated values."""
        id = request.path_params["id"]
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self.pages.trial_rows(id))
        name = f'attachment; filename="experiment-{id}-trials.csv"'
        return Response(_encoded(text.getvalue()), media_type="text/csv", headers={"Content-Disposition": name})

    def control_experiment(self, request: Request) -> Response:
        """Pause, activate, cancel or kill an experiment."""
        act = _EXPERIMENT_ACTIONS.get(request.path_params["action"])
        if act is None:
            return self.not_found(request, None)
        act(request.path_params["id"], self._home)
        return JSONResponse({})

    def kill_trial(self, request: Request) -> Response:
        """Kill a trial; its experiment continues."""
        control.kill_trial(request.path_params["id"], self._home)
        return JSONResponse({})

    def explain(self, request: Request, error: Exception) -> Response:
        """Return an error, as a page or as JSON."""
        status = 404 if isinstance(error, errors.NotOnRecordException) else 409 if request.method == "POST" else 500
        if not isinstance(error, errors.DeterminedException | OSError):
            logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        if request.method == "POST":
            return JSONResponse({"error": str(error)}, status)
        return self._html("error.html", {"title": "Error", "message": str(error)}, status)

    def not_found(self, request: Request, _: object) -> Response:
        """Return the error for an unknown address."""
        message = f"There is nothing at {request.url.path!r}."
        return self._html("error.html", {"title": "Not found", "message": message}, 404)

    def _html(self, template: str, context: dict[str, Any], status: int = 200) -> Response:
        text = self._templates.get_template(template).render(context)
        return HTMLResponse(_encoded(text), status, headers={"Cache-Control": "no-store"})


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # names may contain lone surrogates
