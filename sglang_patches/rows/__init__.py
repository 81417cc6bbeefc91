"""Rows of the catalog that are active in some servers only. Data, safe to import anywhere."""
