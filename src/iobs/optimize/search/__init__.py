"""Search for the support: pursuits, swaps, random restarts."""
