"""The laboratory: predict, score, report."""
