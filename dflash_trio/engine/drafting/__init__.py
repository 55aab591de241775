"""Drafts: tokens that are guessed cheaply, and verified by the model many at a time."""
