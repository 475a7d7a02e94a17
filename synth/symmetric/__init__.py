"""Synthesis on the quotient: one representative of each orbit under a group of symmetries, expanded at the end."""
