"""shardwise: Lightning training recipes, one module under any strategy."""

__version__ = "0.1.0"
