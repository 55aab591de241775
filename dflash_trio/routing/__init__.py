"""Floor 3: which model answers a request, and for how long its capacity is held."""
