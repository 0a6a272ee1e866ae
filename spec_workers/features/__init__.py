"""Hidden states of what is rolled out, kept for those who train drafts."""
