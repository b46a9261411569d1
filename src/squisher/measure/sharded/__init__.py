"""Models that are spread over processes: `fully_shard` (FSDP2), tensor parallelism, and both.

`meshes` says how a model is spread and who has which examples, `shards` knows the groups of parameters that are gathered together and adds
squares into shards, `parallel` does the same for tensor parallelism, `passes` has the passes that all processes make at the same time, and
`together` is the engine that decides which.
"""
