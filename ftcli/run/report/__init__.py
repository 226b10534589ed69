"""report.html: one file that opens offline and shows how a run goes or went, made from the run directory alone."""

from ftcli.run.report.live import LiveReport
from ftcli.run.report.page import Live, render_report, write_report

__all__ = ["Live", "LiveReport", "render_report", "write_report"]
