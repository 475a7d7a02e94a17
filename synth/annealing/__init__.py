"""Local search over whole schedules: routes, what shares a message, and who goes first."""
