"""What is sent, by which route and when: `python -m benchmarks.communication`."""
