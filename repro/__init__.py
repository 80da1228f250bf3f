"""lowbit-repro: rebuild the tables and figures of low-bit LLM papers and compare them with the printed numbers."""

__version__ = "0.1.0"
