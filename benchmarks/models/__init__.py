"""Models end to end: eager, Inductor, Inductor with async TP and mkcompile, each checked and then timed in turn."""
