"""Offload scheduling: which storage leaves the device when, and to which tier, so that the peak meets a budget."""
