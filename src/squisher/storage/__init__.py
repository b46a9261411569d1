"""Bytes on disk: lazy tensors, safetensors and torch files, model folders. Knows nothing of importances or optimizers.

Read `byte_range` (bytes of a file that must not change), `tensors` (lazy mappings and their chunks), `safetensors`, `torch_files/`
(pickles without execution) and `folders` (models) in this order. `atomic` writes whole or not at all, `codecs` makes files
smaller, `hub` downloads, `json_files` and `hdf5_probe` guard against hostile files.
"""
