"""Text files become token shards: `shardwise prepare`.

inputs.py finds the files, documents.py cuts them into pieces of work and takes the documents out of a piece, worker.py
turns them into tokens, and work.py keeps what is done, so that a later start goes on. run.py has the order.
"""
