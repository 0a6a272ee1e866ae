"""What all benchmarks share: command line, rows, timing, races of engines, shapes and traces."""
