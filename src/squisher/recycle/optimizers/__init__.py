"""What each optimizer keeps, and what its accumulator means."""
