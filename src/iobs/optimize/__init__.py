"""Sparse optimisation: minimise f(theta) subject to norm(theta)_0 <= k for any smooth f.

Packages; each imports only from packages before it (`tests/test_floors.py`):

    objectives  smooth functions f: least squares, logistic, Poisson, any torch function
    problem     f with k, forced coordinates and groups
    curvature   quadratic models of f: which Hessian a method uses
    refit       minimising f on a given support
    search      the search for a support: pursuits, swaps, paths
    bounds      lower bounds: how far an answer can be from the best support
    methods     update rules, one file each, and their names
    estimators  scikit-learn estimators
    minimize    iobs.minimize
"""
