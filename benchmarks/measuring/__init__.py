"""How work is done, by mtask and by bare calls, and how its time and its costs are measured."""
