"""What a search's counted work costs: estimates in seconds, by which it ends at the same place on every machine.

A search that the clock ends gives another answer whenever the machine is busy. So every stage counts what it does
(transfers timed, hops grown, deterministic seconds of CP-SAT) and weighs it by these estimates; the sum is held
against the limit, and the clock is a safety net behind it. The estimates are of one core of a server; they need not be
exact, and changing one changes answers.
"""

from __future__ import annotations

# Of a limit, what counted work may come to: the sum is off by up to a third either way.
SHARE = 0.8
# Of that, the work of all seeds together, and of forests among them; models want their turn.
SEEDS_SHARE = 0.65
FORESTS_SHARE = 0.5

# A transfer timed by one scheduler, and what more for each link of the machine.
TIMED_S = 10e-6
TIMED_LINK_S = 10e-9
# A message of a schedule that is checked; one that is timed again with messages that are late.
CHECKED_S = 10e-6
LATE_S = 20e-6
# A (chunk, link) pair: of a problem that is stated, of greedy trees, of a growth on the quotient.
STATED_S = 0.2e-6
GREEDY_S = 3e-6
LOOK_S = 3.5e-6
# A message of a forest that is rounded, pipelined and expanded.
PIPED_S = 40e-6
# A message of a schedule composed of nodes; one between nodes whose length is chosen.
COMPOSED_S = 80e-6
CUT_S = 25e-6
# A hop clocked by local search, or by the search for other ways of trees to every rank.
CLOCKED_S = 0.8e-6
# A deterministic second of CP-SAT with the linear relaxation.
SOLVED_S = 4.5
# A (chunk, link) pair of a model, to build it: of loads alone, of times, and of messages for each slot.
LOAD_HOP_S = 20e-6
TREE_HOP_S = 140e-6
SLOT_S = 20e-6
