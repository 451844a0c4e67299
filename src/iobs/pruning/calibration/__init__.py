"""Forward passes of the calibration data: samples in, Gram matrices and losses out."""
