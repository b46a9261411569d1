"""Side-by-side runs against peers: one run, interleaved, as ratios; results are committed as JSON with their environment."""
