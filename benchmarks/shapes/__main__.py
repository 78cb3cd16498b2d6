"""`python -m benchmarks.shapes`."""

from benchmarks.shapes.measure import main

main()
