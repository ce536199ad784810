"""What is replaced in vLLM 0.32: one file per place."""
