"""Recovery: ranks that were lost are replaced, or all start again, from a state that others hold in memory."""
