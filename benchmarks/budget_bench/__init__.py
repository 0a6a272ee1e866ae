"""The parts of `bench_budget.py`: each gives the rows of one subject."""
