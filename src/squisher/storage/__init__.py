"""Bytes on disk: lazy tensors, safetensors and torch files, model folders. Knows nothing of importances or optimizers."""
