"""What `rlvr bench` measures: this package beside its peers, in one run. `benchmarks.measure` defines the terms."""
