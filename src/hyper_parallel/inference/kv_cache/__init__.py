"""The paged KV cache: pages on the device and in offload tiers, moves between them, and what is kept between runs."""
