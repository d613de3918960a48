"""Paged and quantized KV cache, AWQ/GPTQ checkpoints and continuous batching inside Hugging Face Transformers."""
