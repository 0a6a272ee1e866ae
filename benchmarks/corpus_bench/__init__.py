"""The parts of `bench_corpus.py`: each gives the rows of one subject."""
