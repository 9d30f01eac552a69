"""Code that the benchmarks share: problems, peers, times, counts and records."""
