"""What is replaced in vLLM: one file per place, which says why and which versions it fits; `plugin` installs all."""
