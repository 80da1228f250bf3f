"""SubSpec (arXiv 2509.18344): speculative decoding for offloaded models, with a draft made of the target itself."""

from repro.methods.subspec.config import Config

__all__ = ["Config"]
