"""Minimise any smooth function under ||theta||_0 <= k."""
