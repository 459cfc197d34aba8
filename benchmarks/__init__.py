"""Throughput, latency and quality, ours and others' on the same work. README.md here says how to run them."""
