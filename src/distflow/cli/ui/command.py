"""``distflow ui``."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from typing import Annotated

import typer

from distflow.cli.options import command_app
from distflow.errors import InputError

__all__ = ["app"]

app = command_app()


@app.command("ui", epilog="Examples: distflow ui  ·  distflow ui --actions --port 8800")
def serve(
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="The port on 127.0.0.1. Default: a free port.", show_default=False)
    ] = 0,
    actions: Annotated[bool, typer.Option("--actions", help="Allow the page to cancel and restart workflows.")] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="Also serve metrics for Prometheus at /metrics.")] = False,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in your browser.")] = False,
) -> None:
    """Show workflows, logs, metrics and nodes on a local web page.

    Only you can open the page: its server listens on 127.0.0.1, and its URL has a secret token. The page changes nothing unless
    you give --actions. To end the server, press Ctrl-C. On a machine without a browser, forward the port with `ssh -L`.
    """
    try:
        import uvicorn

        from distflow.cli.ui.server import make_app, make_token
    except ImportError as error:
        if error.name is None or error.name.startswith("distflow"):
            raise
        raise InputError(
            f"`distflow ui` needs a package that is not installed: {error.name}", hint="run: pip install 'distflow-cli[ui]'"
        ) from None
    listener = _listen(port)
    token = make_token()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/?token={token}"

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(url, flush=True)
            if sys.stderr.isatty():
                print("Press Ctrl-C to end.", file=sys.stderr)
            if browser:
                import webbrowser

                webbrowser.open(url)

    server: uvicorn.Server
    app = make_app(token, has_actions=actions, has_metrics=metrics, is_stopping=lambda: server.should_exit)
    server = Server(
        uvicorn.Config(
            app, loop="asyncio", http="h11", ws="none", lifespan="off", interface="asgi3", log_config=None,
            log_level="error", access_log=False, server_header=False, proxy_headers=False, timeout_graceful_shutdown=2,
        )
    )  # fmt: skip
    with listener, suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


def _listen(port: int) -> socket.socket:
    """Return a socket that is bound to a port of 127.0.0.1. Raises ``InputError`` if the port cannot be used."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise InputError(f"port {port} cannot be used: {error.strerror}", hint="choose another port with --port") from None
    return listener
