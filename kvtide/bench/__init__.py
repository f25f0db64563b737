"""Benchmarks behind `kvtide bench …`: what is measured, by which command, in one run."""
