"""The parts of `bench_eagle.py`: each gives the rows of one subject."""
