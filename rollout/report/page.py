"""Pages of one HTML file, which load nothing else, and the charts in them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rollout.errors import InvalidInputError

if TYPE_CHECKING:
    from rollout.report.panels import Chart
    from rollout.report.tables import Table
    from rollout.report.verdict import Verdict

_FOLDER = Path(__file__).parent
CHARTS = (_FOLDER / "charts.js").read_text(encoding="utf-8")
PAGE_BEGIN = b'<!doctype html>\n<html lang="en" data-made-by="specrollout report">'
STYLE = (_FOLDER / "style.css").read_text(encoding="utf-8")


def render_page(
    title: str,
    charts: Sequence[Chart],
    *,
    subtitle: str = "",
    notes: Sequence[str] = (),
    verdicts: Sequence[Verdict] = (),
    tables: Sequence[Table] = (),
    runs: Sequence[str] = (),
    figures: Sequence[tuple[str, Sequence[str]]] = (),
) -> bytes:
    """A page as HTML. All texts are escaped; lone surrogates are replaced.

    ``figures``: the name and the values of each row, a value for each of ``runs``.
    """
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    scripts = {"charts_script": CHARTS, "page_script": (_FOLDER / "report.js").read_text("utf-8")}
    hashes = " ".join(csp_hash(script) for script in scripts.values())
    html = environment.get_template("report.html.j2").render(
        title=title, charts=charts, subtitle=subtitle, notes=notes, verdicts=verdicts,
        tables=tables, runs=runs, figures=figures, style=STYLE, script_hashes=hashes,
        style_hash=csp_hash(STYLE), **scripts,
    )  # fmt: skip
    return html.encode("utf-8", errors="replace")


def save_page(path: Path, html: bytes) -> None:
    """Write a page. An earlier page is replaced, and no other file: raises InvalidInputError for
    one, and where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_is_page(path)
        path.write_bytes(html)
    except OSError as error:
        raise InvalidInputError(
            "output", str(path), f"cannot be written: {error.strerror}; give another file"
        ) from None


def _check_is_page(path: Path) -> None:
    if not path.is_file():
        return
    with path.open("rb") as file:
        begin = file.read(len(PAGE_BEGIN))
    if begin and begin != PAGE_BEGIN:
        raise InvalidInputError(
            "output", str(path), "exists and is not a report; give another file"
        )


def csp_hash(inline: str) -> str:
    """The source of an inline script or style as a Content-Security-Policy names it."""
    digest = hashlib.sha256(inline.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
