"""`roles: auto`: the devices of a run's roles, chosen from times that are measured on them before the first step."""
