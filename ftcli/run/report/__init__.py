"""report.html: one file that opens offline and shows how a run goes or went, made from the run directory alone."""

from ftcli.run.report.page import LiveProgress, LiveReport, render_report, write_report

__all__ = ["LiveProgress", "LiveReport", "render_report", "write_report"]
