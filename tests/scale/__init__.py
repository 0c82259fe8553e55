"""Jobs of any size in memory of one size: `make scale` measures it, and a small version of it is in the suite."""
