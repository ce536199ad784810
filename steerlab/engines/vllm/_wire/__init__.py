"""What travels between the caller's process and vLLM's: requests, plans, commands and the configuration."""
