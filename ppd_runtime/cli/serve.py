"""`ppd serve`: an OpenAI-compatible server."""

import importlib.util
import sys

from ppd_runtime.cli import options
from ppd_runtime.cli.drafting import DRAFTING, SWIFT
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.generate import LAYOUT_PANEL, LAYOUT_SETTINGS, opened, own_settings, show_progress
from ppd_runtime.cli.options import Settings, takes
from ppd_runtime.imports import quick_imports
from ppd_runtime.server.settings import ServerSettings
from ppd_runtime.settings.config import RuntimeConfig, without_earlier_texts

_LAYOUT = (*LAYOUT_SETTINGS, "max_requests", "max_cache_tokens", "prefix_cache_tokens", "draft_memory_mb")
NEEDED = ("fastapi", "uvicorn", "prometheus_client")
"""What the extra `server` installs."""


@takes(
    server=options.group(ServerSettings),
    layout=options.group(RuntimeConfig, _LAYOUT, panel=LAYOUT_PANEL, given_only=True),
    drafting=DRAFTING,
    swift=SWIFT,
    place=options.COMPILED,
)
def serve(
    model: options.Model = "demo",
    method: options.ChosenMethod = options.PPD,
    exit_layer: options.ExitLayer = None,
    *,
    server: Settings,
    layout: Settings,
    drafting: Settings,
    swift: Settings,
    place: Settings,
) -> None:
    """Answer OpenAI's clients; each text is the one that its request gets alone."""
    own = own_settings(method, exit_layer, without_earlier_texts(layout), drafting, swift)
    with one_line_errors(serve):
        check_installed()
        with quick_imports():
            from ppd_runtime.server.run import Prepared, serve_prepared

        prepared = Prepared(ServerSettings(**server))
        with opened(model, method, **own, **place) as generator:
            show_progress("")
            serve_prepared(generator, prepared, lambda: _tell(prepared.url, generator.info.name))


def check_installed() -> None:
    """Raise ValueError where what the server needs is not installed."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ValueError(f'{", ".join(missing)} not installed: run pip install ".[server]" in the project\'s folder')


def _tell(url: str, model: str) -> None:
    sys.stderr.write(f"{model} at {url}\n")
    sys.stderr.flush()
