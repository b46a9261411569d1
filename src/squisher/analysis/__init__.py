"""What can be learnt from an importance: its health, its agreement with another, its distribution."""
