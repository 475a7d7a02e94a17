"""Trees for the bandwidth regime: packed to the fluid optimum, rounded to whole chunks, pipelined."""
