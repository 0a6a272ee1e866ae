"""`specrollout report`: from the logs of runs to a verdict and a page. Reads files only."""

from rollout.report.report import write_report

__all__ = ["write_report"]
