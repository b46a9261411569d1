"""Squisher inside the tools that people already use; each bridge imports its framework only when it is called."""
