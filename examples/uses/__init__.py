"""Real uses of the package, each over several seeds: `make uses USE=NAME`."""
