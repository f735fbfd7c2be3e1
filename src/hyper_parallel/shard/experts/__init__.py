"""Mixture-of-experts layers: their plan, how tokens reach their experts and come back, and how evenly they spread."""
