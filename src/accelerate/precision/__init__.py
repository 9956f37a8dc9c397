"""Number formats: which context a forward pass runs in, and how a loss is scaled."""
