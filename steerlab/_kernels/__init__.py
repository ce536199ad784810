"""Triton kernels: what is measured row by row of logits, and the parts of a pass over one token per row, on a GPU."""
