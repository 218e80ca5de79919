"""What tensor, context, pipeline and FSDP axes cost, from plain numbers: idle time, memory, and what a rank sends.

The letters are those of the papers: p ranks of a pipeline with v stages each, m micro-batches of b samples with s
tokens in a step, width h, a heads of which k have keys of their own, t tensor ranks, c context ranks, and n ranks that
shard a weight. What is sent is counted in elements, one rank's, in one step; a ring moves what the formulas say.
"""

from __future__ import annotations

from shardwise.plan.pipeline_schedule import GPIPE, ONE_F_ONE_B


def bubble(ranks: int, chunks: int, micro_batches: int) -> float:
    """The idle time of a pipeline over its ideal time, where all stages cost the same: (p−1)/(v·m).

    Narayanan et al. 2021, arXiv 2104.04473; for v = 1 GPipe, arXiv 1811.06965.
    """
    return (ranks - 1) / (chunks * micro_batches)


def idle_share(ranks: int, chunks: int, micro_batches: int) -> float:
    """The share of a step in which a rank waits, where all stages cost the same: (p−1)/(v·m+p−1)."""
    return (ranks - 1) / (chunks * micro_batches + ranks - 1)


def micro_batches_kept(schedule: str, position: int, ranks: int, chunks: int, micro_batches: int) -> float:
    """The micro-batches whose activations a rank of a pipeline keeps at most, in micro-batches through all its stages.

    GPipe m; 1F1B p−r; interleaved (2(p−r−1)+(v−1)p+1)/v; never more than m. r: the position, 0 with the first layers.
    Korthikanti et al. 2022, arXiv 2205.05198.
    """
    if schedule == GPIPE:
        return micro_batches
    if schedule == ONE_F_ONE_B:
        return min(ranks - position, micro_batches)
    return min((2 * (ranks - position - 1) + (chunks - 1) * ranks + 1) / chunks, micro_batches)


def pipeline_elements(
    *, micro_batches: int, samples: int, tokens: int, width: int, chunks: int = 1, context: int = 1, tensor: int = 1
) -> float:
    """What a rank in the middle of a pipeline hands over: 2·m·v·b·s·h/(c·t), activations on and gradients back.

    The division by t is that of sequence parallelism: between layers, each tensor rank has a part of the tokens.
    """
    return 2 * micro_batches * chunks * samples * tokens * width / (context * tensor)


def tensor_elements(
    *, layers: float, micro_batches: int, samples: int, tokens: int, width: int, tensor: int, context: int = 1
) -> float:
    """What tensor and sequence parallelism send inside the layers: 8·b·s·h/c·(t−1)/t, a layer and a micro-batch.

    Two gathers and two scatters forward, as many backward. Shoeybi et al. 2019, arXiv 1909.08053, and 2205.05198.
    """
    return 8 * layers * micro_batches * samples * tokens * width / context * (tensor - 1) / tensor


def tensor_end_elements(
    *, micro_batches: int, samples: int, tokens: int, width: int, tensor: int, context: int = 1
) -> float:
    """What tensor parallelism sends at the embedding and at the loss: (4·h+6)·b·s/c·(t−1)/t, a micro-batch.

    A scatter behind the embedding and a gather before the head, and both again backward; three all-reduces of one
    number a token (maximum, sum, the target's logit), each of which sends twice its size.
    """
    return (4 * width + 6) * micro_batches * samples * tokens / context * (tensor - 1) / tensor


def context_elements_by_heads(
    *, layers: float, micro_batches: int, samples: int, tokens: int, width: int, heads: int, key_heads: int,
    context: int, tensor: int = 1,
) -> float:  # fmt: skip
    """What context parallelism by heads sends: 2·(2+2k/a)·b·s·h/(c·t)·(c−1)/c, a layer and a micro-batch.

    Queries, keys and values go out, the result comes back, each by an all-to-all; the gradients do the same.
    DeepSpeed-Ulysses, arXiv 2309.14509.
    """
    each_way = (2 + 2 * key_heads / heads) * samples * tokens * width / (context * tensor) * (context - 1) / context
    return 2 * layers * micro_batches * each_way


def context_elements_by_keys(
    *, layers: float, micro_batches: int, samples: int, tokens: int, width: int, heads: int, key_heads: int,
    context: int, tensor: int = 1,
) -> float:  # fmt: skip
    """What context parallelism by gathered keys and values sends: 2·(2k/a)·b·s·h/t·(c−1)/c, a layer and a micro-batch.

    Keys and values are gathered; their gradients are scattered. Llama 3, arXiv 2407.21783.
    """
    each_way = 2 * key_heads / heads * samples * tokens * width / tensor * (context - 1) / context
    return 2 * layers * micro_batches * each_way


def fsdp_gathered_elements(*, parameters: float, shards: int, gathers: int) -> float:
    """What FSDP sends to gather a rank's weights: (n−1)/n·P, `gathers` times.

    P: the parameters of the rank's stage and tensor part, before FSDP shards them. n = shard · context.
    """
    return gathers * parameters * (shards - 1) / shards


def fsdp_scattered_elements(*, parameters: float, shards: int, micro_batches: int, once: bool = False) -> float:
    """What FSDP sends to add up gradients and scatter them: (n−1)/n·P, m times.

    P and n as for gathering. `once`: they add up unsharded, and are scattered after the last micro-batch.
    """
    return (1 if once else micro_batches) * parameters * (shards - 1) / shards


def state_bytes(
    *, parameters: float, shards: int, gathered: bool = False, synced_once: bool = False, bytes_per_parameter: int = 16
) -> float:
    """The bytes of a rank's weights, gradients and optimizer state: 16·P/n, where P/t has been divided already.

    16: weights, gradients and AdamW's two averages in fp32. `gathered` adds 2·P, the weights in 16 bits over the whole
    step; `synced_once` adds 4·P, the unsharded gradients in fp32.
    """
    return bytes_per_parameter * parameters / shards + (2 * gathered + 4 * synced_once) * parameters
