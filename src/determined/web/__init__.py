"""The page: experiments, trials, curves and logs of this machine in a browser, live.

`serve` runs until it is interrupted. It reads the tracking database as `det` does, so there is nothing else to start;
it needs the extra `web` (Starlette, uvicorn, Jinja2, Plotly).
"""

from determined.web._serve import serve

__all__ = ["serve"]
