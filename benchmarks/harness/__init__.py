"""What several benchmarks share: clocks, data, plain loops, limits and the files of results."""
