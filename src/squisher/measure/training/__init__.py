"""The Fisher while a model is trained, for `Tracker(per="example")`: the user's own step, watched.

`step` is one optimizer step, `step_pass` its forward and backward pass and their proof, `reductions` the factors of its loss, and
`sharded_step` the same for a model that is sharded over processes.
"""
