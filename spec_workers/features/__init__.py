"""Hidden states of what is rolled out, recorded for those who train drafts."""
