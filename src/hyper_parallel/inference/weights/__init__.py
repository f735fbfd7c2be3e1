"""Weights in offload tiers, streamed module by module through a buffer on the device."""
