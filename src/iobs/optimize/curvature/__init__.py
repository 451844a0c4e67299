"""Quadratic models of f: the Hessians that methods use."""
