"""Generation on several workers: context-parallel passes, and requests split over replicas."""
