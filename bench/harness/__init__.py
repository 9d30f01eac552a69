"""Networks, peers, timers, tables and records that the benchmarks share."""
