"""Frameworks and other tools: each module imports its framework inside functions, or not at all.

`recording` is what the callbacks of `transformers` and `lightning` share. `model_folders` merges and prunes folders for the
commands, with `peft` for adapters and `publishing` for cards; `text` feeds `squisher fisher`; `mergekit` and `exports` serve
other tools.
"""
