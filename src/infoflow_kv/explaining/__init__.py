"""The report of one request as one HTML file. No torch here: a dictionary goes in, text comes out."""

from infoflow_kv.explaining.page import FORMAT, render_page

__all__ = ["FORMAT", "render_page"]
