"""What can be learnt from an importance, each in bounded memory.

`distribution` has quantiles and histograms of its values, `health` diagnoses from values and provenance, `agreement` the
comparison with another importance.
"""
