"""Says before a job where to cut it and which peer serves which stage: facts, a bound, a search, a plan."""
