"""The report of one request as one HTML file. No torch here: a dictionary goes in, text comes out."""

from infoflow_kv.explaining.page import render_page
from infoflow_kv.explaining.reports import FORMAT, selections

__all__ = ["FORMAT", "render_page", "selections"]
