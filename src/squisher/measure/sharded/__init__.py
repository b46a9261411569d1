"""Models that are spread over processes: `fully_shard` (FSDP2), tensor parallelism, and both.

`meshes` says how a model is spread and who has which examples, `shards` knows the groups of parameters that are gathered together and adds
squares into shards, `parallel` does the same for tensor parallelism, and `together` is the engine: every process takes each step with the others.
"""
