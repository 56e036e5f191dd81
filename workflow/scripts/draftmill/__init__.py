"""Draftmill: prompts in, training data for speculative-decoding drafters out."""

__version__ = "0.1.0"
