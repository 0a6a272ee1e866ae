"""One console for log lines, progress and summary."""

from __future__ import annotations

import logging

import rich
from rich.markup import escape

_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}


class ConsoleHandler(logging.Handler):
    """Prints through rich's own console, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        text = escape(self.format(record))
        style = _STYLES.get(record.levelno)
        prefix = f"[{style}]{record.levelname.lower()}:[/] " if style else ""
        rich.get_console().print(prefix + text, highlight=False, soft_wrap=True)
