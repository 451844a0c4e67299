"""Methods: update rules from one sparse iterate to the next."""
