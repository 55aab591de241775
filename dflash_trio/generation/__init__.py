"""Floor 1: the vocabulary of a generation, shared by every floor above. Pure data."""
