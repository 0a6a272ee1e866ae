"""`specrollout report`: from a run's log to a page and plots. Reads files only."""

from rollout.report.report import Report, write_report

__all__ = ["Report", "write_report"]
