"""Irregular clusters of many ranks: routes between nodes and within them, composed, and timed as columns."""
