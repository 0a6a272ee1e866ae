"""Many replicas of an engine behind one door. Ray is imported inside its own files only."""
