"""Text in and out of a model: templates, control tokens, stop strings, whole characters.

Everything here is pure: no event loop, no thread, no model library.
"""
