"""`flopcalc web`: the calculator as a page in the browser, served here or written as a static site."""

from __future__ import annotations

import click

from flopcalc.base.errors import FlopcalcError, WorkloadError
from flopcalc.base.progress import show_progress
from flopcalc.base.text_table import format_text
from flopcalc.base.units import parse_size
from flopcalc.cli.command import Command


@click.command(cls=Command)
@click.option("--out", metavar="DIR", help="Write a static site instead. It works from any file server, and offline.")
@click.option("--address", metavar="URL", help="Where the written site will be found: links to it then show a picture.")
@click.option("--pyodide", metavar="DIR", help="Folder with Pyodide's files. Without it, npm fetches them once.")
@click.option("--port", metavar="N", help="Port to serve on (default: 8417, or any free one).")
@click.option("--no-browser", is_flag=True, help="Do not open a browser.")
def web(out: str | None, address: str | None, pyodide: str | None, port: str | None, no_browser: bool) -> None:
    """The exact calculator as a page in the browser.

    The page runs this package in the browser, with Pyodide. It sends your input nowhere. Examples:

      flopcalc web

      flopcalc web --out site
    """
    from flopcalc.web.build import build_site, list_sizes

    if out is not None:
        if port is not None or no_browser:
            raise WorkloadError("--out writes files and serves none: leave --port and --no-browser out")
        notes = build_site(out, pyodide, address or "")
        size = sum(size for _, size in list_sizes(out))
        click.echo(f"written: {out} ({size / 1e6:.1f} MB)", err=True)
        _show_notes(notes)
        return
    if address is not None:
        raise WorkloadError("--address belongs to a site that is written: give --out too")
    _serve(pyodide, None if port is None else parse_size(port, "--port"), opens=not no_browser)


def _serve(pyodide: str | None, port: int | None, *, opens: bool) -> None:
    import os
    import tempfile

    from flopcalc.web.build import build_site
    from flopcalc.web.serve import HOST, make_server

    if port is not None and port > 65535:
        raise FlopcalcError(f"--port: {port} is no port: 1 to 65535")
    with tempfile.TemporaryDirectory() as folder:
        site = os.path.join(folder, "site")
        show_progress("preparing the page: the first start takes half a minute")
        try:
            notes = build_site(site, pyodide)
        finally:
            show_progress("")
        with make_server(site, port) as server:
            address = f"http://{HOST}:{server.server_address[1]}/"
            click.echo(f"serving at {address} (Ctrl+C ends it)")
            _show_notes(notes)
            if opens:
                import webbrowser

                webbrowser.open(address)
            server.serve_forever()


def _show_notes(notes: list[str]) -> None:
    for note in notes:
        click.echo(format_text(f"note: {note}", "", "  "), err=True)
