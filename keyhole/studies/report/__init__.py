"""The report of a study: verdicts in words, tables, charts; for the terminal, as Markdown and as one HTML file."""

from keyhole.studies.report.write import Report, write_report

__all__ = ["Report", "write_report"]
