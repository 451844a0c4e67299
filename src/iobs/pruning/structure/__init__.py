"""Units of a network (channels, neurons, heads), and their physical removal."""
