"""`python -m shardwise export …`: the tools, where the console script is not installed."""

import sys

from shardwise_tools import main

if __name__ == "__main__":
    sys.exit(main())
