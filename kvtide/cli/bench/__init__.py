"""The benchmarks of `kvtide bench` that have a file of their own, with arguments and tables."""
