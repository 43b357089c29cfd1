"""Gemma 3: layers with a window of their own, and RoPE that the model applies, not the cache."""
