"""Calls of tools in a model's answer: the formats of model families, and their parsers."""
