"""Metrics of batches and windows, and their reduction over ranks."""
