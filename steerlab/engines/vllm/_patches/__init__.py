"""What is replaced in vLLM: one file per place, which says why; `plugin` installs all. `touched` lists every name."""
