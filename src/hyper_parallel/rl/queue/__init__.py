"""The bound on staleness: which groups of answers may start, and which are trained next. No torch.

`StalenessQueue` is the controller's interface; `orders` has the three rules, `deadlines` their arithmetic.
"""

from hyper_parallel.rl.queue.staleness_queue import ORDERS, Counters, Order, StalenessQueue, Tally

__all__ = ["ORDERS", "Counters", "Order", "StalenessQueue", "Tally"]
