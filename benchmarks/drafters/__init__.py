"""What a replay can drive: our corpus, and the peers it is measured beside."""
