"""Reads a profile of some steps: where does each step's time go, and which rank is slow for what reason?

    trace = read_trace("rank-0.json.gz")
    summary = summarize(trace, rank=0)            # .to_json(), ProfileSummary.from_json(text)
    print(table(summary))
    draw(summary, trace, "rank-0.png")
    summarize_ranks([summary, …])                 # .text says which rank is slow

No torch is imported here. A program that records a trace helps the reader by annotations (record_function):
`shardwise::data`, `shardwise::forward`, `shardwise::backward`, `shardwise::optimizer`, `shardwise::save` and
`shardwise::validation` around phases, and `shardwise::step#N` around a step where torch.profiler's own
`ProfilerStep#N` is missing.
"""

from shardwise_tools.traces.chrome import read_trace
from shardwise_tools.traces.picture import draw, table
from shardwise_tools.traces.summary import ProfileSummary, RanksSummary, summarize, summarize_ranks
from shardwise_tools.traces.trace import Trace

__all__ = [
    "ProfileSummary", "RanksSummary", "Trace", "draw", "read_trace", "summarize", "summarize_ranks", "table",
]  # fmt: skip
