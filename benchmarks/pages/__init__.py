"""One file for each page of `docs/` that `report.py` writes, whole or in part. No number in them is typed."""
