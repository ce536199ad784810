"""Families of models on which every shortcut was compared with plain Hugging Face, hook point by hook point."""

CHECKED_FAMILIES = frozenset("llama gpt2 qwen2 qwen3 gemma2 gemma3_text mistral olmo2 gpt_neox phi3".split())
