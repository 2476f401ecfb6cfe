"""Hugging Face's files: the hub, configs, safetensors headers, model folders; no torch."""
