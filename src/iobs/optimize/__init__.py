"""Sparse optimisation: minimise f(theta) subject to norm(theta)_0 <= k for any smooth f."""
