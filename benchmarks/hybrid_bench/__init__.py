"""What recurrent layers cost: their states' memory, verification, and what drafts are worth."""
