"""report.html: one file that opens offline and shows how a run went, made from the run directory alone."""

from ftcli.run.report.page import render_report, write_report

__all__ = ["render_report", "write_report"]
