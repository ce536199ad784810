"""Triton kernels for what is measured row by row of logits on a GPU; `steerlab.measures` falls back without them."""
