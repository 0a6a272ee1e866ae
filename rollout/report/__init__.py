"""`specrollout report`: from a run's log to one page and its plots. Knows files, not the engine."""

from rollout.report.report import Report, write_report

__all__ = ["Report", "write_report"]
