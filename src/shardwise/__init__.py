"""shardwise: Lightning training recipes, one module under any strategy."""

from shardwise.protocols import gathered_weights

__all__ = ["gathered_weights"]
__version__ = "0.1.0"
