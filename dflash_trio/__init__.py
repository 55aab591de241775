"""Several GGUF models behind one HTTP address, with structured concurrency throughout."""

__version__ = "0.1.0"
