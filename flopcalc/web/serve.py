"""Serve a built site on this machine alone."""

from __future__ import annotations

import errno
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from flopcalc.base.errors import FlopcalcError
from flopcalc.web.build import POLICY

HOST = "127.0.0.1"
PORT = 8417  # taken if it is free: the same address finds its service worker's cache again


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    extensions_map = {  # noqa: RUF012  # the base class has one of its own
        **SimpleHTTPRequestHandler.extensions_map,
        ".js": "text/javascript",
        ".wasm": "application/wasm",
        ".json": "application/json",
        ".svg": "image/svg+xml",
        ".css": "text/css",
        ".zip": "application/zip",
    }

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", f"{POLICY}; frame-ancestors 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-cache")  # asked again each time: a new build is seen at once
        super().end_headers()

    def list_directory(self, path: object) -> None:  # noqa: ARG002  # the base class defines the arguments
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: requests are no news."""


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes a page in the middle of a file is no news either."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def make_server(folder: str, port: int | None = None) -> ThreadingHTTPServer:
    """A server of a folder; without a port the usual one, or any that is free."""
    handler = partial(_Handler, directory=folder)
    for choice in (PORT, 0) if port is None else (port,):
        try:
            return _Server((HOST, choice), handler)
        except OSError as error:
            if port is not None or error.errno != errno.EADDRINUSE:
                raise FlopcalcError(f"port {choice} of {HOST} cannot be used: {error.strerror or error}") from None
    raise AssertionError("port 0 is always free")
