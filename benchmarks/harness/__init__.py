"""The harness of all benchmarks: command line, rows, timing, races of engines, shapes, traces."""
