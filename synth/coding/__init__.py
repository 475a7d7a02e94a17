"""Which messages of a schedule travel coded, and what that makes of its time."""
