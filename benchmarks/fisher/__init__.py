"""The Fisher engine beside a plain training step, the loop, vmap and the peers."""
