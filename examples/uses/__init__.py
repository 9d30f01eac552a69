"""Uses of the package on real problems, each over several seeds: `make uses USE=NAME`."""
