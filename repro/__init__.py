"""lowbit-repro: rebuild the tables and figures of low-bit LLM papers, beside what they printed."""

__version__ = "0.1.0"
