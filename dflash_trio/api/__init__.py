"""Floor 5: the dialects. Each is a parser, an encoder and an error shape, nothing more."""
