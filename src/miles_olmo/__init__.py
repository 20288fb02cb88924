"""Reinforcement learning for Olmo mixture-of-experts models, from a TOML file to an exported model."""

__version__ = "0.1.0"
