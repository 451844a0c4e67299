"""Lower bounds on f over all supports of k coordinates."""
